"""What must happen when requests meet, wait, share and end: one short story each.

Where to find a story, for one and two plans in flight each; `stored` is test_what_is_stored,
`lost` test_lost_kv, `recovery` test_recovery, `reset` test_reset, the others are here:

    abort       of a queued request                 stored: abort_of_a_queued_...
                after a preemption                  stored: abort_of_a_request_that_waits_...
                while loading                       stored: abort_while_loading_...
                in mid-prefill                      stored: abort_in_mid_prefill_...
                in every state                      abort_in_every_state_...
    preemption  and resumption                      stored: preempted_...; section preemption
    end         before, on, after a chunk boundary  stored: length_..., stop_...
                with a store failure                stored: finish_in_the_same_step_...
    cached      the whole prompt                    whole_prompt_cached_...
    lost        first, middle, last chunk, all      lost: loads_lose_...
                a load that never returns           lost: a_load_that_never_returns_...
                a checksum, the device              lost: corrupt_load_..., blocks that turn out bad
                a shared block                      recovery: shared_block_...
                failure during recovery             recovery: the first section
                recovery when the pool is full      recovery: recovery_when_..., all_holders_...
                those who hold none of it           recovery: a_request_that_holds_none_...
                policy fail                         recovery: policy_...
    blocks      that two requests need              two_requests_..., two_that_load_...
    reset       at any moment                       reset: reset_at_any_moment
"""

from __future__ import annotations

import pytest

from ebbtide.core.groups import KVGroup
from ebbtide.core.plan import StepPlan
from ebbtide.core.request import FinishReason, State
from ebbtide.errors import InputError, QueueFull
from ebbtide.params import RepetitionStop

from .harness import Harness, both, one_and_two_groups, tokens

Groups = tuple[KVGroup, ...]


def fed(plan: StepPlan | None) -> dict[str, tuple[int, int]]:
    assert plan is not None
    return {row.request_id: (row.start, row.end) for row in plan.rows}


# --- sharing -------------------------------------------------------------------------------


@both
@one_and_two_groups
@pytest.mark.parametrize("where", ["device", "host, sync", "host, async"])
@pytest.mark.parametrize("length", [1, 4, 5, 8, 9])
def test_whole_prompt_cached_leaves_something_to_compute(
    overlap: int, groups: Groups, where: str, length: int
) -> None:
    """One token at least, from the last block's boundary before it."""
    h = Harness(
        overlap=overlap, groups=groups, sync_load_blocks_max=99 if where == "host, sync" else 0
    )
    h.warm("a", tokens(length), device=where == "device")
    h.add("b", tokens(length))
    h.run()
    cached = (length - 1) // 4 * 4
    sources = (cached, 0) if where == "device" else (0, cached)
    assert h.sources("b") == (*sources, length - cached)
    h.check_drained()


@both
@one_and_two_groups
def test_identical_prompts_at_once_compute_once(overlap: int, groups: Groups) -> None:
    h = Harness(overlap=overlap, groups=groups)
    for name in "abc":
        h.add(name, tokens(17))
    h.run()
    assert [h.report(name)["computed"] for name in "abc"] == [17, 1, 1]
    h.check_drained()


@both
def test_a_block_that_is_being_computed_is_not_hit(overlap: int) -> None:
    h = Harness(overlap=overlap, step_tokens_max=8)
    h.add("a", tokens(25))
    h.schedule()
    h.add("b", tokens(25))
    plan = h.schedule() if overlap == 2 else None
    assert plan is None or "b" not in fed(plan)
    h.run()
    assert h.report("b")["device"] == 24
    h.check_drained()


@both
def test_a_parked_request_does_not_hold_up_those_behind_it(overlap: int) -> None:
    h = Harness(overlap=overlap, step_tokens_max=30)
    h.add("a", tokens(40))
    h.add("b", tokens(40))
    h.add("c", tokens(5, start=9))
    h.schedule()
    if overlap == 1:
        h.apply()
    assert fed(h.schedule()) == {"a": (30, 40), "c": (0, 5)}
    assert h.state("b") is State.WAITING
    h.run()
    h.check_drained()


@both
def test_a_held_request_holds_up_nobody_and_starts_when_it_is_ready(overlap: int) -> None:
    h = Harness(overlap=overlap)
    h.add("held", tokens(9), held=True)
    h.add("gone", tokens(9), held=True)
    assert h.schedule() is None
    h.add("other", tokens(5, start=9))
    h.end("gone")
    h.run(until=lambda: h.finish("other") is not None)
    assert h.state("held") is State.WAITING
    h.ready("gone")  # it was about to start
    h.ready("held")
    h.run()
    assert h.finish("gone") is FinishReason.ABORT
    assert len(h.output("held")) == 4
    h.check_drained()


