"""Loads that fail, come late or bring garbage; blocks that turn out bad; steps that raise."""

from __future__ import annotations

import pytest

from ebbtide.core.groups import KVGroup
from ebbtide.core.request import FinishReason, State

from .harness import Harness, tokens

both = pytest.mark.parametrize("overlap", [1, 2])
one_and_two_groups = pytest.mark.parametrize(
    "groups", [(KVGroup(),), (KVGroup(), KVGroup(window=6))], ids=["full", "full+window"]
)
PROMPT = tokens(21)  # 5 blocks, and one position more


# --- loads inside the step -----------------------------------------------------------------


@both
@one_and_two_groups
@pytest.mark.parametrize(
    ("lost", "from_host"),
    [([0], 0), ([2], 8), ([4], 16), ([0, 1, 2, 3, 4], 0)],
    ids=["first", "middle", "last", "all"],
)
def test_sync_load_lost(
    overlap: int, groups: tuple[KVGroup, ...], lost: list[int], from_host: int
) -> None:
    h = Harness(overlap=overlap, groups=groups, sync_load_blocks_max=100, step_tokens_max=16)
    h.warm("a", PROMPT, device=False)
    h.lose_sync_load = lambda place: place in lost
    h.add("b", PROMPT)
    h.step()
    h.lose_sync_load = lambda place: False
    assert h.output("b") == []
    h.run()
    report = h.report("b")
    assert report["device"] + report["host"] + report["computed"] == len(PROMPT)
    # the prefix before the hole is on the device now; what was good behind it is not loaded again
    assert report["device"] + report["host"] == from_host
    assert h.scheduler.counters.failed_steps == 0
    h.check_drained()


@both
def test_lost_chunk_is_not_tried_twice_and_is_stored_again(overlap: int) -> None:
    h = Harness(overlap=overlap, sync_load_blocks_max=100)
    h.warm("a", PROMPT, device=False)
    h.lose_sync_load = lambda place: place == 2
    h.add("b", PROMPT)
    h.step()
    assert h.chunks_below(PROMPT) == [0, 1, 3, 4]
    h.run()  # it would lose the third load of any step again
    assert h.chunks_below(PROMPT) == [0, 1, 2, 3, 4]
    h.check_drained()


@both
def test_policy_fail_ends_the_request_with_an_error(overlap: int) -> None:
    h = Harness(overlap=overlap, sync_load_blocks_max=100)
    h.warm("a", PROMPT, device=False)
    h.lose_sync_load = lambda place: place == 3
    h.add("b", PROMPT, fail_on_lost_kv=True)
    h.add("c", tokens(9, start=4))
    h.run()
    assert h.finish("b") is FinishReason.ERROR
    assert "position 12" in h.message("b")
    assert h.finish("c") is FinishReason.LENGTH
    h.check_drained()


# --- loads beside the steps ----------------------------------------------------------------


@both
@one_and_two_groups
@pytest.mark.parametrize(
    "lost", [[0], [2], [4], [0, 1, 2, 3, 4]], ids=["first", "mid", "last", "all"]
)
def test_async_load_failed(overlap: int, groups: tuple[KVGroup, ...], lost: list[int]) -> None:
    h = Harness(overlap=overlap, groups=groups)
    h.warm("a", PROMPT, device=False)
    h.add("b", PROMPT)
    h.schedule()
    loads = h.loads
    for number, load in enumerate(loads):
        h.move(load, error="gone" if number in lost else "")
    assert h.state("b") is State.WAITING
    h.run()
    report = h.report("b")
    assert report["device"] == min(lost) * 4 or len(groups) > 1
    assert report["failed"] == 0  # nothing had been computed before, so nothing was computed again
    assert h.manager.counters.load_failed == len(lost)
    h.check_drained()


