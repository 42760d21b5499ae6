"""What a tier's lane does: chunks into slots and on to the device, writes, deletes, probes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ebbtide.core.plan import NO_SLOT, Direction, Transfer, TransferResult
from ebbtide.offload.arena import Arena, Bytes
from ebbtide.offload.below import Action, Job, JobResult
from ebbtide.offload.mover import Mover
from ebbtide.offload.tier_moves import TierMover
from ebbtide.offload.tiers.base import OK, Result, Status, TierContext
from ebbtide.testing.tiers import Fault, FaultyTier, MemoryTier

BLOCK_BYTES, PER_CHUNK, SLOTS = 64, 3, 4
KEYS = [bytes([n]) * 34 for n in range(6)]


class Device:
    def __init__(self) -> None:
        self.blocks = np.zeros((8, BLOCK_BYTES), np.uint8)

    def load(self, block: int, source: Bytes) -> None:
        self.blocks[block] = source

    def store(self, block: int, target: Bytes) -> None:
        target[:] = self.blocks[block]


class Place:
    """An arena with chunks 0..3 in its slots, and a tier that has them all."""

    def __init__(self, faults: Callable[[str, bytes], Fault | None] = lambda m, k: None) -> None:
        self.arena, self.device = Arena(SLOTS, PER_CHUNK, BLOCK_BYTES), Device()
        chunk_bytes = self.arena.buffer(0).nbytes
        self.tier = FaultyTier(MemoryTier(TierContext(bytes(32), chunk_bytes)), faults)
        self.mover = TierMover(self.tier, self.arena, self.device, PER_CHUNK, BLOCK_BYTES)
        for slot in range(SLOTS):
            self.arena.slot(slot, 0, PER_CHUNK)[:] = self.chunk(slot)
        self.write(range(SLOTS))

    @staticmethod
    def chunk(number: int) -> Bytes:
        return np.random.default_rng(number).integers(0, 255, (PER_CHUNK, BLOCK_BYTES), np.uint8)

    def write(self, numbers: Sequence[int]) -> list[JobResult]:
        return self.mover.do([Job("memory", Action.WRITE, KEYS[n], n) for n in numbers])


def load(key: bytes, slot: int, offset: int, blocks: tuple[int, ...], number: int = 1) -> Transfer:
    return Transfer(number, Direction.LOAD, key, slot, offset, blocks, "memory")


def test_a_chunk_comes_into_its_slot_whole_and_its_blocks_onto_the_device() -> None:
    place = Place()
    place.arena.slot(3, 0, PER_CHUNK)[:] = 0
    (result,) = place.mover.read([load(KEYS[1], 3, 1, (5, 2))])
    assert (result.error, result.seconds > 0) == ("", True)
    assert (place.arena.slot(3, 0, PER_CHUNK) == Place.chunk(1)).all()
    assert (place.device.blocks[[5, 2]] == Place.chunk(1)[1:]).all()


def test_chunks_without_a_slot_leave_the_slots_alone() -> None:
    place = Place()
    before = [place.arena.slot(n, 0, PER_CHUNK).copy() for n in range(SLOTS)]
    transfers = [load(KEYS[n], NO_SLOT, 0, (2 * n, 2 * n + 1), n) for n in (1, 2)]
    results = place.mover.read([*transfers, load(KEYS[3], 0, 2, (7,))])
    assert [result.error for result in results] == ["", "", ""]
    for number in (1, 2):
        found = place.device.blocks[2 * number : 2 * number + 2]
        assert (found == Place.chunk(number)[:2]).all()
    assert (place.device.blocks[7] == Place.chunk(3)[2]).all()
    assert all((place.arena.slot(n, 0, PER_CHUNK) == before[n]).all() for n in (1, 2, 3))


def test_one_bad_chunk_fails_alone() -> None:
    bad = KEYS[2]
    place = Place(lambda method, key: Fault.FAIL if method == "read" and key == bad else None)
    results = place.mover.read([load(KEYS[n], n, 0, (n,), n) for n in (1, 2, 3)])
    assert [bool(result.error) for result in results] == [False, True, False]
    assert not place.device.blocks[2].any()
    (missing,) = place.mover.read([load(KEYS[5], 0, 0, (0,))])
    assert missing.error == "missing"


def test_a_tier_or_a_device_that_raises_is_a_failed_load() -> None:
    place = Place()
    place.tier.read = lambda keys, buffers: 1 // 0  # type: ignore[method-assign,assignment]
    (result,) = place.mover.read([load(KEYS[1], 1, 0, (1,))])
    assert result.error == "ZeroDivisionError: integer division or modulo by zero"
    place.tier.read = lambda keys, buffers: []  # type: ignore[method-assign,assignment]
    (result,) = place.mover.read([load(KEYS[1], 1, 0, (1,))])
    assert "0 results for 1 keys" in result.error
    place = Place()
    (result,) = place.mover.read([load(KEYS[1], 1, 0, (99,))])
    assert "IndexError" in result.error


def test_jobs_are_done_in_order_each_with_its_result() -> None:
    place = Place(lambda method, key: Fault.FULL if (method, key) == ("write", KEYS[1]) else None)
    jobs = [
        Job("memory", Action.DELETE, KEYS[0]),
        Job("memory", Action.DELETE, KEYS[1]),
        Job("memory", Action.WRITE, KEYS[0], 2),
        Job("memory", Action.WRITE, KEYS[1], 3),
        Job("memory", Action.PROBE, KEYS[0]),
        Job("memory", Action.PROBE, KEYS[1]),
    ]
    results = place.mover.do(jobs)
    assert [result.job for result in results] == jobs
    statuses = [result.result.status for result in results]
    ok = Status.OK
    assert statuses == [ok, ok, ok, Status.FULL, ok, Status.MISSING]
    (result,) = place.mover.do([Job("memory", Action.CLEAR)])
    assert result.result == OK
    assert place.tier.lookup(KEYS) == [False] * len(KEYS)


def test_a_try_tells_how_fast_the_tier_is_and_leaves_nothing_there() -> None:
    place = Place()
    before = place.tier.stats()
    (result,) = place.mover.do([Job("memory", Action.TRY)])
    assert (result.result, result.seconds > 0) == (OK, True)
    assert place.tier.stats() == before
    place = Place(lambda method, key: Fault.FULL if method == "write" else None)
    (result,) = place.mover.do([Job("memory", Action.TRY)])
    assert result.result.status is Status.FULL


class Lane:
    """Does nothing, slowly, and notes when."""

    def __init__(self) -> None:
        self.order: list[object] = []
        self.gate = threading.Semaphore(0)

    def read(self, transfers: Sequence[Transfer]) -> list[TransferResult]:
        self.order += [transfer.id for transfer in transfers]
        self.gate.acquire(timeout=10)
        return [TransferResult(transfer) for transfer in transfers]

    def do(self, jobs: Sequence[Job]) -> list[JobResult]:
        self.order += [job.action for job in jobs]
        self.gate.acquire(timeout=10)
        return [JobResult(job, OK) for job in jobs]


def collect(mover: Mover, count: int) -> list[object]:
    results: list[object] = []
    end = time.monotonic() + 20
    while len(results) < count and time.monotonic() < end:
        results += mover.take_results()
        time.sleep(0.001)
    return results


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("threads", [1, 2])
def test_reads_go_before_deletes_and_those_before_writes(threads: int) -> None:
    lane = Lane()
    mover = Mover(TransferResult, tiers={"memory": lane}, threads=threads, batch=1)
    mover.submit([load(KEYS[0], 0, 0, (0,), n) for n in range(threads)])
    until(lambda: len(lane.order) == threads)  # all threads are busy
    mover.submit([Job("memory", Action.WRITE, KEYS[1], 1)])
    mover.submit([Job("memory", Action.DELETE, KEYS[2])])
    mover.submit([load(KEYS[3], 0, 0, (0,), 9)])
    lane.gate.release(9)
    assert len(collect(mover, threads + 3)) == threads + 3
    mover.close()
    assert lane.order[threads] == 9
    assert lane.order.index(Action.DELETE) < lane.order.index(Action.WRITE)


def test_writes_never_take_all_threads() -> None:
    lane = Lane()
    mover = Mover(TransferResult, tiers={"memory": lane}, threads=3, batch=1)
    mover.submit([Job("memory", Action.WRITE, KEYS[n], n) for n in range(4)])
    until(lambda: len(lane.order) == 2)
    time.sleep(0.02)
    mover.submit([load(KEYS[0], 0, 0, (0,), 7)])
    until(lambda: len(lane.order) == 3)  # though no write has returned
    assert lane.order[2] == 7
    lane.gate.release(9)
    assert len(collect(mover, 5)) == 5
    mover.close()


def test_a_lane_that_hangs_is_left_behind_and_refuses_what_comes_later() -> None:
    lane = Lane()
    mover = Mover(TransferResult, tiers={"memory": lane}, threads=1)
    mover.submit([load(KEYS[0], 0, 0, (0,))])
    until(lambda: lane.order)
    mover.close(0.05)
    late = Job("memory", Action.DELETE, KEYS[0])
    mover.submit([late])
    assert mover.take_results() == [JobResult(late, Result(Status.FAILED, "the mover is closed"))]
    lane.gate.release()
    assert len(collect(mover, 1)) == 1
