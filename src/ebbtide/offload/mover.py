"""Moves bytes beside the steps: between device and host on one thread, to and from each tier on its own.

Reads go before deletes, and those before writes; one thread of a tier that has several never writes. Every
transfer and every job that was submitted comes back exactly once, as a result, also when it failed or
when the mover is closed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from ebbtide.core.plan import Direction, Transfer, TransferResult
from ebbtide.offload.arena import Bytes, ChunkMemory
from ebbtide.offload.below import Action, Job, JobResult
from ebbtide.offload.tiers.base import Result, Status

CALLED_BACK = "nobody waits for it any more"

Item = Transfer | Job
Outcome = TransferResult | JobResult


class DeviceMemory(Protocol):
    """Paged KV memory whose blocks can be copied from and to host memory."""

    def load(self, block: int, source: Bytes) -> None: ...
    def store(self, block: int, target: Bytes) -> None: ...


def move(transfer: Transfer, arena: ChunkMemory, device: DeviceMemory) -> TransferResult:
    """Move one chunk's blocks between its slot and the device. A failure is a result."""
    try:
        host = arena.slot(transfer.slot, transfer.offset, len(transfer.blocks))
        copy = device.load if transfer.direction is Direction.LOAD else device.store
        for row, block in zip(host, transfer.blocks, strict=True):
            copy(block, row)
    except Exception as error:  # whatever a device driver raises: the chunk counts as not moved
        return TransferResult(transfer, f"{type(error).__name__}: {error}")
    return TransferResult(transfer)


class TierMoves(Protocol):
    """What a lane of a tier does with what it is given: ``offload.tier_moves`` does it."""

    def read(self, transfers: Sequence[Transfer]) -> list[TransferResult]: ...
    def do(self, jobs: Sequence[Job]) -> list[JobResult]: ...


class _Lane:
    """Threads that take items from queues of three ranks, those of the lowest rank first."""

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Item]], list[Outcome]],
        deliver: Callable[[list[Outcome]], None],
        threads: int,
        batch: int,
    ) -> None:
        self._work = work
        self._deliver = deliver
        self._batch = batch
        self._queues: tuple[deque[Item], ...] = (deque(), deque(), deque())
        self._changed = threading.Condition()
        self._closing = False
        self._writing = 0
        self._writers_max = max(1, threads - 1)
        self._threads = [
            threading.Thread(target=self._run, name=f"ebbtide-{name or 'mover'}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, item: Item) -> None:
        with self._changed:
            if not self._closing:
                self._queues[_rank(item)].append(item)
                self._changed.notify()
                return
        self._deliver([_failed(item, "the mover is closed")])

    def call_back(self, loads: frozenset[int]) -> None:
        reads = self._queues[READ]
        with self._changed:
            back = [t for t in reads if isinstance(t, Transfer) and t.id in loads]
            kept = [t for t in reads if not (isinstance(t, Transfer) and t.id in loads)]
            reads.clear()
            reads.extend(kept)
        if back:
            self._deliver([TransferResult(item, CALLED_BACK, tried=False) for item in back])

    def close(self, until: float | None) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                items = self._take()
                while not items and not self._closing:
                    self._changed.wait()
                    items = self._take()
            if not items:
                return
            try:
                outcomes = self._work(items)
            except BaseException as error:  # somebody else's code: still one result per item
                outcomes = [_failed(item, f"{type(error).__name__}: {error}") for item in items]
            if _rank(items[0]) == WRITE:
                with self._changed:
                    self._writing -= 1
                    self._changed.notify()
            self._deliver(outcomes)

    def _take(self) -> list[Item]:
        """What to do next, of one rank: this thread's share, a batch at most."""
        for rank, queue in enumerate(self._queues):
            if not queue:
                continue
            if rank == WRITE:
                if self._writing == self._writers_max:
                    return []
                self._writing += 1
            share = -(-len(queue) // len(self._threads))
            return [queue.popleft() for _ in range(min(share, self._batch))]
        return []


READ, CHANGE, WRITE = range(3)


def _rank(item: Item) -> int:
    if isinstance(item, Transfer):
        return READ if item.direction is Direction.LOAD else WRITE
    return WRITE if item.action is Action.WRITE else CHANGE


def _failed(item: Item, why: str) -> Outcome:
    if isinstance(item, Transfer):
        return TransferResult(item, why)
    return JobResult(item, Result(Status.FAILED, why))


class Mover:
    """``move`` moves a chunk between host and device; ``tiers`` move them to and from the tiers of these
    names, on ``threads`` threads each. ``notify`` is called from these threads when results are ready."""

    def __init__(
        self,
        move: Callable[[Transfer], TransferResult],
        notify: Callable[[], None] = lambda: None,
        tiers: Mapping[str, TierMoves] | None = None,
        threads: int = 2,
        batch: int = 8,
    ) -> None:
        self.move = move
        self._notify = notify
        self._results: deque[Outcome] = deque()
        self._lanes = {"": _Lane("", self._between_host_and_device, self._deliver, 1, 1)}
        for name, moves in (tiers or {}).items():
            work = _tier_work(moves)
            self._lanes[name] = _Lane(name, work, self._deliver, threads, batch)

    def submit(self, items: Iterable[Item]) -> None:
        """Queue transfers and jobs. After ``close`` they come back at once, as failed."""
        for item in items:
            self._lanes[item.tier].submit(item)

    def call_back(self, loads: Collection[int]) -> None:
        """Those of these loads that have not begun come back at once, untried."""
        for lane in self._lanes.values():
            lane.call_back(frozenset(loads))

    def take_results(self) -> list[Outcome]:
        """Results that have come in since the last call."""
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def close(self, patience_s: float | None = None) -> None:
        """Finish what was submitted, then stop; leave behind what takes longer than ``patience_s``.
        Results can still be taken."""
        until = None if patience_s is None else time.monotonic() + patience_s
        for lane in self._lanes.values():
            lane.close(until)

    def _between_host_and_device(self, items: Sequence[Item]) -> list[Outcome]:
        return [self.move(item) for item in items if isinstance(item, Transfer)]

    def _deliver(self, outcomes: list[Outcome]) -> None:
        self._results.extend(outcomes)
        self._notify()


def _tier_work(moves: TierMoves) -> Callable[[Sequence[Item]], list[Outcome]]:
    def work(items: Sequence[Item]) -> list[Outcome]:
        transfers = [item for item in items if isinstance(item, Transfer)]
        jobs = [item for item in items if isinstance(item, Job)]
        return [*(moves.read(transfers) if transfers else []), *(moves.do(jobs) if jobs else [])]

    return work
