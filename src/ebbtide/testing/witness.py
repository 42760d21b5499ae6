"""The witness executor: stands in for a model, and tells by its tokens if any KV was wrong.

The "KV" of a position, per group and per slice (as of a layer), is a fingerprint of its token and
of all the KV that its query can see. It lives in real block memory, and is moved through the real
tiers. The next token is a hash of all the KV that is visible from the last position. So one wrong,
stale, missing or misplaced block changes the tokens, and the oracle, which computes the same from
the prompt alone, disagrees.

``visible[g]`` below is the sum, over the positions that group g sees, of their mixed fingerprints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ebbtide.core.groups import KVGroup
from ebbtide.core.plan import Row, StepOutcome, StepPlan, Transfer, TransferResult
from ebbtide.params import SamplingParams

MASK = (1 << 64) - 1
VOCABULARY = 50
Words = npt.NDArray[np.uint64]


def _mix(value: int) -> int:
    """A bijection of 64 bits in which every bit depends on every bit (splitmix64's finaliser)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def _mix_words(values: Words) -> Words:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class WitnessModel:
    groups: tuple[KVGroup, ...] = (KVGroup(),)
    slices: int = 2
    vocabulary: int = VOCABULARY

    def fingerprints(self, token: int, position: int, visible: Sequence[int]) -> list[list[int]]:
        """KV of a position, [group][slice], given what it sees of the positions before it."""
        state = _mix(token ^ _mix(position))
        for seen in visible:
            state = _mix(state ^ seen)
        return [
            [_mix(state ^ (group << 8 | part)) for part in range(self.slices)]
            for group in range(len(self.groups))
        ]

    def weight(self, fingerprints: Sequence[int], position: int) -> int:
        """What one position of one group adds to ``visible``: it tells slices and positions apart."""
        return sum(
            _mix(value ^ (position * self.slices + part)) for part, value in enumerate(fingerprints)
        )

    def next_token(self, visible: Sequence[int], sampling: SamplingParams, index: int) -> int:
        state = _mix((sampling.seed or 0) & MASK) ^ index
        for seen in visible:
            state = _mix(state ^ seen)
        return state % self.vocabulary


class WitnessTape:
    """The KV of one sequence, computed from its tokens alone: no block, no cache, no batch."""

    def __init__(self, model: WitnessModel) -> None:
        self.model = model
        self.visible = [0] * len(model.groups)
        self._weights: list[list[int]] = [[] for _ in model.groups]

    def push(self, token: int) -> list[list[int]]:
        """Append a token; returns its position's KV, [group][slice]."""
        position = len(self._weights[0])
        for number, group in enumerate(self.model.groups):
            if group.window is not None and position >= group.window:
                gone = self._weights[number][position - group.window]
                self.visible[number] = (self.visible[number] - gone) & MASK
        kv = self.model.fingerprints(token, position, self.visible)
        for number, fingerprints in enumerate(kv):
            weight = self.model.weight(fingerprints, position)
            self._weights[number].append(weight)
            self.visible[number] = (self.visible[number] + weight) & MASK
        return kv

    def copy(self) -> WitnessTape:
        other = WitnessTape(self.model)
        other.visible = list(self.visible)
        other._weights = [list(weights) for weights in self._weights]
        return other


def oracle(
    model: WitnessModel, prompt: Sequence[int], sampling: SamplingParams, count: int
) -> list[int]:
    """The first ``count`` tokens that follow the prompt, without any cache, block or stop rule."""
    tape = WitnessTape(model)
    for token in prompt:
        tape.push(token)
    tokens: list[int] = []
    for index in range(count):
        tokens.append(model.next_token(tape.visible, sampling, index))
        tape.push(tokens[-1])
    return tokens


class WitnessMemory:
    """Device memory for witness KV: [num_blocks, block_size, slices] words, garbage at first."""

    def __init__(self, model: WitnessModel, num_blocks: int, block_size: int) -> None:
        shape = (num_blocks, block_size, model.slices)
        self.block_size = block_size
        self.words: Words = np.arange(1, np.prod(shape) + 1, dtype=np.uint64).reshape(shape)
        self.words *= np.uint64(0xD1342543DE82EF95)
        self.block_bytes = block_size * model.slices * 8
        self._bytes = self.words.view(np.uint8).reshape(num_blocks, self.block_bytes)

    def load(self, block: int, source: npt.NDArray[np.uint8]) -> None:
        self._bytes[block] = source

    def store(self, block: int, target: npt.NDArray[np.uint8]) -> None:
        target[:] = self._bytes[block]


class WitnessStep:
    """The future of a submitted plan: runs when asked for, in the order of submission."""

    def __init__(self, executor: WitnessExecutor, plan: StepPlan) -> None:
        self.plan = plan
        self.outcome: StepOutcome | None = None
        self._executor = executor

    def done(self) -> bool:
        return self.outcome is not None

    def result(self) -> StepOutcome:
        while self.outcome is None:
            self._executor.run_next()
        return self.outcome


class WitnessExecutor:
    """Runs plans over ``memory``. ``load`` moves the plans' sync loads."""

    def __init__(
        self,
        model: WitnessModel,
        memory: WitnessMemory,
        load: Callable[[Transfer], TransferResult],
    ) -> None:
        self.model = model
        self.memory = memory
        self._load = load
        self._pending: list[WitnessStep] = []
        self._sampled: dict[str, int] = {}  # by the last plan that was run

    def submit(self, plan: StepPlan) -> WitnessStep:
        step = WitnessStep(self, plan)
        self._pending.append(step)
        return step

    def close(self) -> None:
        self._pending.clear()

    def run_next(self) -> None:
        """Run the oldest plan that has not run."""
        step = self._pending.pop(0)
        step.outcome = self.run(step.plan)

    def run(self, plan: StepPlan) -> StepOutcome:
        results = [self._load(load) for load in plan.loads]
        invalid = frozenset(b for r in results if r.error for b in r.transfer.blocks)
        tokens: list[int] = []
        sampled: dict[str, int] = {}
        for row in plan.rows:
            visible = self._feed(row)
            if row.sampling is not None:
                token = self.model.next_token(visible, row.sampling, row.output_index)
                tokens.append(token)
                sampled[row.request_id] = token
        self._sampled = sampled
        return StepOutcome(tokens, invalid_blocks=invalid)

    def _feed(self, row: Row) -> list[int]:
        """Write the KV of the row's positions; returns what the last one sees, itself included."""
        model = self.model
        weights = [self._weights(row, number) for number in range(len(model.groups))]
        visible = [sum(w.values()) & MASK for w in weights]
        for position in range(row.start, row.end):
            for number, group in enumerate(model.groups):
                if group.window is not None:
                    gone = weights[number].get(position - group.window, 0)
                    visible[number] = (visible[number] - gone) & MASK
            token = row.tokens[position] if position < row.known else self._sampled[row.request_id]
            kv = model.fingerprints(token, position, visible)
            for number, fingerprints in enumerate(kv):
                block, slot = self._place(row, number, position)
                self.memory.words[block, slot] = fingerprints
                weights[number][position] = model.weight(fingerprints, position)
                visible[number] = (visible[number] + weights[number][position]) & MASK
        return visible

    def _weights(self, row: Row, number: int) -> dict[int, int]:
        """Weights of what the row's first position sees of those before it, read from the blocks."""
        group = self.model.groups[number]
        first = group.first_visible(row.start)
        positions = range(first, row.start)
        if not positions:
            return {}
        size = self.memory.block_size
        table = row.tables[number]
        begin = first // size
        blocks = table.blocks[begin - table.first : -(-row.start // size) - table.first]
        words = self.memory.words[blocks].reshape(-1, self.model.slices)
        words = words[first - begin * size : row.start - begin * size]
        salt = np.arange(first * self.model.slices, row.start * self.model.slices, dtype=np.uint64)
        mixed = _mix_words(words ^ salt.reshape(words.shape))
        return dict(zip(positions, mixed.sum(axis=1, dtype=np.uint64).tolist(), strict=True))

    def _place(self, row: Row, number: int, position: int) -> tuple[int, int]:
        index, slot = divmod(position, self.memory.block_size)
        return row.tables[number].blocks[index - row.tables[number].first], slot
