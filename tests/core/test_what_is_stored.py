"""Which chunks go below the device when a request ends or pauses. Chunks are 8 positions here.

With two plans in flight, the step that was already scheduled when a stop token came has written that
token's position: then it counts. With one, no step ever wrote it, and it must not be stored.
"""

from __future__ import annotations

import pytest

from ebbtide.core.groups import KVGroup
from ebbtide.core.request import FinishReason, State
from ebbtide.params import RepetitionStop

from .harness import FULL, MIXED, Harness, both, one_and_two_groups, tokens

Groups = tuple[KVGroup, ...]


def harness(overlap: int, groups: Groups, **config: object) -> Harness:
    return Harness(block_size=4, blocks_per_chunk=2, overlap=overlap, groups=groups, **config)


def said(h: Harness, name: str = "a") -> list[int]:
    return h.asked[name][0] + h.output(name)


# --- ends ----------------------------------------------------------------------------------


@one_and_two_groups
@pytest.mark.parametrize(
    ("overlap", "output", "stored"),
    [
        *[(1, 1, []), (1, 2, []), (1, 3, [0])],  # the last token: before, on, after the chunk's end
        *[(2, 1, []), (2, 2, []), (2, 3, [0])],  # a cap is foreseen: no step follows the last token
    ],
)
def test_length_ends_before_on_and_after_a_boundary(
    overlap: int, output: int, stored: list[int], groups: Groups
) -> None:
    h = harness(overlap, groups)
    h.add("a", tokens(6), max_tokens=output)
    h.run()
    assert h.finish("a") is FinishReason.LENGTH
    assert h.all_chunks_below(said(h)) == [stored] * len(groups)
    h.check_drained()


@one_and_two_groups
@pytest.mark.parametrize(
    ("kind", "overlap", "output", "stored"),
    [
        *[("stop", 1, 1, []), ("stop", 1, 2, []), ("stop", 1, 3, [0])],
        *[("stop", 2, 1, []), ("stop", 2, 2, [0]), ("stop", 2, 3, [0])],
        *[("repetition", 1, 2, []), ("repetition", 1, 3, [0])],
        *[("repetition", 2, 2, [0]), ("repetition", 2, 3, [0])],
    ],
)
def test_stop_token_and_repetition_end_before_on_and_after_a_boundary(
    kind: str, overlap: int, output: int, stored: list[int], groups: Groups
) -> None:
    if kind == "stop":
        h = harness(overlap, groups)
        stop = h.foretell(tokens(6), output)[-1]
        h.add("a", tokens(6), max_tokens=9, stop=[stop])
    else:
        h = harness(overlap, groups, vocabulary=1)  # it says the same token for ever
        h.add("a", tokens(6), max_tokens=9, repetition=RepetitionStop(1, output))
    h.run()
    assert h.finish("a") is FinishReason[kind.upper()]
    assert len(h.output("a")) == output
    assert h.all_chunks_below(said(h)) == [stored] * len(groups)
    h.check_drained()


@both
@one_and_two_groups
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.ABORT])
@pytest.mark.parametrize(("output", "stored"), [(1, []), (2, [0]), (3, [0])])
def test_stop_string_or_abort_while_a_step_feeds_the_last_token(
    overlap: int, groups: Groups, reason: FinishReason, output: int, stored: list[int]
) -> None:
    """The owner ends it; the steps in flight cannot be stopped. What the first one writes counts."""
    h = harness(overlap, groups)
    h.add("a", tokens(6), max_tokens=9)
    for _ in range(output):
        h.step()
    h.fill()
    before = len(h.stored)
    h.end("a", reason)
    assert len(h.stored) == before  # a step in flight may still write
    h.run()
    assert h.finish("a") is reason
    assert len(h.output("a")) == output  # what the steps in flight sampled is dropped
    assert h.all_chunks_below(said(h)) == [stored] * len(groups)
    h.check_drained()


@one_and_two_groups
@pytest.mark.parametrize(("output", "stored"), [(1, []), (2, []), (3, [0])])
def test_stop_string_while_no_step_is_in_flight(
    groups: Groups, output: int, stored: list[int]
) -> None:
    h = harness(1, groups)
    h.add("a", tokens(6), max_tokens=9)
    for _ in range(output):
        h.step()
    h.end("a", FinishReason.STOP)
    assert h.finish("a") is FinishReason.STOP
    h.move_all()
    assert h.all_chunks_below(said(h)) == [stored] * len(groups)  # the last token was never fed
    h.check_drained()


