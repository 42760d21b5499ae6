"""Faults that other systems had, one test each; the report is named in the test's docstring.

Those that belong to the tiers below host memory are in ``test_known_failures_below.py``. That an idle
engine is woken (local-inference-lab #191) is also tested with threads, in tests/engine.

Many of these faults are also planted as mutants: `make mutants`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from ebbtide.core.groups import KVGroup
from ebbtide.core.request import FinishReason, State
from ebbtide.keys import root_digest

from .core.harness import Harness, both, tokens

PROMPT = tokens(21)


# --- wrong tokens --------------------------------------------------------------------------


@both
def test_aborted_request_stores_only_what_was_computed(overlap: int) -> None:
    """vllm #49285: an aborted request's chunks are stored up to its token count."""
    h = Harness(overlap=overlap, step_tokens_max=8)
    h.add("a", PROMPT)
    h.schedule()
    h.end("a")
    h.run()
    assert h.chunks_below(PROMPT) == [0, 1]
    h.check_drained()


@both
@pytest.mark.parametrize("lengths", [(7, 1), (6, 2), (5, 3)])
def test_a_block_that_ends_on_the_final_token_is_not_stored(
    overlap: int, lengths: tuple[int, int]
) -> None:
    """vllm #54193, #54288: its last slot was never written, and a later request loads it."""
    prompt, output = tokens(lengths[0]), lengths[1]
    h = Harness(overlap=overlap)
    h.add("a", prompt, max_tokens=output)
    h.run()
    said = prompt + h.output("a")
    assert len(said) == 8
    assert h.chunks_below(said) == [0]
    h.forget_device()
    h.add("b", said)
    h.run()
    h.check_drained()


@both
@pytest.mark.parametrize("lost", [0, 2, 4])
def test_rejected_sync_load_goes_back_and_computes(overlap: int, lost: int) -> None:
    """vllm #49250: it goes on with garbage (one plan in flight) or at an offset (two)."""
    h = Harness(overlap=overlap, sync_load_blocks_max=99)
    h.warm("a", PROMPT, device=False)
    h.lose_sync_load = lambda place: place == lost
    h.add("b", PROMPT, max_tokens=9)
    h.step()
    h.lose_sync_load = lambda place: False
    h.run()
    assert len(h.output("b")) == 9
    h.check_drained()


@both
def test_a_block_is_stored_after_the_step_that_wrote_it(overlap: int) -> None:
    """vllm #45704, #31341: a store copies a block before its compute has finished."""
    h = Harness(overlap=overlap)
    h.add("a", PROMPT, max_tokens=9)
    h.schedule()
    h.schedule() if overlap == 2 else None
    assert h.stored == []  # the invariants check it at every later event
    h.run()
    h.check_drained()


@both
def test_blocks_of_a_transfer_are_not_handed_out_again(overlap: int) -> None:
    """vllm #46951: a block is handed out again while a transfer still reads or writes it."""
    h = Harness(overlap=overlap, num_blocks=12, length_max=40)
    h.warm("a", PROMPT, device=False)
    h.add("b", PROMPT)
    h.schedule()
    loads = h.loads
    h.end("b")
    h.add("c", tokens(24, start=5), max_tokens=4)
    h.step()
    taken = {block for table in h.requests["c"].tables for block in table.blocks}
    assert taken.isdisjoint(block for load in loads for block in load.blocks)
    h.run()
    h.check_drained()


@both
def test_blocks_that_a_step_writes_are_not_freed_on_abort(overlap: int) -> None:
    """sglang #35049: freed on abort while a write into them is in flight."""
    h = Harness(overlap=overlap, num_blocks=12, length_max=40)
    h.add("a", PROMPT)
    h.step()
    h.fill()
    written = set(h.blocks("a"))
    h.end("a")
    h.add("c", tokens(24, start=5), max_tokens=4)
    assert h.scheduler.kv.pool.available == 12 - len(written)
    while h.plans:
        assert written.isdisjoint(h.blocks("c") if h.requests["c"].tables else ())
        h.apply()
        assert h.plans or h.state("a") is State.FINISHED
    h.run()
    assert h.finish("c") is FinishReason.LENGTH
    h.check_drained()