def test_async_load_failed_under_policy_fail() -> None:
    h = Harness(fail_on_lost_kv=True)
    h.warm("a", PROMPT, device=False)
    h.add("b", PROMPT)
    h.schedule()
    h.move(h.loads[1], error="the cable is out")
    h.move(*h.loads)
    assert h.finish("b") is FinishReason.ERROR
    assert "the cable is out" in h.message("b")
    h.check_drained()


@both
def test_late_load_counts_as_failed_and_its_blocks_stay_until_it_returns(overlap: int) -> None:
    h = Harness(overlap=overlap, load_deadline_s=5.0)
    h.warm("a", PROMPT, device=False)
    h.now = 100.0
    h.add("b", PROMPT, max_tokens=3)
    h.schedule()
    assert h.scheduler.next_deadline() == 105.0
    loads = h.loads
    h.now = 104.9
    assert h.schedule() is None
    h.now = 105.0
    while h.finish("b") is None:  # it goes on with other blocks
        for store in h.stores:
            h.move(store)
        h.step()
    assert h.scheduler.next_deadline() is None
    assert h.report("b")["computed"] == len(PROMPT)
    assert h.scheduler.kv.transfers_in_flight >= len(loads) == 5
    h.move(*loads)
    h.run()
    h.check_drained()


def test_late_load_whose_request_was_aborted_meanwhile() -> None:
    h = Harness(load_deadline_s=5.0)
    h.warm("a", PROMPT, device=False)
    h.add("b", PROMPT)
    h.schedule()
    h.now = 6.0
    h.schedule()
    h.end("b")
    h.run()
    assert h.finish("b") is FinishReason.ABORT
    h.check_drained()


@both
def test_corrupt_load_is_noticed_by_the_step_that_reads_it(overlap: int) -> None:
    h = Harness(overlap=overlap)
    h.warm("a", PROMPT, device=False)
    h.add("b", PROMPT)
    h.schedule()
    bad = h.loads[2].blocks[0]
    h.move(*h.loads)
    h.step(invalid=[bad])
    assert h.chunks_below(PROMPT) == [0, 1]  # what follows may have been computed from it
    h.run()
    h.check_drained()


# --- blocks that turn out bad --------------------------------------------------------------


@both
@one_and_two_groups
def test_shared_bad_block_is_computed_once(overlap: int, groups: tuple[KVGroup, ...]) -> None:
    h = Harness(overlap=overlap, groups=groups, host_slots=0)
    h.warm("x", PROMPT)
    for name in "abc":
        h.add(name, PROMPT, max_tokens=9)
    h.add("d", tokens(9, start=4), max_tokens=9)
    h.step()
    h.step()
    before = len(h.output("d"))
    bad = h.requests["a"].tables[-1].blocks[-2]
    assert all(bad in h.requests[name].tables[-1].blocks for name in "abc")
    h.step(invalid=[bad])
    assert len(h.output("d")) == before + 1  # it holds no bad block
    h.run()
    again = sorted(h.report(name)["failed"] for name in "abc")
    assert again[0] == again[1] < again[2]
    assert h.report("d")["failed"] == 0
    h.check_drained()


@both
def test_what_was_computed_from_a_bad_block_is_not_found_any_more(overlap: int) -> None:
    h = Harness(overlap=overlap)
    request = h.add("a", PROMPT, max_tokens=20)
    h.step()
    h.move_all()
    while len(h.plans) < overlap:
        h.schedule()
    h.apply(invalid=[request.tables[0].blocks[1]])
    pool = h.scheduler.kv.pool
    assert [pool.find(0, digest) is not None for digest in request.digests[:5]] == [True] + 4 * [
        False
    ]
    assert h.chunks_below(PROMPT) == [0]
    h.run()
    h.check_drained()


@both
def test_bad_block_of_a_request_that_has_just_ended(overlap: int) -> None:
    h = Harness(overlap=overlap)
    stop = h.foretell(PROMPT, 2)[1]
    h.add("a", PROMPT, max_tokens=20, stop=[stop])
    h.step()
    while len(h.plans) < overlap:
        h.schedule()
    h.apply(invalid=[h.requests["a"].tables[0].blocks[1]])
    h.run()
    assert h.finish("a") is FinishReason.STOP
    h.check_drained()