@both
@one_and_two_groups
@pytest.mark.parametrize("first", ["store", "step"])
def test_finish_in_the_same_step_as_a_store_failure(
    overlap: int, groups: Groups, first: str
) -> None:
    """It ends as ever. The chunk that failed is not found, and is stored by the next one like it."""
    h = harness(overlap, groups)
    prompt = tokens(15)
    h.add("a", prompt, max_tokens=2)
    h.step()
    failing = next(store for store in h.stores if store.key.endswith(bytes(2)))  # of group 0
    if first == "store":
        h.move(failing, error="no space")
    h.step()  # feeds position 15, and ends it
    assert h.finish("a") is FinishReason.LENGTH
    if first == "step":
        h.move(failing, error="no space")
    h.move_all()
    others = [[0, 1]] * (len(groups) - 1)
    assert h.all_chunks_below(said(h)) == [[1], *others]
    assert h.manager.counters.store_failed == 1
    assert h.manager.slots.in_use == len(groups) * 2 - 1
    h.forget_device()
    h.add("b", said(h), max_tokens=1)
    h.run()
    assert h.sources("b") == (0, 0, 17)
    assert h.all_chunks_below(said(h)) == [[0, 1], *others]
    h.check_drained()


# --- aborts --------------------------------------------------------------------------------


@one_and_two_groups
@pytest.mark.parametrize(("overlap", "stored"), [(1, [0, 1]), (2, [0, 1, 2])])
def test_abort_in_mid_prefill_stores_exactly_the_committed_full_chunks(
    overlap: int, stored: list[int], groups: Groups
) -> None:
    h = harness(overlap, groups, step_tokens_max=9)
    prompt = tokens(40)
    h.add("a", prompt)
    h.step()
    h.fill()  # 18 positions are fed now, or 27
    h.end("a")
    assert h.state("a") is State.DRAINING
    assert len(h.stored) == len(groups)  # the first chunk, and no more while steps are in flight
    h.drain()
    h.move_all()
    assert h.all_chunks_below(prompt) == [stored] * len(groups)
    assert len(h.stored) == len(groups) * len(stored)
    assert sum(h.sources("a")) == 9  # as far as it had come when it was ended
    h.check_drained()


def test_abort_before_the_sampled_token_is_known() -> None:
    """The second step writes position 7, but of a token that nobody will ever hear of."""
    h = harness(2, FULL)
    h.add("a", tokens(7), max_tokens=9)
    h.fill()
    h.end("a")
    h.drain()
    assert h.output("a") == []
    assert h.stored == []
    h.check_drained()


@both
@one_and_two_groups
def test_abort_of_a_queued_request_builds_no_store_job(overlap: int, groups: Groups) -> None:
    h = harness(overlap, groups, batch_max=1)
    h.add("a", tokens(20), max_tokens=20)
    h.step()
    before = list(h.stored)
    h.add("b", tokens(20, start=5))
    asked: list[str] = []
    store = h.manager.store
    h.manager.store = lambda owner, *rest: (asked.append(owner), store(owner, *rest))[1]  # type: ignore[method-assign]
    h.end("b")
    assert h.finish("b") is FinishReason.ABORT
    assert h.stored == before
    h.run()
    assert "b" not in asked
    assert h.all_chunks_below(tokens(20, start=5)) == [[]] * len(groups)
    h.check_drained()


@both
@one_and_two_groups
def test_abort_of_a_request_that_waits_after_a_preemption(overlap: int, groups: Groups) -> None:
    """Its stores go on, and no new one is built."""
    h = harness(overlap, groups)
    h.add("a", tokens(17), max_tokens=20)
    h.step()
    h.preempt("a")
    h.drain()
    assert h.state("a") is State.WAITING
    under_way = list(h.stores)
    h.end("a")
    assert h.stores == under_way
    h.run()
    assert h.all_chunks_below(tokens(17)) == [[0, 1]] * len(groups)
    assert len(h.stored) == 2 * len(groups)
    h.check_drained()


@both
@one_and_two_groups
@pytest.mark.parametrize("returned", [0, 1])
@pytest.mark.parametrize("error", ["", "gone"])
def test_abort_while_loading_keeps_the_blocks_until_the_transfer_returns(
    overlap: int, groups: Groups, returned: int, error: str
) -> None:
    h = harness(overlap, groups)
    h.warm("a", tokens(20), device=False)
    stored = len(h.stored)
    h.add("b", tokens(20))
    h.schedule()
    loads = h.loads
    if returned:
        h.move(*loads[:returned])
    reading = [block for load in h.loads for block in load.blocks]
    assert h.state("b") is State.LOADING
    h.end("b")
    assert h.finish("b") is FinishReason.ABORT
    assert h.scheduler.kv.pool.available == 64 - len(reading)
    h.move(*h.loads, error=error)
    assert len(h.stored) == stored
    h.check_drained()