@both
def test_a_chunk_that_could_not_be_stored_is_considered_again(overlap: int) -> None:
    """vllm #46972, #46824: it is skipped for ever, a hole that caps every later hit."""
    h = Harness(overlap=overlap, stores_max=1)
    h.add("a", PROMPT, max_tokens=20)
    h.step()
    assert len(h.stores) == 1
    h.run()
    assert h.chunks_below(PROMPT) == [0, 1, 2, 3, 4]
    h.check_drained()


@both
def test_a_failed_store_is_not_served(overlap: int) -> None:
    """LMCache #4991."""
    h = Harness(overlap=overlap)
    h.add("a", PROMPT, max_tokens=1)
    h.step()
    h.move(*h.stores, error="disk full")
    h.forget_device()
    h.add("b", PROMPT)
    h.run()
    assert h.sources("b") == (0, 0, 21)
    h.check_drained()


@both
@pytest.mark.parametrize("sync", [0, 99])
def test_a_failed_load_does_not_count_as_loaded(overlap: int, sync: int) -> None:
    """dynamo #15079, vllm-ascend #10561."""
    h = Harness(overlap=overlap, sync_load_blocks_max=sync)
    h.warm("a", PROMPT, device=False)
    h.lose_sync_load = lambda place: True
    h.add("b", PROMPT)
    h.schedule()
    if h.loads:
        h.move(*h.loads, error="gone")
    h.run()
    assert h.sources("b") == (0, 0, 21)
    h.check_drained()


def test_no_two_fields_of_a_key_collide() -> None:
    """vllm #53495, #44701: the key leaves out salt or adapter, or two fields collide."""
    roots = {
        root_digest(namespace, tags)
        for namespace in (b"", b"x", b"salt")
        for tags in ({}, {"salt": "x"}, {"adapter": "x"}, {"salt": "x", "adapter": "x"})
    }
    assert len(roots) == 12


@both
def test_reset_empties_host_memory_too(overlap: int) -> None:
    """vllm #57727: a reset empties the device and goes on serving from host memory."""
    h = Harness(overlap=overlap)
    h.warm("a", PROMPT)
    h.reset()
    h.add("b", PROMPT)
    h.run()
    assert h.sources("b") == (0, 0, 21)
    h.check_drained()


# --- counters ------------------------------------------------------------------------------


@both
def test_sources_sum_to_the_prompt_after_preemption_and_failed_loads(overlap: int) -> None:
    """LMCache #2912, vllm #26372, #44531: hits exceed cached tokens, counters go negative."""
    h = Harness(overlap=overlap, num_blocks=12, length_max=44, sync_load_blocks_max=99)
    h.warm("x", PROMPT, device=False)
    h.lose_sync_load = lambda place: place == 1
    h.add("a", PROMPT, max_tokens=20)
    h.add("b", PROMPT[:9] + tokens(9, start=8), max_tokens=20)
    h.run()
    assert h.scheduler.counters.preemptions
    for name in "ab":
        report = h.report(name)
        assert min(report.values()) >= 0
        sources = report["device"] + report["host"] + report["computed"]
        assert sources == len(h.asked[name][0])
    total = sum(h.scheduler.counters.prompt_tokens.values())
    assert total == sum(len(prompt) for prompt, _ in h.asked.values())
    h.check_drained()


# --- crashes -------------------------------------------------------------------------------


@both
def test_abort_of_a_queued_request_that_owns_no_block(overlap: int) -> None:
    """vllm #49118."""
    h = Harness(overlap=overlap)
    h.add("a", PROMPT)
    h.end("a")
    assert h.finish("a") is FinishReason.ABORT
    assert h.schedule() is None
    h.check_drained()


@both
def test_preempted_request_comes_back_while_its_stores_are_in_flight(overlap: int) -> None:
    """vllm #46014."""
    h = Harness(overlap=overlap)
    h.add("a", PROMPT, max_tokens=20)
    h.step()
    h.preempt("a")
    h.drain()
    assert h.stores
    h.schedule()
    assert h.state("a") is State.RUNNING
    h.run()
    assert h.report("a")["preempted"] == overlap
    assert h.chunks_below(PROMPT) == [0, 1, 2, 3, 4]
    h.check_drained()


