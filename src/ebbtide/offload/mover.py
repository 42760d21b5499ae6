"""Moves blocks between the device and host slots: at once, or on a thread beside the steps.

Loads go before stores. Every transfer that was submitted comes back exactly once, as a result, also
when it failed or when the mover is closed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from ebbtide.core.plan import Direction, Transfer, TransferResult
from ebbtide.offload.arena import Bytes, ChunkMemory


class DeviceMemory(Protocol):
    """Paged KV memory whose blocks can be copied from and to host memory."""

    def load(self, block: int, source: Bytes) -> None: ...
    def store(self, block: int, target: Bytes) -> None: ...


def move(transfer: Transfer, arena: ChunkMemory, device: DeviceMemory) -> TransferResult:
    """Move one chunk's blocks. A failure is a result."""
    try:
        host = arena.slot(transfer.slot, transfer.offset, len(transfer.blocks))
        copy = device.load if transfer.direction is Direction.LOAD else device.store
        for row, block in zip(host, transfer.blocks, strict=True):
            copy(block, row)
    except Exception as error:  # whatever a device driver raises: the chunk counts as not moved
        return TransferResult(transfer, f"{type(error).__name__}: {error}")
    return TransferResult(transfer)


class Mover:
    """One thread that moves chunks. ``notify`` is called from it whenever results are ready."""

    def __init__(
        self,
        move: Callable[[Transfer], TransferResult],
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self.move = move
        self._notify = notify
        self._loads: deque[Transfer] = deque()
        self._stores: deque[Transfer] = deque()
        self._results: deque[TransferResult] = deque()
        self._work = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ebbtide-mover", daemon=True)
        self._thread.start()

    def submit(self, transfers: Iterable[Transfer]) -> None:
        """Queue transfers. After ``close`` they come back at once, as failed."""
        with self._work:
            for transfer in transfers:
                if self._closing:
                    self._results.append(TransferResult(transfer, "the mover is closed"))
                    continue
                is_load = transfer.direction is Direction.LOAD
                (self._loads if is_load else self._stores).append(transfer)
            self._work.notify()

    def take_results(self) -> list[TransferResult]:
        """Results that have come in since the last call."""
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def close(self) -> None:
        """Finish what was submitted, then stop. Results can still be taken."""
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._work:
                while not (self._loads or self._stores or self._closing):
                    self._work.wait()
                if not (self._loads or self._stores):
                    return
                transfer = (self._loads or self._stores).popleft()
            try:
                result = self.move(transfer)
            except Exception as error:  # a mover of someone else's: still one result per transfer
                result = TransferResult(transfer, f"{type(error).__name__}: {error}")
            self._results.append(result)
            self._notify()
