"""Loads that fail, come late or bring garbage; blocks that turn out bad; steps that raise."""

from __future__ import annotations

import pytest

from ebbtide.core.groups import KVGroup
from ebbtide.core.request import FinishReason, State

from .harness import FULL, MIXED, Harness, both, one_and_two_groups, tokens

PROMPT = tokens(21)  # 5 blocks, and one position more
Groups = tuple[KVGroup, ...]


# --- loads ---------------------------------------------------------------------------------

# Loads 0 to 4 are of full attention; 5 and 6 bring blocks 3 and 4 for a window of 6 positions. What
# came back is on the device, the window that a shorter prefix needs comes from below:
LOST = [
    # groups, lost loads, then tokens from (device, host, computed)
    pytest.param(FULL, [0], (0, 0, 21), id="first"),
    pytest.param(FULL, [2], (8, 0, 13), id="middle"),
    pytest.param(FULL, [4], (16, 0, 5), id="last"),
    pytest.param(FULL, [0, 1, 2, 3, 4], (0, 0, 21), id="all"),
    pytest.param(FULL, [1, 3], (4, 0, 17), id="two of them"),
    pytest.param(MIXED, [0], (0, 0, 21), id="two groups, first"),
    pytest.param(MIXED, [2], (0, 8, 13), id="two groups, middle"),
    pytest.param(MIXED, [4], (12, 4, 5), id="two groups, last of full attention"),
    pytest.param(MIXED, [5], (4, 8, 9), id="two groups, first of the window"),
    pytest.param(MIXED, [6], (12, 4, 5), id="two groups, last"),
    pytest.param(MIXED, [0, 1, 2, 3, 4, 5, 6], (0, 0, 21), id="two groups, all"),
    pytest.param(MIXED, [4, 5], (4, 8, 9), id="two groups, one of each"),
]


@both
@pytest.mark.parametrize("sync", [99, 0], ids=["sync", "async"])
@pytest.mark.parametrize(("groups", "lost", "sources"), LOST)
def test_loads_lose_the_first_a_middle_the_last_chunk_and_all(
    overlap: int, sync: int, groups: Groups, lost: list[int], sources: tuple[int, int, int]
) -> None:
    """It goes back to the longest prefix that is good in all groups. No lost chunk is tried again."""
    h = Harness(overlap=overlap, groups=groups, sync_load_blocks_max=sync, step_tokens_max=21)
    h.warm("a", PROMPT, device=False)
    below = h.all_chunks_below(PROMPT)
    h.lose_sync_load = lambda place: place in lost
    h.add("b", PROMPT)
    plan = h.schedule()
    for number, load in enumerate(h.loads):
        h.move(load, error="gone" if number in lost else "")
    if plan:
        h.fill()
        h.drain()
    h.lose_sync_load = lambda place: False
    assert h.output("b") == []
    assert h.state("b") is State.WAITING
    assert h.manager.counters.load_failed == len(lost)
    full = [n for n in range(5) if n not in lost]
    window = [n for n in range(5) if n < 3 or n + 2 not in lost]
    assert h.all_chunks_below(PROMPT) == [full, window][: len(groups)]
    h.run()
    assert h.sources("b") == sources
    assert h.report("b")["failed"] == 0  # nothing had been computed, so nothing was computed again
    assert h.manager.counters.load_failed == len(lost)
    assert h.scheduler.counters.failed_steps == 0
    assert h.all_chunks_below(PROMPT) == below
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
@one_and_two_groups
def test_a_load_that_never_returns_counts_as_failed_and_its_blocks_stay_until_it_does(
    overlap: int, groups: Groups
) -> None:
    h = Harness(overlap=overlap, groups=groups, load_deadline_s=5.0)
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
    assert h.sources("b") == (0, 0, 21)
    assert h.report("b")["failed"] == 0
    h.move(*h.stores) if h.stores else None
    reading = sum(len(load.blocks) for load in loads)
    assert h.loads == loads
    assert h.scheduler.kv.pool.available == 64 - reading
    h.move(*loads)
    h.run()
    h.check_drained()


@both
def test_the_next_deadline_is_that_of_the_oldest_load_and_wakes_an_idle_engine(
    overlap: int,
) -> None:
    h = Harness(overlap=overlap, load_deadline_s=5.0)
    h.warm("x", PROMPT, device=False)
    h.warm("y", tokens(21, start=3), device=False)
    h.add("a", PROMPT)
    assert h.schedule() is None
    h.now = 2.0
    h.add("b", tokens(21, start=3))
    h.add("c", PROMPT)  # waits for a's load
    assert h.schedule() is None
    assert h.scheduler.next_deadline() == 5.0
    h.now = 5.0
    h.fill()
    assert {row.request_id for row in h.plans[0].rows} == {"a"}  # c waits for what a computes now
    assert h.scheduler.next_deadline() == 7.0
    h.end("b")
    assert h.scheduler.next_deadline() is None
    h.run()
    assert h.sources("a") == (0, 0, 21)
    assert h.sources("c") == (20, 0, 1)
    h.check_drained()


