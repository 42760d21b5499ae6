"""Which chunks go below the device when a request ends or pauses. Chunks are 8 positions here.

With two plans in flight, the step that was already scheduled when a stop token came has written that
token's position: then it counts. With one, no step ever wrote it, and it must not be stored.
"""

from __future__ import annotations

import pytest

from ebbtide.core.groups import KVGroup
from ebbtide.core.request import FinishReason, State
from ebbtide.params import RepetitionStop

from .harness import Harness, tokens

both = pytest.mark.parametrize("overlap", [1, 2])


def harness(overlap: int, **config: object) -> Harness:
    return Harness(block_size=4, blocks_per_chunk=2, overlap=overlap, **config)


@pytest.mark.parametrize(
    ("overlap", "output", "stored"),
    [
        *[(1, 1, []), (1, 2, []), (1, 3, [0])],  # the last token: before, on, after the chunk's end
        *[(2, 1, []), (2, 2, []), (2, 3, [0])],  # a cap is foreseen: no step follows the last token
    ],
)
def test_length(overlap: int, output: int, stored: list[int]) -> None:
    h = harness(overlap)
    h.add("a", tokens(6), max_tokens=output)
    h.run()
    assert h.finish("a") is FinishReason.LENGTH
    assert h.chunks_below(tokens(6) + h.output("a")) == stored
    h.check_drained()


@pytest.mark.parametrize(
    ("kind", "overlap", "output", "stored"),
    [
        *[("stop", 1, 1, []), ("stop", 1, 2, []), ("stop", 1, 3, [0])],
        *[("stop", 2, 1, []), ("stop", 2, 2, [0]), ("stop", 2, 3, [0])],
        *[("repetition", 1, 2, []), ("repetition", 1, 3, [0])],
        *[("repetition", 2, 2, [0]), ("repetition", 2, 3, [0])],
    ],
)
def test_stop_token_and_repetition(kind: str, overlap: int, output: int, stored: list[int]) -> None:
    if kind == "stop":
        h = harness(overlap)
        stop = h.foretell(tokens(6), output)[-1]
        h.add("a", tokens(6), max_tokens=9, stop=[stop])
    else:
        h = harness(overlap, vocabulary=1)  # it says the same token for ever
        h.add("a", tokens(6), max_tokens=9, repetition=RepetitionStop(1, output))
    h.run()
    assert h.finish("a") is FinishReason[kind.upper()]
    assert len(h.output("a")) == output
    assert h.chunks_below(tokens(6) + h.output("a")) == stored
    h.check_drained()


@both
def test_stop_string_is_found_by_the_owner_while_a_step_is_in_flight(overlap: int) -> None:
    h = harness(overlap)
    h.add("a", tokens(6), max_tokens=9)
    h.step()
    h.step()  # 8 tokens, of which the last is fed by the step that the owner cannot stop any more
    h.schedule()
    h.end("a", FinishReason.STOP)
    assert h.stored == []  # a step in flight may still write
    h.run()
    assert h.finish("a") is FinishReason.STOP
    assert h.chunks_below(tokens(6) + h.output("a")) == [0]
    assert len(h.output("a")) == 2  # what the step in flight sampled is dropped
    h.check_drained()


def test_aborted_while_the_prompt_is_computed() -> None:
    h = harness(1, step_tokens_max=9)
    h.add("a", tokens(30))
    h.step()
    h.schedule()
    h.end("a")
    assert h.state("a") is State.DRAINING
    h.apply()
    h.move_all()
    assert h.chunks_below(tokens(30)) == [0, 1]  # 18 positions were fed
    h.check_drained()


def test_aborted_before_the_sampled_token_is_known() -> None:
    """The second step writes position 7, but of a token that nobody will ever hear of."""
    h = harness(2)
    h.add("a", tokens(7), max_tokens=9)
    h.schedule()
    h.schedule()
    h.end("a")
    h.apply()
    h.apply()
    assert h.output("a") == []
    assert h.stored == []
    h.check_drained()


