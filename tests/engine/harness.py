"""The step loop on real threads, with the witness in place of a model, and who hears what it says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ebbtide.core.output import Output
from ebbtide.core.plan import StepOutcome, StepPlan, Transfer, TransferResult
from ebbtide.core.scheduler import Scheduler, SchedulerConfig
from ebbtide.engine.lookups import Chunking, Lookups
from ebbtide.engine.loop import EngineLoop
from ebbtide.offload.arena import Arena, slot_bytes_for
from ebbtide.offload.below import Asked, Below, Hints, WritePolicy
from ebbtide.offload.host import HostSlots
from ebbtide.offload.manager import OffloadManager
from ebbtide.offload.mover import Mover, move
from ebbtide.offload.tier_moves import TierMover
from ebbtide.offload.tiers.base import Tier, TierContext
from ebbtide.params import SamplingParams
from ebbtide.testing.witness import WitnessExecutor, WitnessMemory, WitnessModel, oracle

BLOCK = 4
MODEL = WitnessModel()
CONTEXT = TierContext(bytes(32), slot_bytes_for(WitnessMemory(MODEL, 1, BLOCK).block_bytes, 2))


class Heard:
    """The listener: collects what every request hears, and may stop some of them."""

    def __init__(self, stop: Callable[[Output], bool] = lambda output: False) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Output] = {}
        self._stop = stop
        self._changed = threading.Condition()

    def __call__(self, outputs: Sequence[Output]) -> list[str]:
        with self._changed:
            for output in outputs:
                assert output.request_id not in self.ends, "heard after its end"
                if output.token is not None:
                    self.tokens.setdefault(output.request_id, []).append(output.token)
                if output.finish is not None:
                    self.ends[output.request_id] = output
            self._changed.notify_all()
        return [output.request_id for output in outputs if self._stop(output)]

    def wait(self, *request_ids: str) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: self.ends.keys() >= set(request_ids), timeout=20)
        assert done, f"still waiting for {set(request_ids) - self.ends.keys()}"

    def wait_for_token(self, request_id: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: request_id in self.tokens, timeout=20)


@contextmanager
def running(
    heard: Heard,
    *,
    overlap: int = 1,
    blocks: int = 64,
    slots: int = 32,
    sync_max: int = 0,
    fault: Callable[[Transfer], str] = lambda transfer: "",
    step_fault: Callable[[StepPlan], BaseException | None] = lambda plan: None,
    step_seconds: float = 0.0,
    tiers: Sequence[Tier] = (),
    write: WritePolicy = WritePolicy.WRITE_THROUGH,
    lookup_deadline_s: float = 5.0,
    close_s: float = 10.0,
    **settings: object,
) -> Iterator[EngineLoop]:
    """``step_seconds``: what every step says that it took. ``tiers``: opened with ``CONTEXT``."""
    below = [
        Below(tier.name, Asked(tier.lookup) if tier.immediate else Hints(), write, threads=2)
        for tier in tiers
    ]
    offload = OffloadManager(HostSlots(slots), blocks_per_chunk=2, below=below)
    config = SchedulerConfig(
        num_blocks=blocks,
        block_size=BLOCK,
        length_max=200,
        step_tokens_max=32,
        overlap=overlap,
        sync_load_blocks_max=sync_max,
        **settings,  # type: ignore[arg-type]
    )
    scheduler = Scheduler(config, offload)
    memory = WitnessMemory(MODEL, blocks, BLOCK)
    arena = Arena(slots, 2, memory.block_bytes)

    def moving(transfer: Transfer) -> TransferResult:
        error = fault(transfer)
        return TransferResult(transfer, error) if error else move(transfer, arena, memory)

    class Executor(WitnessExecutor):
        def run(self, plan: StepPlan) -> StepOutcome:
            error = step_fault(plan)
            if error:
                return StepOutcome(error=error)
            return replace(super().run(plan), seconds=step_seconds)

    movers = {t.name: TierMover(t, arena, memory, 2, memory.block_bytes) for t in tiers}
    mover = Mover(moving, lambda: loop.wake(), movers)
    loop = EngineLoop(scheduler, offload, Executor(MODEL, memory, moving), mover, heard)
    slow = [tier for tier in tiers if not tier.immediate]
    if slow:
        chunking = Chunking(config.namespace, BLOCK, 2, 1)
        loop.lookups = Lookups(slow, chunking, lookup_deadline_s, loop.found, loop.ready)
    loop.start()
    try:
        yield loop
    finally:
        loop.close(close_s)
        if loop._failure is None:
            assert scheduler.kv.pool.available == blocks, "a block leaked"
            assert not scheduler.requests
            assert offload.slots.pins == 0


def params(count: int, seed: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=count, seed=seed, temperature=0.0)


def wait_until_stored(loop: EngineLoop) -> None:
    end = time.monotonic() + 20
    while loop.inspect(lambda scheduler: scheduler.kv.transfers_in_flight):
        assert time.monotonic() < end, "transfers that never end"
        time.sleep(0.001)


def prompt(number: int, length: int = 30) -> list[int]:
    return [(number * 7 + i * i) % 50 for i in range(length)]


def expected(number: int, count: int, length: int = 30) -> list[int]:
    return oracle(MODEL, prompt(number, length), params(count), count)