@both
@pytest.mark.parametrize("sync", [0, 99])
def test_failed_load_with_several_groups(overlap: int, sync: int) -> None:
    """vllm #45474."""
    groups = (KVGroup(), KVGroup(window=5), KVGroup(window=9))
    for lost in range(7):
        h = Harness(overlap=overlap, groups=groups, sync_load_blocks_max=sync)
        h.warm("a", PROMPT, device=False)
        h.lose_sync_load = lambda place, lost=lost: place == lost
        h.add("b", PROMPT)
        plan = h.schedule()
        assert plan is None or len(plan.loads) > lost
        if h.loads:
            h.move(h.loads[lost], error="gone")
        else:
            h.apply()
        h.lose_sync_load = lambda place: False
        h.run()
        h.check_drained()


@both
def test_what_lookup_found_stays_until_it_is_used(overlap: int) -> None:
    """vllm #42289, #43884: evicted between lookup and use."""
    h = Harness(overlap=overlap, host_slots=5)
    h.warm("a", PROMPT, device=False)
    h.add("b", PROMPT)
    h.schedule()
    loads = h.loads
    assert len(loads) == 5
    h.add("c", tokens(21, start=5), max_tokens=1)
    h.step()  # stores of c would need the slots
    assert h.stores == []
    h.run()
    assert h.report("b")["host"] == 20
    h.check_drained()


@both
@pytest.mark.parametrize("length", [4, 20])
def test_whole_prompt_cached(overlap: int, length: int) -> None:
    """nano-vllm #144: nothing to compute, no logits to sample from."""
    h = Harness(overlap=overlap)
    h.warm("a", tokens(length))
    h.add("b", tokens(length))
    h.run()
    assert h.report("b")["computed"] == 4
    h.check_drained()


@both
def test_prefix_hit_right_after_a_preemption(overlap: int) -> None:
    """nano-vllm #211."""
    h = Harness(overlap=overlap, host_slots=0)
    h.add("a", PROMPT, max_tokens=9)
    h.step()
    h.preempt("a")
    h.run()
    # 20 positions are found again; one was committed behind them, or two with a step in flight
    assert h.report("a")["preempted"] == overlap
    h.check_drained()


# --- hangs ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("sync", [0, 99])
def test_a_chunk_that_fails_to_load_is_tried_once(overlap: int, sync: int) -> None:
    """vllm #49176: found by the next lookup, and failing again, for ever."""
    h = Harness(overlap=overlap, sync_load_blocks_max=sync)
    h.warm("a", PROMPT, device=False)
    tried: list[bytes] = []
    h.lose_sync_load = lambda place: True
    h.add("b", PROMPT)
    for _ in range(20):
        plan = h.schedule()
        tried += [load.key for load in (plan.loads if plan else [])]
        if h.plans:
            h.apply()
        for load in h.loads:
            tried.append(load.key)
            h.move(load, error="gone")
        h.move_all()
        if h.finish("b"):
            break
    assert h.finish("b") is FinishReason.LENGTH
    assert len(tried) == len(set(tried)) == 5
    h.check_drained()


@both
def test_a_pending_load_has_a_deadline(overlap: int) -> None:
    """vllm #49829: a hit that is "pending" has none."""
    h = Harness(overlap=overlap, load_deadline_s=3.0)
    h.warm("a", PROMPT, device=False)
    h.add("b", PROMPT)
    h.add("c", PROMPT)  # it waits for b's load
    h.schedule()
    assert h.scheduler.next_deadline() == 3.0
    h.now = 3.0
    while not (h.finish("b") and h.finish("c")):
        for store in h.stores:
            h.move(store)
        h.step()
    h.run()
    h.check_drained()


@both
def test_recovery_leaves_something_to_schedule(overlap: int) -> None:
    """local-inference-lab/vllm #191: recovery puts a request back, nothing wakes the idle engine."""
    h = Harness(overlap=overlap)
    h.warm("a", PROMPT, device=False)
    h.add("b", PROMPT)
    h.schedule()
    h.move(*h.loads, error="gone")
    assert h.schedule() is not None  # the engine's loop schedules after every transfer's return
    h.run()
    h.check_drained()


