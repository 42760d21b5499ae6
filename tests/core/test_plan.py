from __future__ import annotations

from .harness import Harness, tokens


def test_a_row_says_how_much_of_the_growing_lists_it_means() -> None:
    h = Harness(overlap=2, block_size=4)
    h.add("a", tokens(6), max_tokens=9)
    first, second = h.schedule(), h.schedule()
    assert first is not None
    assert second is not None
    (row,), (next_row,) = first.rows, second.rows
    assert (row.start, row.end, row.known, row.output_index) == (0, 6, 6, 0)
    assert row.prompt_length == 6
    assert (next_row.start, next_row.end, next_row.known) == (6, 7, 6)  # of a token still unknown
    assert next_row.output_index == 1
    assert next_row.prompt_length == 6
    h.apply()
    assert row.tokens is next_row.tokens
    assert len(row.tokens) == 7
    assert (row.known, next_row.known) == (6, 6)
    h.run()


def test_only_the_row_that_ends_a_prompt_samples() -> None:
    h = Harness(step_tokens_max=4)
    h.add("a", tokens(10), max_tokens=1)
    samples = []
    while h.schedule() is not None:
        samples += [row.sampling is not None for row in h.plans[0].rows]
        h.apply()
    assert samples == [False, False, True]
