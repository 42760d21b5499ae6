"""The witness must tell: any single wrong bit of KV that a request can see changes its tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ebbtide.core.groups import KVGroup
from ebbtide.core.plan import Direction, Row, StepPlan, Table, Transfer, TransferResult
from ebbtide.params import SamplingParams
from ebbtide.testing.witness import (
    WitnessExecutor,
    WitnessMemory,
    WitnessModel,
    WitnessTape,
    oracle,
)

GROUPS = [(KVGroup(),), (KVGroup(), KVGroup(5)), (KVGroup(3), KVGroup(), KVGroup(1))]
SIZE, NUM_BLOCKS = 4, 30
SAMPLING = SamplingParams(seed=1)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


class Bench:
    """One request on a witness executor, without a scheduler."""

    def __init__(self, groups: tuple[KVGroup, ...], seed: int = 0) -> None:
        self.model = WitnessModel(groups)
        self.memory = WitnessMemory(self.model, NUM_BLOCKS, SIZE)
        self.executor = WitnessExecutor(self.model, self.memory, TransferResult)
        blocks = random.Random(seed).sample(range(NUM_BLOCKS), 8 * len(groups))
        self.tables = tuple(Table(0, blocks[i * 8 : i * 8 + 8]) for i in range(len(groups)))
        self.tokens = list(PROMPT)

    def plan(self, start: int, end: int, *, sample: bool = True) -> StepPlan:
        sampling = SAMPLING if sample else None
        known = len(self.tokens)
        row = Row("a", self.tokens, known, start, end, self.tables, sampling, end - len(PROMPT))
        return StepPlan(1, [row], [], end - start)

    def run(self, start: int, end: int, *, sample: bool = True) -> int | None:
        outcome = self.executor.submit(self.plan(start, end, sample=sample)).result()
        return outcome.tokens[0] if sample else None


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("cuts", [[11], [4, 11], [1, 2, 3, 11], [5, 10, 11]])
def test_executor_equals_oracle_however_the_prompt_is_cut(
    groups: tuple[KVGroup, ...], cuts: list[int]
) -> None:
    bench = Bench(groups)
    start = 0
    for end in cuts[:-1]:
        bench.run(start, end, sample=False)
        start = end
    output = [bench.run(start, cuts[-1])]
    for _ in range(6):
        bench.tokens.append(output[-1])
        output.append(bench.run(len(bench.tokens) - 1, len(bench.tokens)))
    assert output == oracle(bench.model, PROMPT, SAMPLING, 7)


def test_a_token_that_is_still_being_sampled_comes_from_the_step_before() -> None:
    bench = Bench(GROUPS[1])
    first = bench.executor.submit(bench.plan(0, 11))
    second = bench.executor.submit(bench.plan(11, 12))
    assert not second.done()
    tokens = [second.result().tokens[0], first.result().tokens[0]]
    assert tokens[::-1] == oracle(bench.model, PROMPT, SAMPLING, 2)


@pytest.mark.parametrize("groups", GROUPS)
def test_every_visible_word_matters_and_no_other(groups: tuple[KVGroup, ...]) -> None:
    """Spoil one word of KV at a time, then let the request go on from there."""
    honest = Bench(groups)
    honest.run(0, 10, sample=False)
    # compare all that the last position leaves behind: its token and its own KV
    before = honest.memory.words.copy()
    honest.run(10, 11)
    truth = _trace(honest)
    for number, group in enumerate(groups):
        for position in range(10):
            block = honest.tables[number].blocks[position // SIZE]
            for part in range(honest.model.slices):
                honest.memory.words[:] = before
                honest.memory.words[block, position % SIZE, part] ^= np.uint64(1 << 17)
                honest.run(10, 11)
                seen = position >= group.first_visible(10)
                assert (_trace(honest) != truth) == seen, (number, position, part)


def _trace(bench: Bench) -> list[int]:
    """KV that the run wrote for position 10."""
    return [int(w) for table in bench.tables for w in bench.memory.words[table.blocks[2], 2]]


def test_positions_and_slices_cannot_be_swapped() -> None:
    model = WitnessModel()
    assert model.weight([1, 2], 5) != model.weight([2, 1], 5)
    assert model.weight([1, 2], 5) + model.weight([3, 4], 6) != (
        model.weight([3, 4], 5) + model.weight([1, 2], 6)
    )


def test_memory_starts_as_garbage_that_is_nowhere_equal() -> None:
    words = WitnessMemory(WitnessModel(), 8, 4).words
    assert len(np.unique(words)) == words.size


def test_a_failed_sync_load_is_reported() -> None:
    bench = Bench(GROUPS[0])
    bench.executor = WitnessExecutor(
        bench.model, bench.memory, lambda t: TransferResult(t, "lost" if t.id == 2 else "")
    )
    loads = [Transfer(i, Direction.LOAD, b"", 0, 0, (20 + i, 24 + i)) for i in (1, 2)]
    plan = bench.plan(0, 11)
    outcome = bench.executor.run(StepPlan(1, plan.rows, loads, 11))
    assert outcome.invalid_blocks == {22, 26}


def test_sampling_depends_on_seed_and_index_alone() -> None:
    model = WitnessModel(vocabulary=1 << 30)
    visible = [123]
    tokens = {
        model.next_token(visible, SamplingParams(seed=seed), index)
        for seed in (1, 2)
        for index in (0, 1)
    }
    assert len(tokens) == 4


def test_a_copied_tape_goes_its_own_way() -> None:
    tape = WitnessTape(WitnessModel(GROUPS[1]))
    for token in PROMPT:
        tape.push(token)
    other = tape.copy()
    assert tape.push(1) == other.push(1)
    assert tape.push(1) != other.push(2)
