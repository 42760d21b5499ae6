from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.params import RepetitionDetector, RepetitionStop


def repeats(output: list[int], rule: RepetitionStop) -> bool:
    """By definition: it ends in some pattern, said ``min_count`` times."""
    return any(
        size * rule.min_count <= len(output)
        and output[-size * rule.min_count :] == output[-size:] * rule.min_count
        for size in range(1, rule.max_pattern_size + 1)
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 1), max_size=5),
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 5),
    st.integers(2, 4),
)
def test_equals_its_definition(
    prompt: list[int], output: list[int], size_max: int, count_min: int
) -> None:
    rule = RepetitionStop(size_max, count_min)
    detector = RepetitionDetector(rule)
    tokens = list(prompt)
    for length, token in enumerate(output, 1):
        tokens.append(token)
        assert detector.push(tokens, length) == repeats(output[:length], rule)


def test_the_prompt_does_not_count() -> None:
    detector = RepetitionDetector(RepetitionStop(1, 3))
    tokens = [7, 7, 7]
    for length, expected in [(1, False), (2, False), (3, True)]:
        tokens.append(7)
        assert detector.push(tokens, length) is expected