@both
def test_the_producer_is_aborted_and_its_waiters_go_on(overlap: int) -> None:
    h = Harness(overlap=overlap, step_tokens_max=8)
    h.add("a", tokens(30))
    h.add("b", tokens(30))
    h.schedule()
    h.end("a")
    h.run()
    assert h.report("b")["device"] == 8  # what the step in flight still brought
    h.check_drained()


@both
def test_sharers_of_a_load_wait_only_for_the_chunks_they_need(overlap: int) -> None:
    h = Harness(overlap=overlap)
    h.warm("a", tokens(33), device=False)
    h.add("long", tokens(33))
    h.add("short", tokens(10))
    h.schedule()
    assert len(h.loads) == 8
    h.move(*h.loads[:2])
    assert "short" in fed(h.schedule())
    h.run()
    assert h.report("short")["computed"] == 2
    h.check_drained()


@both
def test_a_sharer_goes_on_when_anybody_has_computed_its_blocks(overlap: int) -> None:
    """Here somebody whose output happens to be what the producer still loads."""
    h = Harness(overlap=overlap)
    start = tokens(3)
    long = start + h.foretell(start, 10)
    h.warm("warm", long, device=False)
    h.add("loads", long, max_tokens=2)
    h.fill()
    assert h.state("loads") is State.LOADING
    h.add("waits", long[:9], max_tokens=2)
    h.fill()
    assert h.state("waits") is State.WAITING
    h.add("says", start, max_tokens=8)
    for _ in range(8):
        h.step()
    assert h.loads  # none has returned
    h.fill()
    assert h.state("waits") is not State.WAITING
    h.run()
    h.check_drained()
    assert h.sources("waits") == (8, 0, 1)


@both
def test_sharers_of_a_load_wait_for_every_group(overlap: int) -> None:
    h = Harness(groups=(KVGroup(), KVGroup(window=50)), overlap=overlap)
    h.warm("a", tokens(33), device=False)
    h.add("long", tokens(33))
    h.add("short", tokens(10))
    h.schedule()
    full, windowed = h.loads[:8], h.loads[8:]
    h.move(*full)
    assert h.schedule() is None
    h.move(*windowed[:2])
    assert "short" in fed(h.schedule())
    h.run()
    assert h.manager.counters.load_ok == 16
    h.check_drained()


@both
def test_sharer_of_a_load_that_brings_only_a_window_does_not_wait_for_its_request_to_end(
    overlap: int,
) -> None:
    """The first blocks come back for full attention only, so the shorter prompt cannot use them."""
    h = Harness(groups=(KVGroup(), KVGroup(window=4)), overlap=overlap)
    h.warm("a", tokens(33), device=False)
    h.add("long", tokens(33), max_tokens=40)
    h.add("short", tokens(18))
    h.run(until=lambda: h.finish("short") is not None)
    assert h.finish("long") is None
    h.run()
    h.check_drained()


@both
@one_and_two_groups
def test_salt_separates_tenants(overlap: int, groups: Groups) -> None:
    h = Harness(overlap=overlap, groups=groups)
    h.warm("a", tokens(17), cache_salt="one")
    h.add("other", tokens(17), cache_salt="two")
    h.add("none", tokens(17))
    h.run()
    assert h.report("other")["computed"] == h.report("none")["computed"] == 17
    h.add("same", tokens(17), cache_salt="one")
    h.run()
    assert h.report("same")["device"] == 16
    assert h.chunks_below(tokens(17), salt="three") == []
    h.check_drained()


# --- limits and order ----------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    h = Harness(num_blocks=5)
    with pytest.raises(InputError) as error:
        h.add("a", tokens(18), max_tokens=10)
    text = str(error.value)
    assert all(number in text for number in ("18", "10", "7", "5", "4"))
    h.add("b", tokens(18), max_tokens=3)  # 20 positions are fed: 5 blocks
    h.add("c", tokens(18), max_tokens=None)  # as much as fits
    h.run()
    assert len(h.output("c")) == 3
    h.check_drained()