@both
def test_holders_of_blocks_never_wait_behind_those_that_need_them(overlap: int) -> None:
    """vllm #45388, #53868, #42371: nothing runs, N wait."""
    h = Harness(overlap=overlap, num_blocks=12, length_max=44, step_tokens_max=8)
    h.warm("x", PROMPT, device=False)
    for name in "abcdef":
        start = 0 if name in "ace" else 5
        h.add(name, tokens(21, start=start), max_tokens=20, priority=ord(name) % 3)
    h.run()
    assert all(len(h.output(name)) == 20 for name in "abcdef")
    h.check_drained()


@both
def test_a_full_staging_area_is_not_waited_for(overlap: int) -> None:
    """LMCache #2942: an allocation loops for ever when the staging area is full."""
    h = Harness(overlap=overlap, host_slots=2)
    h.warm("a", tokens(9), device=False)
    h.add("b", tokens(9))
    h.schedule()  # pins both slots
    h.add("c", tokens(21, start=5), max_tokens=30)
    while h.finish("c") is None:
        h.step()
    assert h.stored[2:] == []
    h.run()
    h.check_drained()


# --- leaks and limits ----------------------------------------------------------------------


@both
def test_blocks_of_an_aborted_load_come_back(overlap: int) -> None:
    """vllm #46283."""
    h = Harness(overlap=overlap)
    h.warm("a", PROMPT, device=False)
    h.add("b", PROMPT)
    h.schedule()
    h.end("b")
    h.run()
    assert h.scheduler.kv.pool.available == 64
    h.check_drained()


@both
@pytest.mark.parametrize("moment", ["before", "after"])
def test_pins_are_dropped_once_on_abort(overlap: int, moment: str) -> None:
    """LMCache #3381, vllm #44100: twice, or never."""
    h = Harness(overlap=overlap)
    h.warm("a", PROMPT, device=False)
    h.add("b", PROMPT)
    h.schedule()
    assert h.manager.slots.pins == 5
    if moment == "after":
        h.move(*h.loads)
    h.end("b")
    h.run()
    assert h.manager.slots.pins == 0
    h.check_drained()


@both
def test_the_memory_cap_is_enforced(overlap: int) -> None:
    """llama.cpp #26216."""
    h = Harness(overlap=overlap, host_slots=7)
    for number in range(6):
        h.warm(f"r{number}", tokens(21, start=number))
        assert h.manager.slots.in_use <= 7
    assert h.manager.slots.evictions == 6 * 5 - 7


def test_keys_are_the_same_in_another_process() -> None:
    """LMCache #1139: keys differ between processes, so that nothing outlives one."""
    code = "from ebbtide.keys import *; print(root_digest(b'n', {'salt': 's'}).hex())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == root_digest(b"n", {"salt": "s"}).hex()


# --- slow ----------------------------------------------------------------------------------


@both
def test_sharers_wait_for_their_own_chunks_only(overlap: int) -> None:
    """vllm #44294: every request that shares a prefix waits for one whole load."""
    h = Harness(overlap=overlap)
    h.warm("a", tokens(61), device=False)
    h.add("long", tokens(61))
    h.add("short", tokens(6))
    h.schedule()
    h.move(h.loads[0])
    plan = h.schedule()
    assert plan is not None
    assert [row.request_id for row in plan.rows] == ["short"]
    h.run()
    h.check_drained()


@both
def test_blocks_behind_a_hole_count_as_cached(overlap: int) -> None:
    """vllm #52022: a reuse threshold never counts blocks behind the first miss."""
    h = Harness(overlap=overlap)
    h.warm("a", PROMPT)
    pool = h.scheduler.kv.pool
    pool.unpublish(pool.find(0, h.requests["a"].digests[1]))  # a hole on the device
    h.add("b", PROMPT)
    h.run()
    assert (h.report("b")["device"], h.report("b")["host"]) == (16, 4)
    h.check_drained()
