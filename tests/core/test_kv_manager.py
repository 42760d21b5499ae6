"""Blocks over the life of a request: how many, which are shared, which are let go."""

from __future__ import annotations

import pytest

from ebbtide.core.groups import KVGroup
from ebbtide.core.request import State

from .harness import Harness, tokens

both = pytest.mark.parametrize("overlap", [1, 2])


@both
@pytest.mark.parametrize("per_chunk", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 3, 4, 9])
@pytest.mark.parametrize("step_tokens", [1, 5, 16])
def test_a_window_never_holds_more_than_was_foreseen(
    overlap: int, per_chunk: int, window: int, step_tokens: int
) -> None:
    """The harness checks the bound after every call; here the pool is exactly as large as that."""
    shape = {"groups": (KVGroup(window),), "blocks_per_chunk": per_chunk, "overlap": overlap}
    limits = {"step_tokens_max": step_tokens, "length_max": 90}
    needed = Harness(num_blocks=1, **shape, **limits).scheduler.kv.blocks_needed_max(89)
    h = Harness(num_blocks=needed, host_slots=0, **shape, **limits)
    h.add("a", tokens(50), max_tokens=40)
    h.run()
    assert h.scheduler.counters.preemptions == 0
    assert len(h.output("a")) == 40
    h.check_drained()


def test_blocks_needed_by_full_attention_is_exact() -> None:
    kv = Harness(block_size=4).scheduler.kv
    assert [kv.blocks_needed_max(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_window_lets_go_of_what_it_cannot_see_and_keeps_it_findable() -> None:
    h = Harness(groups=(KVGroup(window=4),))
    h.add("a", tokens(30), max_tokens=8)
    h.step()
    ((first, _),) = h.requests["a"].tables
    assert first == 6  # position 30 sees 27 and later
    h.add("b", tokens(30))
    h.run()
    assert h.report("b")["device"] == 28
    h.check_drained()


@both
def test_a_table_that_a_plan_in_flight_holds_is_not_cut(overlap: int) -> None:
    h = Harness(groups=(KVGroup(window=4),), overlap=overlap)
    h.add("a", tokens(7), max_tokens=20)
    h.step()
    plan = h.plans[0] if overlap == 2 else h.schedule()
    assert plan is not None
    (before,) = plan.rows[0].tables
    blocks = list(before.blocks)
    while h.requests["a"].tables[0].first == before.first:
        if len(h.plans) < overlap:
            h.schedule()
        h.apply()
    assert before.blocks[: len(blocks)] == blocks
    h.run()
    h.check_drained()


def test_hits_are_shared_and_what_is_computed_is_not() -> None:
    h = Harness()
    h.warm("x", tokens(17))
    h.add("a", tokens(17), max_tokens=9)
    h.add("b", tokens(17), max_tokens=9)
    h.step()
    ours, theirs = (h.requests[name].tables[0].blocks for name in "ab")
    assert ours[:4] == theirs[:4]
    assert set(ours[4:]).isdisjoint(theirs[4:])
    assert all(h.scheduler.kv.pool.references(block) == 2 for block in ours[:4])


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    """Else the new one is preempted as soon as the others grow."""
    h = Harness(num_blocks=8, length_max=32, host_slots=0)
    h.add("a", tokens(7, start=1), max_tokens=4)
    h.add("b", tokens(7, start=2), max_tokens=4)
    h.step()
    h.add("c", tokens(10, start=3), max_tokens=1)  # 3 blocks; 4 are free, and 2 of them reserved
    h.step()
    assert h.state("c") is State.WAITING
    h.run()
    assert h.scheduler.counters.preemptions == 0
    h.check_drained()


def test_one_load_serves_all_that_wait_for_it() -> None:
    h = Harness()
    h.warm("x", tokens(21), device=False)
    for name in "abc":
        h.add(name, tokens(21))
    h.schedule()
    assert len(h.loads) == 5
    h.run()
    assert h.manager.counters.load_ok == 5
    assert [h.report(name)["host"] for name in "abc"] == [20, 0, 0]
    assert [h.report(name)["device"] for name in "abc"] == [0, 20, 20]
    h.check_drained()


@pytest.mark.parametrize("per_chunk", [2, 3])
def test_part_of_a_chunk_is_loaded_where_a_window_needs_no_more(per_chunk: int) -> None:
    h = Harness(groups=(KVGroup(window=3),), blocks_per_chunk=per_chunk)
    h.warm("x", tokens(25), device=False)
    h.add("a", tokens(25))
    h.schedule()
    (load,) = h.loads
    assert len(load.blocks) == 1
    assert load.offset == per_chunk - 1
    h.run()
    assert h.report("a")["host"] == 24, "the window that was loaded stands for all before it"
    assert h.report("a")["computed"] == 1
    h.check_drained()