@pytest.mark.parametrize("prompt", [[], tokens(100)])
def test_a_prompt_that_cannot_be_served_is_refused(prompt: list[int]) -> None:
    h = Harness()
    with pytest.raises(InputError) as error:
        h.add("a", prompt)
    assert error.value.field == "prompt"
    assert not h.scheduler.requests


def test_a_full_queue_refuses_with_an_answer() -> None:
    h = Harness(waiting_max=2)
    h.add("a", tokens(5))
    h.add("b", tokens(5))
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        h.add("c", tokens(5))
    h.run()
    h.add("c", tokens(5))
    h.run()
    h.check_drained()


@both
def test_priority_then_arrival(overlap: int) -> None:
    h = Harness(overlap=overlap, batch_max=1)
    for name, priority in [("a", 1), ("b", 1), ("c", 0), ("d", 0)]:
        h.add(name, tokens(5, start=priority), priority=priority)
    h.run()
    ends = [output.request_id for output in h.heard if output.finish]
    assert ends == ["c", "d", "a", "b"]


@both
def test_a_long_prompt_is_fed_beside_decoding_within_the_budget(overlap: int) -> None:
    h = Harness(overlap=overlap, step_tokens_max=8)
    h.add("a", tokens(3), max_tokens=20)
    h.step()
    h.add("b", tokens(20, start=5))
    while "b" in h.scheduler.requests and not h.output("b"):
        before = len(h.output("a"))
        h.step()
        assert len(h.output("a")) == before + 1 or overlap == 2  # nobody waits for b's prompt
        assert all(plan.num_tokens <= 8 for plan in h.plans)
    h.run()
    h.check_drained()


@both
def test_a_step_of_one_token_at_a_time(overlap: int) -> None:
    h = Harness(overlap=overlap, step_tokens_max=1)
    h.add("a", tokens(6))
    h.add("b", tokens(5, start=2))
    h.run()
    h.check_drained()


def test_ended_requests_do_not_pile_up_behind_one_that_does_not_fit() -> None:
    h = Harness(num_blocks=10, length_max=41)
    h.add("a", tokens(20), max_tokens=20)
    h.step()
    h.add("big", tokens(36), max_tokens=4, priority=-1)
    for i in range(200):
        h.add(f"r{i}", tokens(5))
        h.step()
        h.end(f"r{i}")
        if h.finish("a"):
            break
    for i in range(200, 600):
        h.add(f"r{i}", tokens(5))
        h.end(f"r{i}")
    assert len(h.scheduler._waiting) < 100
    h.run()
    h.check_drained()


# --- preemption ----------------------------------------------------------------------------


@both
def test_preemption_takes_the_lowest_priority_then_the_latest(overlap: int) -> None:
    h = Harness(overlap=overlap, num_blocks=9, length_max=36)
    h.add("low", tokens(5, start=1), max_tokens=20, priority=1)
    h.add("first", tokens(5, start=2), max_tokens=20)
    h.add("second", tokens(5, start=3), max_tokens=20)
    victims: list[str] = []
    while h.scheduler.requests:
        h.move_all()
        h.fill()
        if h.plans:
            h.apply()
        paused = (State.DRAINING, State.WAITING)
        left = [n for n, r in h.requests.items() if r.state in paused and r.finish is None]
        victims += [name for name in left if name not in victims]
    assert victims[:2] == ["low", "second"]
    assert "first" not in victims
    h.run()
    h.check_drained()


@both
def test_prefix_hit_right_after_a_preemption(overlap: int) -> None:
    h = Harness(overlap=overlap, num_blocks=8, length_max=32, host_slots=0)
    h.add("a", tokens(9, start=1), max_tokens=20)
    h.add("b", tokens(9, start=2), max_tokens=12)
    h.run()
    assert h.scheduler.counters.preemptions
    report = h.report("b")
    assert report["device"] + report["host"] + report["computed"] == 9
    assert report["preempted"] < 9 + 12  # its first blocks were still there
    h.check_drained()


@both
def test_positions_computed_again_after_a_preemption_are_counted(overlap: int) -> None:
    """The output's positions, too: 5 prompt tokens and the output so far, save what was still there."""
    h = Harness(overlap=overlap, num_blocks=20, length_max=60, host_slots=0)
    h.add("a", tokens(5), max_tokens=30)
    h.run(until=lambda: len(h.output("a")) == 20)
    h.preempt("a")
    h.drain()
    committed = len(h.requests["a"].tokens) - 1  # the last token's position was never fed
    h.forget_device()
    h.run()
    assert h.report("a")["preempted"] == committed
    h.check_drained()


