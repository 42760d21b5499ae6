"""Carries out what was decided for one tier: reads into slots and on to the device, writes, deletes."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from ebbtide.core.plan import NO_SLOT, Transfer, TransferResult
from ebbtide.keys import DIGEST_BYTES
from ebbtide.offload.arena import Arena, Bytes, ChunkMemory
from ebbtide.offload.below import Action, Job, JobResult
from ebbtide.offload.mover import DeviceMemory
from ebbtide.offload.tiers.base import Result, Status, Tier

KEY_BYTES = DIGEST_BYTES + 2
ALONE = (Action.CLEAR, Action.PROBE, Action.TRY)


class TierMover:
    """For any number of threads. A chunk that has no slot is read into memory of the thread's own.

    A tier that raises, which it must not, counts as one that failed.
    """

    def __init__(
        self,
        tier: Tier,
        arena: ChunkMemory,
        device: DeviceMemory,
        blocks_per_chunk: int,
        block_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tier = tier
        self._arena = arena
        self._device = device
        self._blocks_per_chunk = blocks_per_chunk
        self._block_bytes = block_bytes
        self._clock = clock
        self._own = threading.local()

    def read(self, transfers: Sequence[Transfer]) -> list[TransferResult]:
        """Each transfer's chunk into its slot, and from there to its device blocks."""
        homeless = self._staging([t for t in transfers if t.slot == NO_SLOT])
        buffers = [
            homeless.pop() if t.slot == NO_SLOT else self._arena.buffer(t.slot) for t in transfers
        ]
        results, seconds = self._read([t.key for t in transfers], buffers)
        return [
            self._to_device(TransferResult(t, _why(result), seconds), buffer)
            for t, result, buffer in zip(transfers, results, buffers, strict=True)
        ]

    def do(self, jobs: Sequence[Job]) -> list[JobResult]:
        """Jobs in order; those of a kind that stand together, together."""
        done: list[JobResult] = []
        while len(done) < len(jobs):
            first = jobs[len(done)]
            alike = [first]
            for job in jobs[len(done) + 1 :]:
                if job.action is not first.action or first.action in ALONE:
                    break
                alike.append(job)
            results, seconds = self._do(first.action, alike)
            done += [JobResult(j, r, seconds) for j, r in zip(alike, results, strict=True)]
        return done

    def _do(self, action: Action, jobs: Sequence[Job]) -> tuple[list[Result], float]:
        keys = [job.key for job in jobs]
        if action is Action.PROBE:
            return self._read(keys, self._staging(keys))
        if action is Action.TRY:
            return self._try()
        if action is Action.CLEAR:
            return self._ask(1, lambda: [self.tier.clear()])
        if action is Action.DELETE:
            return self._ask(len(keys), lambda: self.tier.delete(keys))
        buffers = [self._arena.buffer(job.slot) for job in jobs]
        return self._ask(len(keys), lambda: self.tier.write(keys, buffers))

    def _try(self) -> tuple[list[Result], float]:
        """Write a chunk that nobody knows, read it back, delete it: how long the read took."""
        key = secrets.token_bytes(KEY_BYTES)
        buffers = self._staging([key])
        results, seconds = self._ask(1, lambda: self.tier.write([key], buffers))
        if results[0].status is Status.OK:
            results, seconds = self._read([key], buffers)
            self._ask(1, lambda: self.tier.delete([key]))
        return results, seconds

    def _read(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> tuple[list[Result], float]:
        return self._ask(len(keys), lambda: self.tier.read(keys, buffers))

    def _ask(self, count: int, question: Callable[[], list[Result]]) -> tuple[list[Result], float]:
        """What the tier answers, and how many seconds each of the ``count`` keys took."""
        start = self._clock()
        try:
            results = question()
            if len(results) != count:
                raise TypeError(f"{len(results)} results for {count} keys")
            if not all(isinstance(result, Result) for result in results):
                raise TypeError("these are no results")
        except Exception as error:
            results = [Result(Status.FAILED, f"{type(error).__name__}: {error}")] * count
        return results, (self._clock() - start) / count

    def _to_device(self, result: TransferResult, buffer: memoryview) -> TransferResult:
        if result.error:
            return result
        transfer = result.transfer
        try:
            for row, block in zip(self._rows(buffer, transfer), transfer.blocks, strict=True):
                self._device.load(block, row)
        except Exception as error:  # whatever a device driver raises
            return result._replace(error=f"{type(error).__name__}: {error}")
        return result

    def _rows(self, buffer: memoryview, transfer: Transfer) -> Bytes:
        first, size = transfer.offset * self._block_bytes, self._block_bytes
        chunk = np.frombuffer(buffer, np.uint8)[first : first + len(transfer.blocks) * size]
        return chunk.reshape(-1, size)

    def _staging(self, users: Sequence[object]) -> list[memoryview]:
        """A buffer for each of ``users``, the calling thread's own until its next call."""
        count = len(users)
        arena: Arena | None = getattr(self._own, "arena", None)
        if arena is None or arena.num_slots < count:
            arena = Arena(count, self._blocks_per_chunk, self._block_bytes)
            self._own.arena = arena
        return [arena.buffer(number) for number in range(count)]


def _why(result: Result) -> str:
    return "" if result.status is Status.OK else result.message or result.status.value
