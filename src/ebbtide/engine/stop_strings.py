"""Stop strings in a stream of text: what may be shown already, and where the text ends.

A stream stops at the first position where any stop string is complete; of several that are complete
there, the longest counts. The text ends before it. This does not depend on how the text was cut into
pieces. Matching is Knuth, Morris and Pratt's (1977), one automaton per string: time per character
does not grow with the text or with the strings.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Give it text with ``push``; it passes on what cannot belong to a stop string any more.

        pushed so far    [ passed on | held back ]
                                     '- the longest end that begins some stop string

    ``stops``: none of them empty.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = list(dict.fromkeys(stops))
        assert all(self._stops), "an empty stop string"
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends in
        self._held = ""
        self._over = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string was found: then it is the last,
        and later text is dropped."""
        if self._over:
            return "", True
        whole = self._held + text
        for at in range(len(self._held), len(whole)):
            if length := self._step(whole[at]):
                self._over, self._held = True, ""
                return whole[: at + 1 - length], True
        cut = len(whole) - max(self._matched, default=0)
        self._held = whole[cut:]
        return whole[:cut], False

    def flush(self) -> str:
        """At the end of the text: what was held back after all."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _step(self, character: str) -> int:
        """Advance every automaton; the length of the longest stop string complete now, else 0."""
        longest = 0
        for index, stop in enumerate(self._stops):
            length = self._matched[index]
            while length and stop[length] != character:
                length = self._fallbacks[index][length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                longest = max(longest, length)
                length = 0  # nothing is matched after this
            self._matched[index] = length
        return longest


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of ``stop``: the length of its longest proper prefix that is also its end."""
    table = [0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = table[length - 1]
        if stop[length] == character:
            length += 1
        table.append(length)
    return table
