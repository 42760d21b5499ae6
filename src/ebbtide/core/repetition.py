"""Notices that an output has begun to repeat itself."""

from __future__ import annotations

from ebbtide.core.params import RepetitionStop


class RepetitionDetector:
    """Whether the output ends in one pattern of 1..``max_pattern_size`` tokens said ``min_count`` times.

    An output of period p that is said k times has (k - 1) p tokens that equal the token p places
    before them. So it is enough to keep, for every p, the length of the run of such tokens.
    """

    def __init__(self, rule: RepetitionStop) -> None:
        self._rule = rule
        self._runs = [0] * (rule.max_pattern_size + 1)

    def push(self, tokens: list[int], output_length: int) -> bool:
        """Call after each new token; ``tokens`` end in the output. True once it repeats."""
        token = tokens[-1]
        found = False
        for period in range(1, min(self._rule.max_pattern_size, output_length - 1) + 1):
            same = tokens[-1 - period] == token
            self._runs[period] = self._runs[period] + 1 if same else 0
            found = found or self._runs[period] >= period * (self._rule.min_count - 1)
        return found