@both
@one_and_two_groups
@pytest.mark.parametrize("slots", [0, 64], ids=["device alone", "with host memory"])
def test_two_requests_that_need_each_others_blocks(
    overlap: int, groups: Groups, slots: int
) -> None:
    """Each fits alone, and not both: the later one gives way, the earlier one does not notice."""
    size = 8 * len(groups)
    h = Harness(overlap=overlap, groups=groups, num_blocks=size, length_max=32, host_slots=slots)
    h.add("a", tokens(4, start=1), max_tokens=28)
    h.add("b", tokens(4, start=2), max_tokens=28)
    h.run()
    assert h.finish("a") is h.finish("b") is FinishReason.LENGTH
    assert h.report("a")["preempted"] == 0
    assert len(groups) > 1 or h.scheduler.counters.preemptions > 0  # windows leave blocks to spare
    h.check_drained()


@both
def test_two_that_load_need_each_others_blocks(overlap: int) -> None:
    """Neither load can start beside the other: they take turns."""
    h = Harness(overlap=overlap, num_blocks=9, length_max=36)
    for number, name in enumerate("xy"):
        h.warm(name, tokens(21, start=number), device=False)
    for number, name in enumerate("ab"):
        h.add(name, tokens(21, start=number), max_tokens=12)
    assert h.schedule() is None
    assert (h.state("a"), h.state("b")) == (State.LOADING, State.WAITING)
    h.run()
    assert h.sources("a") == h.sources("b") == (0, 20, 1)
    h.check_drained()


@both
def test_a_preempted_request_may_be_finished_by_the_step_in_flight(overlap: int) -> None:
    h = Harness(overlap=overlap)
    h.add("a", tokens(5), max_tokens=2)
    h.step()
    h.fill()
    h.preempt("a")
    h.apply()
    assert h.finish("a") is FinishReason.LENGTH
    h.run()
    h.check_drained()


@both
def test_loading_request_is_preempted_and_its_load_returns_later(overlap: int) -> None:
    h = Harness(overlap=overlap, num_blocks=10, length_max=40)
    h.warm("x", tokens(17), device=False)
    h.add("a", tokens(4, start=3), max_tokens=36)
    h.step()
    h.add("b", tokens(17))
    while h.scheduler.counters.preemptions == 0:  # b's load does not return
        for store in h.stores:
            h.move(store)
        h.step()
    assert h.requests["b"].state is State.WAITING
    assert len(h.loads) == 4
    h.run()
    h.check_drained()


# --- ends ----------------------------------------------------------------------------------


@both
@one_and_two_groups
def test_abort_in_every_state_ends_once_and_leaves_nothing(overlap: int, groups: Groups) -> None:
    for steps in range(12):
        h = Harness(overlap=overlap, groups=groups, step_tokens_max=5)
        h.warm("x", tokens(9), device=False)
        h.add("a", tokens(14))
        for _ in range(steps):
            if h.loads and steps % 2:
                h.move(*h.loads)
            if not h.plans or len(h.plans) < overlap:
                h.schedule()
            elif h.plans:
                h.apply()
        h.end("a")
        h.end("a")
        h.run()
        assert h.finish("a") in (FinishReason.ABORT, FinishReason.LENGTH)
        h.check_drained()


@both
def test_stop_token_is_part_of_the_output_and_ends_it(overlap: int) -> None:
    h = Harness(overlap=overlap)
    truth = h.foretell(tokens(5), 6)
    h.add("a", tokens(5), max_tokens=20, stop=[truth[2], truth[4]])
    h.run()
    assert h.output("a") == truth[: truth.index(truth[2]) + 1]
    assert h.finish("a") is FinishReason.STOP
    h.check_drained()


@both
def test_repetition_is_judged_by_the_output_alone(overlap: int) -> None:
    h = Harness(overlap=overlap, vocabulary=1)
    h.add("a", [0] * 9, max_tokens=20, repetition=RepetitionStop(2, 3))
    h.run()
    assert h.finish("a") is FinishReason.REPETITION
    assert len(h.output("a")) == 3


@both
@one_and_two_groups
def test_next_turn_continues_an_output(overlap: int, groups: Groups) -> None:
    h = Harness(overlap=overlap, groups=groups)
    h.add("a", tokens(10), max_tokens=9)
    h.run()
    h.add("b", tokens(10) + h.output("a") + tokens(3))
    h.run()
    assert h.report("b")["device"] == 16  # 18 of 19 positions have KV
    h.check_drained()
