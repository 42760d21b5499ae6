"""The mover, with real threads: whatever happens, every transfer comes back exactly once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from ebbtide.core.plan import Direction, Transfer, TransferResult
from ebbtide.offload.arena import Arena
from ebbtide.offload.below import Job, JobResult
from ebbtide.offload.mover import Mover, move
from ebbtide.offload.tiers.base import Result, Status

BLOCK_BYTES = 64


class Device:
    def __init__(self, num_blocks: int) -> None:
        self.blocks = np.random.default_rng(1).integers(0, 255, (num_blocks, BLOCK_BYTES), np.uint8)

    def load(self, block: int, source: np.ndarray) -> None:
        self.blocks[block] = source

    def store(self, block: int, target: np.ndarray) -> None:
        target[:] = self.blocks[block]


class BrokenDevice(Device):
    def load(self, block: int, source: np.ndarray) -> None:
        raise OSError("the link is down")


def transfer(
    number: int, direction: Direction = Direction.LOAD, blocks: tuple[int, ...] = (0,)
) -> Transfer:
    return Transfer(number, direction, b"key", 0, 0, blocks)


def drain(mover: Mover, count: int, timeout_s: float = 20.0) -> list[TransferResult]:
    results: list[TransferResult] = []
    end = time.monotonic() + timeout_s
    while len(results) < count and time.monotonic() < end:
        results += mover.take_results()
        time.sleep(0.001)
    return results


def test_bytes_go_there_and_back() -> None:
    device, arena = Device(6), Arena(2, 3, BLOCK_BYTES)
    before = device.blocks.copy()
    store = Transfer(1, Direction.STORE, b"k", 1, 0, (4, 0, 2))
    assert move(store, arena, device) == TransferResult(store)
    device.blocks[:] = 0
    load = Transfer(2, Direction.LOAD, b"k", 1, 1, (5, 3))  # the chunk's blocks 1 and 2
    assert move(load, arena, device) == TransferResult(load)
    assert (device.blocks[5] == before[0]).all()
    assert (device.blocks[3] == before[2]).all()


def test_a_failing_device_is_a_result() -> None:
    load = transfer(1)
    result = move(load, Arena(1, 1, BLOCK_BYTES), BrokenDevice(1))
    assert result == TransferResult(load, "OSError: the link is down")


def test_loads_go_before_stores() -> None:
    order: list[int] = []
    gate = threading.Event()

    def record(t: Transfer) -> TransferResult:
        gate.wait(10)
        order.append(t.id)
        return TransferResult(t)

    mover = Mover(record)
    mover.submit([transfer(0, Direction.STORE)])
    time.sleep(0.05)  # it is being moved now
    mover.submit([transfer(i, Direction.STORE) for i in (1, 2)])
    mover.submit([transfer(i, Direction.LOAD) for i in (3, 4)])
    gate.set()
    drain(mover, 5)
    mover.close()
    assert order == [0, 3, 4, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_every_transfer_comes_back_exactly_once(seed: int) -> None:
    rng = random.Random(seed)

    def unreliable(t: Transfer) -> TransferResult:
        if t.id % 7 == 0:
            time.sleep(0.002)
        if t.id % 5 == 0:
            raise RuntimeError("broken")
        return TransferResult(t, "refused" if t.id % 3 == 0 else "")

    notified = threading.Semaphore(0)
    mover = Mover(unreliable, notified.release)
    results: list[TransferResult] = []

    def submit(start: int) -> None:
        for number in range(start, start + 50):
            direction = Direction.LOAD if number % 2 else Direction.STORE
            mover.submit([transfer(number, direction)])

    threads = [threading.Thread(target=submit, args=(i * 50,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while rng.random() < 0.9:
        results += mover.take_results()
    for thread in threads:
        thread.join()
    mover.close()  # with work queued
    results += mover.take_results()
    assert sorted(r.transfer.id for r in results) == list(range(200))
    for result in results:
        number = result.transfer.id
        expected = (
            "RuntimeError: broken" if number % 5 == 0 else "refused" if number % 3 == 0 else ""
        )
        assert result.error == expected
    assert all(notified.acquire(timeout=5) for _ in range(200))
    assert mover.take_results() == []


class Slow:
    """A tier's hands that wait for ``gate`` before each read."""

    def __init__(self) -> None:
        self.gate, self.began = threading.Event(), threading.Semaphore(0)

    def read(self, transfers: Sequence[Transfer]) -> list[TransferResult]:
        self.began.release()
        assert self.gate.wait(20)
        return [TransferResult(t) for t in transfers]

    def do(self, jobs: Sequence[Job]) -> list[JobResult]:
        return [JobResult(job, Result(Status.OK)) for job in jobs]


def test_loads_that_have_not_begun_can_be_called_back() -> None:
    slow, notified = Slow(), threading.Semaphore(0)
    mover = Mover(lambda t: TransferResult(t), notified.release, {"slow": slow}, threads=1, batch=2)
    mover.submit([transfer(0)._replace(tier="slow")])
    assert slow.began.acquire(timeout=20)
    mover.submit(transfer(number)._replace(tier="slow") for number in (1, 2, 3))
    mover.call_back([0, 1, 3, 7])
    back = drain(mover, 2)
    assert [(r.transfer.id, bool(r.error), r.tried) for r in back] == [
        (1, True, False),
        (3, True, False),
    ]
    slow.gate.set()
    rest = drain(mover, 2)
    assert [(r.transfer.id, r.error, r.tried) for r in rest] == [(0, "", True), (2, "", True)]
    mover.close()
    assert mover.take_results() == []


def test_closing_finishes_what_was_submitted_and_refuses_what_comes_later() -> None:
    mover = Mover(lambda t: time.sleep(0.001) or TransferResult(t))
    mover.submit([transfer(i) for i in range(30)])
    mover.close()
    assert len(mover.take_results()) == 30
    late = transfer(99)
    mover.submit([late])
    assert mover.take_results() == [TransferResult(late, "the mover is closed")]
    mover.close()
