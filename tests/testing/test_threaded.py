"""The simulator on real threads: it comes to the right end, and says so when it does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ebbtide.core.plan import Transfer, TransferResult
from ebbtide.offload.mover import Item, Mover, Outcome
from ebbtide.testing import threaded
from ebbtide.testing.threaded import ThreadedSimulation


def run_seeds(count: int) -> int:
    """Returns how many faults were injected."""
    return sum(ThreadedSimulation(seed).run().total() for seed in range(count))


def test_real_threads_come_to_the_right_end() -> None:
    assert run_seeds(30) > 100


def test_results_that_wake_nobody_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded, "PATIENCE_S", 0.5)
    monkeypatch.setattr(Mover, "take_results", lambda self: [])
    with pytest.raises(AssertionError, match="never"):
        run_seeds(10)


def test_a_transfer_that_reports_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hasty(Mover):
        """Moves the bytes of a transfer when the next one comes."""

        def _between_host_and_device(self, items: Sequence[Item]) -> list[Outcome]:
            late, self.late = getattr(self, "late", []), items
            super()._between_host_and_device(late)
            return [TransferResult(item) for item in items if isinstance(item, Transfer)]

    monkeypatch.setattr(threaded, "Mover", Hasty)
    with pytest.raises(AssertionError):
        run_seeds(40)