def test_aborted_while_waiting_builds_no_store() -> None:
    h = harness(1, batch_max=1)
    h.add("a", tokens(20), max_tokens=20)
    h.step()
    before = list(h.stored)
    h.add("b", tokens(20, start=5))
    h.manager.store = h.manager.end = None  # type: ignore[method-assign, assignment]
    h.end("b")
    assert h.finish("b") is FinishReason.ABORT
    assert h.stored == before


@both
def test_aborted_while_loading_keeps_the_blocks_until_the_transfer_returns(overlap: int) -> None:
    h = harness(overlap)
    h.warm("a", tokens(20), device=False)
    stored = len(h.stored)
    h.add("b", tokens(20))
    h.schedule()
    assert h.state("b") is State.LOADING
    h.end("b")
    assert h.finish("b") is FinishReason.ABORT
    assert h.scheduler.kv.pool.available == 64 - 4  # 2 chunks of 2 blocks are still being written
    h.move_all()
    assert len(h.stored) == stored
    h.check_drained()


@both
def test_preempted(overlap: int) -> None:
    h = harness(overlap, num_blocks=9, length_max=36)
    h.add("a", tokens(10), max_tokens=20)
    h.add("b", tokens(18, start=1), max_tokens=2)
    h.step()
    h.move_all()
    h.run(until=lambda: h.scheduler.counters.preemptions > 0 and not h.scheduler._draining)
    assert h.chunks_below(tokens(18, start=1)) == [0, 1]
    h.run()
    h.check_drained()


@both
def test_lost_kv_stores_what_lies_before_it(overlap: int) -> None:
    h = harness(overlap, stores_max=0)  # nothing is stored before the end
    h.add("a", tokens(20), max_tokens=9)
    h.step()
    h.manager._stores_max = 64
    bad = h.requests["a"].tables[0].blocks[3]
    while len(h.plans) < overlap:
        h.schedule()
    h.apply(invalid=[bad])  # positions 12 .. 15
    while h.plans:
        h.apply()
    assert len(h.stored) == 1
    h.move_all()
    assert h.chunks_below(tokens(20)) == [0]
    h.run()
    h.check_drained()


@both
def test_a_failed_step_stores_nothing_that_it_wrote(overlap: int) -> None:
    h = harness(overlap, step_tokens_max=8, max_step_retries=0)
    h.add("a", tokens(24))
    h.step()
    h.step(error="the device fell over")
    while h.plans:
        h.apply()
    h.move_all()
    assert h.finish("a") is FinishReason.ERROR
    assert h.chunks_below(tokens(24)) == [0]
    h.check_drained()


def test_a_chunk_that_found_no_room_is_stored_later() -> None:
    h = harness(1, stores_max=1)
    h.add("a", tokens(17), max_tokens=20)
    h.step()
    assert len(h.stores) == 1
    h.run(until=lambda: len(h.output("a")) == 10)
    assert h.chunks_below(tokens(17)) == [0, 1]


def test_a_chunk_whose_store_failed_is_not_found_and_is_stored_again_by_the_next() -> None:
    h = harness(1)
    h.add("a", tokens(17), max_tokens=1)
    h.step()
    h.move(h.stores[0], error="no")
    h.run()
    assert h.chunks_below(tokens(17)) == [1]
    h.add("b", tokens(17), max_tokens=1)
    h.run()
    assert h.chunks_below(tokens(17)) == [0, 1]
    h.check_drained()


@both
def test_sliding_window_stores_chunks_before_it_leaves_them_behind(overlap: int) -> None:
    h = Harness(
        overlap=overlap,
        block_size=4,
        blocks_per_chunk=3,
        groups=(KVGroup(window=4),),
        step_tokens_max=4,
    )
    h.add("a", tokens(30), max_tokens=1)
    h.run()
    assert h.chunks_below(tokens(30)) == [0, 1]
    h.check_drained()
