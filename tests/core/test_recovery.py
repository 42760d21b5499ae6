"""Recovery that is itself disturbed, and recovery that must disturb nobody else.

There is one way back: give up the blocks, wait at the head of the queue, be matched like a new request.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ebbtide.core.groups import KVGroup
from ebbtide.core.request import FinishReason, State

from .harness import FULL, MIXED, Harness, both, one_and_two_groups, tokens

Groups = tuple[KVGroup, ...]
PROMPT = tokens(21)  # 5 blocks, and one position more
sync_and_async = pytest.mark.parametrize("sync", [99, 0], ids=["sync", "async"])


def lose_last_load(h: Harness) -> int:
    """Of the loads that come next, inside a step or beside it, the last one fails. How many there were."""
    plan = h.schedule()
    loads = h.loads or list(plan.loads if plan else ())
    if h.loads:
        h.move(h.loads[-1], error="gone")
        if h.loads:
            h.move(*h.loads)
    else:
        h.lose_sync_load = lambda place: place == len(loads) - 1
        h.fill()
        h.apply()
        h.lose_sync_load = lambda place: False
        h.drain()
    return len(loads)


# --- failure during recovery ---------------------------------------------------------------


@both
@sync_and_async
@pytest.mark.parametrize(
    ("groups", "tried"), [(FULL, [5, 4, 3, 2, 1]), (MIXED, [7, 6, 5, 4, 2])], ids=["1", "2"]
)
def test_each_load_of_the_recovery_fails_too(
    overlap: int, sync: int, groups: Groups, tried: list[int]
) -> None:
    """And what came back is needed by others meanwhile: it loads less each time, and then nothing."""
    h = Harness(overlap=overlap, groups=groups, sync_load_blocks_max=sync)
    h.warm("a", PROMPT, device=False)
    h.add("b", PROMPT)
    for count in tried:
        assert lose_last_load(h) == count
        assert h.state("b") is State.WAITING
        h.forget_device()
    h.run()
    assert h.sources("b") == (0, 0, 21)
    assert h.report("b")["failed"] == 0
    assert h.manager.counters.load_failed == 5
    assert h.chunks_below(PROMPT) == [0, 1, 2, 3, 4]
    h.check_drained()


@both
@one_and_two_groups
def test_the_step_that_recovers_raises(overlap: int, groups: Groups) -> None:
    h = Harness(overlap=overlap, groups=groups, host_slots=0)
    h.add("a", PROMPT, max_tokens=9)
    h.step()
    h.step(invalid=[h.blocks("a")[2]] if groups is FULL else [h.blocks("a", 1)[-2]])
    h.drain()
    h.step(error="flaky")
    h.drain()
    assert h.output("a") == h.truth("a", 1)
    h.run()
    lost_from = 8 if groups is FULL else 16
    assert h.report("a")["failed"] == 21 - lost_from  # what the failed step did is not counted
    assert h.finish("a") is FinishReason.LENGTH
    h.check_drained()


@both
def test_the_same_kv_is_lost_again_in_the_middle_of_its_recovery(overlap: int) -> None:
    h = Harness(overlap=overlap, host_slots=0, step_tokens_max=4)
    h.add("a", PROMPT, max_tokens=9)
    h.run(until=lambda: len(h.output("a")) == 1)
    for _ in range(2):
        h.step(invalid=[h.blocks("a")[2]])
        h.drain()
        h.step()  # 8 .. 11 again
    h.run()
    assert h.sources("a") == (0, 0, 21)
    assert h.report("a")["failed"] == 4 + 13
    h.check_drained()


@both
@one_and_two_groups
def test_a_draining_request_loses_an_earlier_block(overlap: int, groups: Groups) -> None:
    """Two steps report, or one step reports two: the earliest block decides."""
    h = Harness(overlap=overlap, groups=groups)
    h.add("a", PROMPT, max_tokens=9)
    h.step()
    h.move_all()
    late, early = h.blocks("a")[3], h.blocks("a")[1]
    h.fill()
    if overlap == 2:
        h.apply(invalid=[late])
        assert h.state("a") is State.DRAINING
        h.apply(invalid=[early])
    else:
        h.apply(invalid=[late, early])
    assert h.all_chunks_below(PROMPT) == [[0]] * len(groups)
    h.run()
    assert h.report("a")["failed"] == 21 - 4
    h.check_drained()


@both
def test_preempted_in_the_middle_of_its_recovery(overlap: int) -> None:
    """Each position that is computed again counts once, by what was the last to make it necessary."""
    h = Harness(overlap=overlap, host_slots=0, step_tokens_max=4)
    h.add("a", PROMPT, max_tokens=9)
    h.run(until=lambda: len(h.output("a")) == 1)
    h.step(invalid=[h.blocks("a")[2]])
    h.drain()
    h.step()
    h.preempt("a")
    h.drain()
    h.run()
    report = h.report("a")
    assert (report["failed"], report["preempted"]) == (4, 9)
    h.check_drained()


@both
@one_and_two_groups
def test_abort_at_every_moment_of_a_recovery(overlap: int, groups: Groups) -> None:
    for moment in range(8):
        h = Harness(overlap=overlap, groups=groups, step_tokens_max=4)
        h.add("a", PROMPT, max_tokens=9)
        h.run(until=lambda h=h: len(h.output("a")) == 1)
        h.fill()
        h.apply(invalid=[h.blocks("a")[-2]])
        for _ in range(moment):
            h.apply() if h.plans else h.fill()
        h.end("a")
        h.run()
        assert h.finish("a") is FinishReason.ABORT
        h.check_drained()


@both
@one_and_two_groups
def test_the_load_of_a_recovery_never_returns(overlap: int, groups: Groups) -> None:
    h = Harness(overlap=overlap, groups=groups, load_deadline_s=5.0)
    h.warm("x", PROMPT, device=False)
    h.add("a", PROMPT)
    h.schedule()
    h.move(h.loads[-1], error="gone")
    h.move(*h.loads)
    h.forget_device()
    assert h.schedule() is None
    stuck = h.loads
    assert stuck
    assert h.scheduler.next_deadline() == 5.0
    h.now = 5.0
    while h.finish("a") is None:
        h.move(*h.stores) if h.stores else None
        h.step()
    assert h.sources("a") == (0, 0, 21)
    h.move(*stuck)
    h.run()
    h.check_drained()


@both
def test_a_device_that_never_keeps_the_kv_ends_the_request_and_not_the_engine(overlap: int) -> None:
    h = Harness(overlap=overlap, host_slots=0, max_step_retries=2)
    h.add("a", PROMPT)
    steps = 0
    while h.finish("a") is None:
        h.fill()
        h.apply(invalid=[row.tables[0].blocks[0] for row in h.plans[0].rows])
        steps += 1
        assert steps < 50
    assert h.finish("a") is FinishReason.ERROR
    assert "position 0" in h.message("a")
    h.drain()
    h.add("b", PROMPT)
    h.run()
    assert h.finish("b") is FinishReason.LENGTH
    h.check_drained()


# --- recovery when the pool is full --------------------------------------------------------


@both
@pytest.mark.parametrize("slots", [0, 64], ids=["device alone", "with host memory"])
def test_recovery_when_the_pool_is_full(overlap: int, slots: int) -> None:
    """The others go on as ever; it waits at the head of the queue, and no newcomer overtakes it."""
    h = Harness(overlap=overlap, num_blocks=8, length_max=28, host_slots=slots)
    h.add("a", tokens(13, start=1), max_tokens=4)
    h.add("b", tokens(12, start=2), max_tokens=5)
    h.step()
    h.step()  # b has grown into the last block
    h.move_all()
    h.add("new", tokens(3, start=3), max_tokens=4)
    assert h.scheduler.kv.pool.available == 0
    bad = h.blocks("a")[1]
    h.fill()
    h.apply(invalid=[bad])
    h.run()
    ends = [output.request_id for output in h.heard if output.finish]
    assert ends == ["b", "a", "new"]
    assert h.report("b")["failed"] == h.report("b")["preempted"] == 0
    assert h.report("a")["failed"] == 14 - 4
    assert h.scheduler.counters.preemptions == 0
    h.check_drained()


@both
@one_and_two_groups
def test_all_holders_recover_in_a_pool_that_is_too_small_for_them(
    overlap: int, groups: Groups
) -> None:
    h = Harness(
        overlap=overlap, groups=groups, num_blocks=9 * len(groups), length_max=36, host_slots=0
    )
    h.warm("x", tokens(12))
    for number, name in enumerate("abc"):
        h.add(name, tokens(12) + tokens(3, start=number), max_tokens=12)
    h.step()
    bad = h.blocks("a")[0]
    assert bad in h.blocks("b")
    h.fill()
    h.apply(invalid=[bad])
    h.run()
    assert all(h.finish(name) is FinishReason.LENGTH for name in "abc")
    assert h.report("a")["failed"] > 0
    h.check_drained()


# --- shared blocks -------------------------------------------------------------------------


@both
@one_and_two_groups
@pytest.mark.parametrize("failing", ["a", "b", "c", ""], ids=["first", "middle", "last", "none"])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_shared_block_turns_out_invalid_in_the_first_middle_and_last_holder(
    overlap: int, groups: Groups, failing: str, place: int
) -> None:
    """``failing`` ends with an error, by its policy; the others compute the block once."""
    h = Harness(overlap=overlap, groups=groups, host_slots=0)
    h.warm("x", PROMPT)
    for name in "abc":
        h.add(name, PROMPT, max_tokens=9, fail_on_lost_kv=name == failing)
    h.step()
    bad = h.blocks("a")[place]
    assert all(bad in h.blocks(name) for name in "abc")
    h.step(invalid=[bad])
    h.run()
    for name in "abc":
        wanted = FinishReason.ERROR if name == failing else FinishReason.LENGTH
        assert h.finish(name) is wanted
    left = [name for name in "abc" if name != failing]
    # the first of them from the bad block on, the others what follows the last full block
    again = [21 - place * 4] + [1] * (len(left) - 1)
    assert [h.report(name)["failed"] for name in left] == again
    assert [h.sources(name) for name in left] == [(20, 0, 1)] * len(left)
    h.check_drained()


@both
def test_shared_block_turns_out_invalid_for_holders_in_every_state(overlap: int) -> None:
    """One decodes, one still feeds its prompt, one loads what comes behind, one has just ended."""
    h = Harness(overlap=overlap, step_tokens_max=6)
    h.warm("x", tokens(41))
    pool = h.scheduler.kv.pool
    for digest in h.requests["x"].digests[5:]:
        pool.unpublish(pool.find(0, digest))
    h.add("decodes", PROMPT, max_tokens=9)
    h.step()
    h.add("loads", tokens(41))
    h.add("feeds", PROMPT + tokens(30, start=5))
    h.step()
    h.fill()
    h.end("decodes") if overlap == 2 else None
    bad = h.blocks("feeds")[1]
    states = [h.state(name) for name in ("loads", "feeds")]
    assert states == [State.LOADING, State.RUNNING]
    assert all(bad in h.blocks(name) for name in ("decodes", "loads", "feeds"))
    late = h.loads
    h.apply(invalid=[bad])
    h.drain()
    assert h.state("loads") is State.WAITING
    assert h.chunks_below(PROMPT) == [0]
    h.move(*late)  # into blocks that nobody waits for any more
    h.run()
    assert h.finish("loads") is h.finish("feeds") is FinishReason.LENGTH
    h.check_drained()


@both
def test_the_holder_that_computed_the_bad_block_is_gone(overlap: int) -> None:
    h = Harness(overlap=overlap)
    h.add("first", PROMPT, max_tokens=20)
    h.step()
    h.add("second", PROMPT, max_tokens=9)
    h.step()
    h.end("first")
    h.drain()
    h.move_all()
    bad = h.blocks("second")[2]
    h.step(invalid=[bad])
    h.drain()
    assert h.chunks_below(PROMPT) == [0, 1]
    h.run()
    assert h.finish("second") is FinishReason.LENGTH
    h.check_drained()


# --- those who hold none of it -------------------------------------------------------------


def lose_in_step(h: Harness) -> None:
    h.lose_sync_load = lambda place: place == 2


def lose_beside_steps(h: Harness) -> None:
    h.move(h.loads[2], error="gone")
    h.move(*h.loads)


def lose_by_deadline(h: Harness) -> None:
    h.now = 1000.0
    h.apply()
    h.fill()


def lose_on_device(h: Harness) -> None:
    h.move_all()
    h.fill()
    h.apply(invalid=[h.blocks("b")[2]])


FAULTS = [
    pytest.param(99, lose_in_step, id="sync load"),
    pytest.param(0, lose_beside_steps, id="async load"),
    pytest.param(0, lose_by_deadline, id="late load"),
    pytest.param(0, lose_on_device, id="device"),
]
Fault = Callable[[Harness], None]


@both
@one_and_two_groups
@pytest.mark.parametrize(("sync", "fault"), FAULTS)
def test_a_request_that_holds_none_of_it_has_the_same_tokens_in_as_many_steps(
    overlap: int, groups: Groups, sync: int, fault: Fault
) -> None:
    taken, sources = [], []
    for inject in (lambda h: None, fault):
        h = Harness(overlap=overlap, groups=groups, sync_load_blocks_max=sync)
        h.warm("x", PROMPT, device=False)
        h.add("d", tokens(9, start=4), max_tokens=20)
        h.step()
        before = h.scheduler.counters.steps
        h.add("b", PROMPT, max_tokens=9)
        h.schedule()
        inject(h)
        h.run(until=lambda h=h: h.finish("d") is not None)
        taken.append((h.output("d"), h.steps["d"], h.scheduler.counters.steps - before))
        h.run()
        assert h.report("d")["failed"] == 0
        sources.append(h.sources("b"))
        h.check_drained()
    assert sources[0] == (0, 20, 1) != sources[1]
    assert taken[0] == taken[1]
    assert len(taken[0][0]) == 20


@both
@one_and_two_groups
@pytest.mark.parametrize("per", ["engine", "request"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(("sync", "fault"), FAULTS)
def test_policy_per_engine_and_per_request(
    overlap: int, groups: Groups, sync: int, fault: Fault, policy: str, per: str
) -> None:
    """The request's word goes before the engine's. Whoever ends does so with a reason."""
    fail = policy == "fail"
    engine = fail if per == "engine" else not fail
    h = Harness(overlap=overlap, groups=groups, sync_load_blocks_max=sync, fail_on_lost_kv=engine)
    h.warm("x", PROMPT, device=False)
    h.add("d", tokens(9, start=4), max_tokens=20)
    h.step()
    h.add("b", PROMPT, max_tokens=9, fail_on_lost_kv=None if per == "engine" else fail)
    h.schedule()
    fault(h)
    h.run()
    assert h.finish("d") is FinishReason.LENGTH
    assert h.finish("b") is (FinishReason.ERROR if fail else FinishReason.LENGTH)
    words = {lose_beside_steps: "gone", lose_by_deadline: "loading took over 30 s"}
    assert not fail or words.get(fault, "lost from position 8 on") in h.message("b")
    h.check_drained()


# --- what ends a row of failures -----------------------------------------------------------


@both
@pytest.mark.parametrize("step", [4, 5, 64])
def test_failures_with_new_ground_between_them_are_not_in_a_row(overlap: int, step: int) -> None:
    """Also where the recomputation ends exactly where the request had come to."""
    h = Harness(overlap=overlap, step_tokens_max=step)
    a = h.add("a", tokens(8), max_tokens=40)
    for goal in (8, 12, 16, 20, 24, 28):
        h.run(until=lambda goal=goal: a.committed >= goal and a.state is State.RUNNING)
        h.step(error="no")
        h.drain()
        h.forget_device()
        h.manager.clear()
    h.run()
    assert h.finish("a") is FinishReason.LENGTH
    h.check_drained()


@both
def test_a_request_that_got_further_runs_with_others_again(overlap: int) -> None:
    h = Harness(overlap=overlap, step_tokens_max=8, block_size=8, host_slots=0)
    a = h.add("a", tokens(8), max_tokens=30)
    h.run(until=lambda: a.committed >= 8)
    for _ in range(2):
        h.step(error="no")
        h.drain()
    h.run(until=lambda: a.committed > 9)
    assert a.failed_steps == 0
    h.add("b", tokens(5, start=3), max_tokens=2)
    assert h.schedule() or h.plans
    h.run(until=lambda: h.finish("b") is not None)
    assert h.finish("a") is None, "they ran side by side"
    h.run()
    h.check_drained()


# --- a bad block behind a hole -------------------------------------------------------------


@both
@pytest.mark.parametrize("group", [0, 1])
def test_bad_hit_behind_a_hole_is_dropped_below_too(overlap: int, group: int) -> None:
    """The step that was to load block 2 reports block 3, which was on the device: it was spoiled before
    it was stored, and nobody could see it."""
    h = Harness(overlap=overlap, groups=MIXED, sync_load_blocks_max=99)
    h.add("a", tokens(17), max_tokens=1)
    h.fill()
    bad = h.blocks("a", group)[-2]
    holes = [h.blocks("a", g)[2 - h.requests["a"].tables[g].first] for g in (0, 1)]
    h.apply()
    h.memory.words[[bad]] = np.uint64(99)
    h.move_all()
    h.run()
    for block in holes:
        h.scheduler.kv.pool.unpublish(block)
    h.add("b", tokens(17), max_tokens=4)
    h.fill()
    assert h.plans[0].loads
    assert bad in h.blocks("b", group)
    h.apply(invalid=[bad])
    assert 3 not in h.chunks_below(tokens(17), group=group)
    h.run()
    h.check("b")
