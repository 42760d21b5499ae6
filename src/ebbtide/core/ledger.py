"""Where a request's tokens came from. Positions are counted when they are committed, once.

``reached`` is the number of positions that have ever been committed. Committing beyond it counts
a prompt position by its source; computing below it again counts as recomputed, by its cause. So
the sources sum to the prompt's length as soon as its prefill is complete, whatever happened.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

Source = str  # DEVICE, COMPUTED, HOST, or the name of a tier below it
DEVICE = "device"  # found in a block on the device
HOST = "host"  # loaded from the host tier
COMPUTED = "computed"


class Cause(enum.Enum):
    """Why a request's positions are computed again."""

    PREEMPTED = "preempted"
    FAILED = "failed"


class Span(NamedTuple):
    """Positions [start, end) from one source."""

    start: int
    end: int
    source: Source


class Ledger:
    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self.reached = 0
        self.sources = dict.fromkeys((DEVICE, HOST, COMPUTED), 0)
        self.recomputed = dict.fromkeys(Cause, 0)

    def commit(self, span: Span, cause: Cause) -> int:
        """Positions up to ``span.end`` are committed, those of the span by its source.

        Returns how many of them were computed again.
        """
        fresh = min(span.end, self.prompt_length) - max(span.start, self.reached)
        if fresh > 0:
            self.sources[span.source] = self.sources.get(span.source, 0) + fresh
        computed = span.source == COMPUTED
        again = max(0, min(span.end, self.reached) - span.start) if computed else 0
        self.recomputed[cause] += again
        self.reached = max(self.reached, span.end)
        return again