@both
def test_reports_about_blocks_that_nobody_holds_are_harmless(overlap: int) -> None:
    h = Harness(overlap=overlap)
    h.warm("a", PROMPT)
    cached = [block for block in range(64) if block in h.scheduler.kv.pool._cached]
    h.add("b", tokens(9, start=5))
    h.schedule()
    h.apply(invalid=[*cached, 63])
    assert h.scheduler.kv.pool.cached == 0
    h.add("c", PROMPT)
    h.run()
    assert h.report("c")["device"] == 0
    h.check_drained()


@both
def test_window_group_loses_a_block_that_the_full_group_still_has(overlap: int) -> None:
    h = Harness(overlap=overlap, groups=(KVGroup(), KVGroup(window=8)), host_slots=0)
    h.add("a", PROMPT, max_tokens=12)
    h.step()
    bad = h.requests["a"].tables[1].blocks[-2]
    h.step(invalid=[bad])
    h.run()
    assert h.report("a")["failed"] > 0
    h.check_drained()


# --- steps that raise ----------------------------------------------------------------------


@both
def test_failed_step_is_tried_again(overlap: int) -> None:
    h = Harness(overlap=overlap, max_step_retries=1)  # failures in a row
    h.add("a", PROMPT, max_tokens=9)
    for _ in range(3):
        h.step()
        h.step(error="flaky")
        while h.plans:
            h.apply()
    h.run()
    assert h.finish("a") is FinishReason.LENGTH
    assert h.scheduler.counters.failed_steps == 3
    assert h.report("a")["failed"] > 0
    h.check_drained()


@both
def test_failing_for_ever_ends_in_an_error_and_the_engine_lives_on(overlap: int) -> None:
    h = Harness(overlap=overlap, max_step_retries=2)
    h.add("a", PROMPT)
    failures = 0
    while h.finish("a") is None:
        h.step(error=f"failure {failures}")
        failures += 1
    assert h.finish("a") is FinishReason.ERROR
    assert "3 steps in a row failed" in h.message("a")
    assert "failure" in h.message("a")
    while h.plans:
        h.apply()
    h.add("b", PROMPT)
    h.run()
    assert h.finish("b") is FinishReason.LENGTH
    h.check_drained()


@both
def test_a_failed_step_with_sync_loads_does_not_drop_their_chunks(overlap: int) -> None:
    h = Harness(overlap=overlap, sync_load_blocks_max=100)
    h.warm("a", PROMPT, device=False)
    h.add("b", PROMPT)
    h.step(error="flaky")
    while h.plans:
        h.apply()
    assert h.chunks_below(PROMPT) == [0, 1, 2, 3, 4]
    h.run()
    assert h.report("b")["host"] == 20
    h.check_drained()


@both
def test_requests_that_are_not_in_the_failed_step_do_not_notice(overlap: int) -> None:
    h = Harness(overlap=overlap, batch_max=2, step_tokens_max=21)
    h.add("a", PROMPT)
    h.add("b", tokens(9, start=4))
    h.schedule()
    h.apply(error="flaky")
    h.run()
    assert h.report("b")["failed"] == 0
    h.check_drained()


@both
def test_reset_and_then_a_failed_load(overlap: int) -> None:
    h = Harness(overlap=overlap)
    h.warm("x", PROMPT, device=False)
    h.add("a", PROMPT)
    h.schedule()
    h.reset()
    h.move(h.loads[0], error="gone")
    h.move(*h.loads)
    h.run()
    assert h.report("a")["computed"] == len(PROMPT)
    assert h.chunks_below(PROMPT) == [0, 1, 2, 3, 4]  # after recovery it shares again
    h.check_drained()
