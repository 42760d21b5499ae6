from __future__ import annotations

import pytest

from ebbtide.core.request import LEGAL, Drain, Request, State
from ebbtide.keys import block_digest
from ebbtide.params import RepetitionStop, SamplingParams


def request(prompt: list[int], **params: object) -> Request:
    return Request("a", prompt, SamplingParams(**params), 20, b"root", 1, 7, False)  # type: ignore[arg-type]


@pytest.mark.parametrize("old", State)
@pytest.mark.parametrize("new", State)
def test_an_illegal_move_raises_and_changes_nothing(old: State, new: State) -> None:
    r = request([1])
    r.state = old
    if new in LEGAL[old]:
        r.move(new)
        assert r.state is new
    else:
        with pytest.raises(AssertionError, match=f"a: {old.name} -> {new.name}"):
            r.move(new)
        assert r.state is old


def test_every_state_is_reached_and_only_finished_is_final() -> None:
    assert set().union(*LEGAL.values()) == set(State)
    assert [state for state, after in LEGAL.items() if not after] == [State.FINISHED]


def test_the_chain_grows_with_the_tokens() -> None:
    r = request([1, 2, 3, 4, 5])
    first = block_digest(b"root", [1, 2])
    assert r.digest_upto(2, 2) == [first, block_digest(first, [3, 4])]
    with pytest.raises(AssertionError, match="block 2 is not full"):
        r.digest_upto(3, 2)
    r.tokens.append(6)
    assert len(r.digest_upto(3, 2)) == 3


def test_giving_up_blocks_keeps_the_tokens() -> None:
    r = request([1, 2, 3])
    r.tokens.append(4)
    r.committed = r.scheduled = r.published = 3
    r.private = True
    r.forget_blocks()
    assert (r.tokens, r.target, r.committed, r.scheduled) == ([1, 2, 3, 4], 4, 0, 0)
    assert not r.private


def test_rank_is_priority_then_arrival() -> None:
    assert request([1]).rank == (1, 7)
    assert Drain.LOST > Drain.ENDED > Drain.PREEMPTED > Drain.NO


def test_repr_tells_where_it_is() -> None:
    assert repr(request([1, 2], repetition=RepetitionStop(1, 2))) == (
        "<Request a WAITING 0 committed, 0 scheduled, target 2, 0 in flight>"
    )
