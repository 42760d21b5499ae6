from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.core.ledger import COMPUTED, DEVICE, HOST, Cause, Ledger, Span

PROMPT = 20


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.sampled_from(Cause))))
def test_sources_sum_to_the_prompt_whatever_happened(lives: list[tuple[int, int, Cause]]) -> None:
    """A life: positions found at its start, positions computed after them; then it is preempted."""
    ledger = Ledger(PROMPT)
    reached = again = 0
    for found, computed, cause in lives:
        end = found + computed
        ledger.commit(Span(0, found, HOST), cause)
        ledger.commit(Span(found, end, COMPUTED), cause)
        again += max(0, min(end, reached) - found)
        reached = max(reached, end)
        assert sum(ledger.sources.values()) == min(PROMPT, reached)
    assert sum(ledger.recomputed.values()) == again
    assert ledger.reached == reached


def test_a_position_counts_by_where_it_first_came_from() -> None:
    ledger = Ledger(10)
    ledger.commit(Span(0, 4, DEVICE), Cause.PREEMPTED)
    ledger.commit(Span(4, 6, COMPUTED), Cause.PREEMPTED)
    ledger.commit(Span(0, 8, HOST), Cause.FAILED)
    ledger.commit(Span(8, 12, COMPUTED), Cause.FAILED)
    assert ledger.sources == {DEVICE: 4, HOST: 2, COMPUTED: 4}
    assert sum(ledger.recomputed.values()) == 0


def test_computing_again_counts_by_its_cause() -> None:
    ledger = Ledger(10)
    ledger.commit(Span(0, 12, COMPUTED), Cause.PREEMPTED)
    ledger.commit(Span(4, 12, COMPUTED), Cause.PREEMPTED)
    ledger.commit(Span(8, 20, COMPUTED), Cause.FAILED)
    assert ledger.recomputed == {Cause.PREEMPTED: 8, Cause.FAILED: 4}
