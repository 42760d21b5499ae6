"""KV groups: sets of layers that share one attention pattern and one block table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Full attention (``window is None``), or a sliding window of ``window`` positions.

    A position p of a sliding group sees the positions (p - window, p].
    """

    window: int | None = None

    def first_visible(self, position: int) -> int:
        """The earliest position whose KV the query at ``position`` reads."""
        return 0 if self.window is None else max(0, position - self.window + 1)
