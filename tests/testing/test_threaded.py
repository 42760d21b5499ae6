"""The simulator on real threads: it comes to the right end, and says so when it does not."""

from __future__ import annotations

import pytest

from ebbtide.core.plan import TransferResult
from ebbtide.offload.mover import Mover
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
        def _run(self) -> None:
            move, late = self.move, []

            def report_only(transfer: object) -> TransferResult:
                late.append(transfer)
                return TransferResult(transfer)  # type: ignore[arg-type]

            self.move = report_only
            super()._run()
            for transfer in late:
                move(transfer)

    monkeypatch.setattr(threaded, "Mover", Hasty)
    with pytest.raises(AssertionError):
        run_seeds(40)