# --- pauses, and KV that is lost -----------------------------------------------------------


@one_and_two_groups
@pytest.mark.parametrize(
    ("overlap", "output", "stored", "again"),
    [
        *[(1, 1, [], 3), (1, 2, [0], 0), (1, 3, [0], 1)],  # a step in flight feeds the last token
        *[(2, 1, [0], 0), (2, 2, [0], 1), (2, 3, [0], 2)],  # and another one feeds what that said
    ],
)
def test_preempted_stores_up_to_committed_and_resumes(
    overlap: int, output: int, stored: list[int], again: int, groups: Groups
) -> None:
    h = harness(overlap, groups)
    h.add("a", tokens(6), max_tokens=12)
    for _ in range(output):
        h.step()
    h.fill()
    h.preempt("a")
    h.drain()
    assert h.state("a") is State.WAITING
    assert len(h.output("a")) == output + overlap  # the tokens of the steps in flight are taken
    assert h.scheduler.kv.pool.available == 64 - sum(len(store.blocks) for store in h.stores)
    h.move_all()
    assert h.all_chunks_below(said(h)) == [stored] * len(groups)
    h.run()
    assert h.finish("a") is FinishReason.LENGTH
    assert h.report("a")["preempted"] == again  # the positions behind the last full block
    h.check_drained()


@both
@one_and_two_groups
def test_preempted_by_another_that_needs_its_blocks(overlap: int, groups: Groups) -> None:
    h = harness(overlap, groups, num_blocks=9 * len(groups), length_max=36)
    h.add("a", tokens(10), max_tokens=20)
    h.add("b", tokens(18, start=1), max_tokens=2 + 16)
    h.step()
    h.move_all()
    h.run(until=lambda: h.scheduler.counters.preemptions > 0 and not h.scheduler._draining)
    assert [below[:2] for below in h.all_chunks_below(said(h, "b"))] == [[0, 1]] * len(groups)
    h.run()
    h.check_drained()


@both
@one_and_two_groups
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_lost_kv_stores_what_lies_before_it(overlap: int, groups: Groups, policy: str) -> None:
    h = harness(overlap, groups, stores_max=0)  # nothing is stored before the end
    h.add("a", tokens(20), max_tokens=9, fail_on_lost_kv=policy == "fail")
    h.step()
    h.manager._stores_max = 64
    bad = h.blocks("a")[3]
    h.fill()
    h.apply(invalid=[bad])  # positions 12 .. 15
    h.drain()
    h.move_all()
    windows = [[]] * (len(groups) - 1)  # the window had left the first chunk behind, unstored
    assert h.all_chunks_below(tokens(20)) == [[0], *windows]
    h.run()
    end = FinishReason.ERROR if policy == "fail" else FinishReason.LENGTH
    assert h.finish("a") is end
    h.check_drained()


@both
@one_and_two_groups
def test_a_failed_step_stores_nothing_that_it_wrote(overlap: int, groups: Groups) -> None:
    h = harness(overlap, groups, step_tokens_max=8, max_step_retries=0)
    h.add("a", tokens(24))
    h.step()
    h.step(error="the device fell over")
    h.drain()
    h.move_all()
    assert h.finish("a") is FinishReason.ERROR
    assert h.all_chunks_below(tokens(24)) == [[0]] * len(groups)
    h.check_drained()


@both
def test_a_chunk_that_found_no_room_is_stored_later(overlap: int) -> None:
    h = harness(overlap, FULL, stores_max=1)
    h.add("a", tokens(17), max_tokens=20)
    h.step()
    assert len(h.stores) == 1
    h.run(until=lambda: len(h.output("a")) == 10)
    assert h.chunks_below(tokens(17)) == [0, 1]


@both
@one_and_two_groups
def test_a_chunk_whose_store_failed_is_not_found_and_is_stored_again_by_the_next(
    overlap: int, groups: Groups
) -> None:
    h = harness(overlap, groups)
    h.add("a", tokens(17), max_tokens=1)
    h.step()
    failing = next(store for store in h.stores if store.key.endswith(bytes(2)))  # of group 0
    h.move(failing, error="no")
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


@both
def test_a_window_is_stored_first_since_it_cannot_wait(overlap: int) -> None:
    h = Harness(overlap=overlap, groups=MIXED, step_tokens_max=4, stores_max=1)
    sequence = tokens(17)
    h.warm("x", sequence)
    windowed = h.chunks_below(sequence, group=1)
    assert windowed == [0, 1, 2, 3], "all of it was stored in time, one chunk at a time"
    assert h.chunks_below(sequence, group=0), "what keeps its blocks found room later"