@both
def test_late_load_whose_request_was_aborted_meanwhile(overlap: int) -> None:
    h = Harness(overlap=overlap, load_deadline_s=5.0)
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
@one_and_two_groups
def test_corrupt_load_is_noticed_by_the_step_that_reads_it(overlap: int, groups: Groups) -> None:
    """A checksum, after the load itself had succeeded."""
    h = Harness(overlap=overlap, groups=groups)
    h.warm("a", PROMPT, device=False)
    h.add("b", PROMPT)
    h.schedule()
    bad = h.loads[2].blocks[0]
    h.move(*h.loads)
    h.step(invalid=[bad])
    # what follows may have been computed from it, in any group
    assert h.all_chunks_below(PROMPT) == [[0, 1]] * len(groups)
    h.drain()
    h.run()
    assert h.sources("b") == ((8, 0, 13) if groups is FULL else (0, 8, 13))
    h.check_drained()


@both
@one_and_two_groups
def test_loads_that_are_given_up_are_no_loss(overlap: int, groups: Groups) -> None:
    h = Harness(overlap=overlap, groups=groups)
    h.warm("a", PROMPT, device=False)
    request = h.add("b", PROMPT, fail_on_lost_kv=True)
    h.fill()
    first, *others = h.loads
    h.scheduler.give_up([first.id])
    assert (h.state("b"), request.losses) == (State.WAITING, 0)
    in_use = h.scheduler.kv.pool.num_blocks - h.scheduler.kv.pool.available
    assert in_use == 1 + len(others)  # until they have returned
    h.fill()
    assert h.state("b") is State.LOADING
    h.move(first, error="late and wrong")
    h.run()
    assert h.finish("b") is FinishReason.LENGTH
    h.check_drained()


# --- blocks that turn out bad --------------------------------------------------------------


@both
@one_and_two_groups
def test_shared_bad_block_is_computed_once(overlap: int, groups: Groups) -> None:
    h = Harness(overlap=overlap, groups=groups, host_slots=0)
    h.warm("x", PROMPT)
    for name in "abc":
        h.add(name, PROMPT, max_tokens=9)
    h.add("d", tokens(9, start=4), max_tokens=9)
    h.step()
    h.step()
    before = len(h.output("d"))
    bad = h.blocks("a", -1)[-2]  # positions 16 .. 19
    assert all(bad in h.blocks(name, -1) for name in "abc")
    h.step(invalid=[bad])
    assert len(h.output("d")) == before + 1  # it holds no bad block
    h.run()
    # 22 positions were committed; the first one computes from the bad block on, the others' own rest
    assert [h.report(name)["failed"] for name in "abc"] == [22 - 16, 22 - 20, 22 - 20]
    assert h.report("d")["failed"] == 0
    h.check_drained()


@both
@one_and_two_groups
def test_what_was_computed_from_a_bad_block_is_not_found_any_more(
    overlap: int, groups: Groups
) -> None:
    h = Harness(overlap=overlap, groups=groups)
    request = h.add("a", PROMPT, max_tokens=20)
    h.step()
    h.move_all()
    h.fill()
    h.apply(invalid=[h.blocks("a")[1]])
    pool = h.scheduler.kv.pool
    for group in range(len(groups)):
        found = [pool.find(group, digest) is not None for digest in request.digests[:5]]
        assert found == [True, False, False, False, False]
    assert h.all_chunks_below(PROMPT) == [[0]] * len(groups)
    h.run()
    assert h.report("a")["failed"] == 21 - 4
    h.check_drained()


@both
def test_bad_block_of_a_request_that_has_just_ended(overlap: int) -> None:
    h = Harness(overlap=overlap)
    stop = h.foretell(PROMPT, 2)[1]
    h.add("a", PROMPT, max_tokens=20, stop=[stop])
    h.step()
    h.fill()
    h.apply(invalid=[h.blocks("a")[1]])
    h.run()
    assert h.finish("a") is FinishReason.STOP
    assert len(h.output("a")) == 2
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
    bad = h.blocks("a", 1)[-2]  # positions 16 .. 19
    h.step(invalid=[bad])
    h.run()
    assert h.report("a")["failed"] == 21 - 16
    h.check_drained()


# --- steps that raise ----------------------------------------------------------------------


@both
def test_failed_step_is_tried_again(overlap: int) -> None:
    h = Harness(overlap=overlap, max_step_retries=1)  # failures in a row
    h.add("a", PROMPT, max_tokens=9)
    for _ in range(3):
        h.step()
        h.step(error="flaky")
        h.drain()
    h.run()
    assert h.finish("a") is FinishReason.LENGTH
    assert h.scheduler.counters.failed_steps == 3
    assert h.report("a")["failed"] == 1 + 2 + 3  # each time it had come one position further
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
    h.drain()
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
    h.drain()
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
    assert h.sources("a") == (0, 0, 21)
    h.check_drained()
