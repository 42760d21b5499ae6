"""A reset forgets all cached KV, on the device and below, whatever is in flight just then."""

from __future__ import annotations

import pytest

from ebbtide.core.groups import KVGroup
from ebbtide.core.request import FinishReason, State

from .harness import Harness, both, one_and_two_groups, tokens

Groups = tuple[KVGroup, ...]
PROMPT = tokens(21)


@both
@one_and_two_groups
def test_after_a_reset_nothing_is_found_anywhere(overlap: int, groups: Groups) -> None:
    h = Harness(overlap=overlap, groups=groups)
    h.warm("a", PROMPT)
    h.reset()
    assert h.all_chunks_below(PROMPT) == [[]] * len(groups)
    assert h.scheduler.kv.pool.cached == 0
    h.add("b", PROMPT)
    h.run()
    assert h.sources("b") == (0, 0, 21)
    h.check_drained()


@both
@one_and_two_groups
def test_reset_while_a_request_runs_keeps_its_kv_to_itself(overlap: int, groups: Groups) -> None:
    h = Harness(overlap=overlap, groups=groups)
    h.add("a", PROMPT, max_tokens=30)
    h.step()
    h.reset()
    h.run(until=lambda: len(h.output("a")) > 12)
    said = PROMPT + h.output("a")
    assert h.all_chunks_below(said) == [[]] * len(groups)
    h.add("b", said)
    h.run()
    assert h.sources("b") == (0, 0, len(said))
    h.check_drained()


@both
@one_and_two_groups
def test_reset_while_a_request_loads(overlap: int, groups: Groups) -> None:
    h = Harness(overlap=overlap, groups=groups)
    h.warm("x", PROMPT, device=False)
    h.add("a", PROMPT)
    h.add("b", PROMPT)
    h.schedule()
    assert h.state("a") is State.LOADING
    h.reset()
    h.run()
    assert h.sources("a") == (0, 20, 1)  # the bytes it was already reading are its own
    assert h.sources("b") == (0, 0, 21)
    h.check_drained()


@both
@one_and_two_groups
def test_reset_while_a_step_loads(overlap: int, groups: Groups) -> None:
    h = Harness(overlap=overlap, groups=groups, sync_load_blocks_max=99)
    h.warm("x", PROMPT, device=False)
    h.add("a", PROMPT)
    h.fill()
    h.reset()
    h.add("b", PROMPT)
    h.run()
    assert h.sources("a") == (0, 20, 1)
    assert h.sources("b") == (0, 0, 21)
    h.check_drained()


@both
@one_and_two_groups
def test_reset_while_a_store_is_in_flight(overlap: int, groups: Groups) -> None:
    h = Harness(overlap=overlap, groups=groups)
    h.add("a", PROMPT, max_tokens=1)
    h.step()
    assert h.stores
    h.reset()
    h.move_all()
    assert h.all_chunks_below(PROMPT) == [[]] * len(groups)
    assert h.manager.slots.in_use == 0
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
    assert h.sources("a") == (0, 0, 21)
    assert h.chunks_below(PROMPT) == [0, 1, 2, 3, 4]  # after recovery it shares again
    h.check_drained()


@both
def test_reset_while_a_request_waits_after_a_preemption(overlap: int) -> None:
    """It computes all of it again, and from then on shares it."""
    h = Harness(overlap=overlap)
    h.add("a", PROMPT, max_tokens=20)
    h.step()
    h.preempt("a")
    h.drain()
    committed = len(h.requests["a"].tokens) - 1  # the last token's position was never fed
    h.reset()
    h.run(until=lambda: len(h.output("a")) == 4)
    h.move_all()
    assert h.chunks_below(PROMPT) == [0, 1, 2, 3, 4]
    h.run()
    assert h.report("a")["preempted"] == committed
    h.check_drained()


def one_event(h: Harness) -> None:
    """The next thing that happens: a plan is made, a transfer returns, or a step does."""
    if len(h.plans) < h.config.overlap and h.schedule() is not None:
        return
    if h.moving:
        h.move(next(iter(h.moving.values())))
    elif h.plans:
        h.apply()


@both
@one_and_two_groups
@pytest.mark.parametrize("sync", [99, 0], ids=["sync", "async"])
def test_reset_at_any_moment(overlap: int, groups: Groups, sync: int) -> None:
    """Nothing from before the reset is found after it, and nobody's tokens change.

    One request loads its prompt, the other feeds it in three steps. The reset comes after the first
    event, or the second, or the third, until there is none left.
    """
    names = ("loads", "feeds")
    for moment in range(100):
        h = Harness(overlap=overlap, groups=groups, sync_load_blocks_max=sync, step_tokens_max=8)
        h.warm("x", PROMPT, device=False)
        h.add("loads", PROMPT)
        h.add("feeds", tokens(21, start=5))
        for _ in range(moment):
            one_event(h)
        over = not (h.scheduler.requests or h.moving)
        waiting = [name for name in names if h.state(name) is State.WAITING]
        h.reset()
        assert h.scheduler.kv.pool.cached == 0
        assert h.all_chunks_below(PROMPT) == [[]] * len(groups)
        h.run()
        for name in names:
            assert h.finish(name) is FinishReason.LENGTH
            # who held blocks keeps them to itself; who came to them later shares as ever
            below = [0, 1, 2, 3, 4] if name in waiting else []
            assert h.all_chunks_below(h.asked[name][0]) == [below] * len(groups)
        h.check_drained()
        if over:
            break
    assert 10 < moment < 99
