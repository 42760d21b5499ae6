"""What the scheduler costs: CPU time of `schedule` and `apply` per step, without any model.

    python benchmarks/bench_scheduler.py [--json FILE] [--overlap 2] [--rounds 9]

Outcomes are made up. The host tier's decisions are part of it; its transfers are said to have
succeeded, off the clock. The pool is full of cached blocks, so that anything that scanned it would
show. The garbage collector is set as the engine sets it: collected and frozen once after the start,
and on from then. Each figure is the median of the rounds' medians, in process CPU time.

The second table runs the engine's whole loop, detokenising included, on a device that takes a fixed
time without using the CPU, as a GPU would: how much of the host's work does it hide?
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from ebbtide.core.output import Output
from ebbtide.core.plan import StepOutcome, StepPlan, TransferResult
from ebbtide.core.scheduler import Scheduler, SchedulerConfig
from ebbtide.engine.loop import EngineLoop
from ebbtide.engine.output import Delta
from ebbtide.engine.streams import Streams
from ebbtide.models.load import DEFAULT_MODEL, load_checkpoint
from ebbtide.models.tokenizer import Tokenizer
from ebbtide.offload.host import HostSlots
from ebbtide.offload.manager import OffloadManager
from ebbtide.offload.mover import Mover
from ebbtide.params import SamplingParams

BLOCK_SIZE, BLOCKS_PER_CHUNK = 16, 4
STEPS_PER_ROUND = 16  # one block per request
DEVICE_STEP_S = 0.005
DEVICE_STEPS_PER_ROUND = 64
WARMUP_STEPS = 16
PARAMS = SamplingParams(max_tokens=1_000_000, temperature=0.0, seed=1)


class Cost(NamedTuple):
    """Milliseconds per step."""

    schedule_ms: float
    apply_ms: float

    @property
    def total_ms(self) -> float:
        return self.schedule_ms + self.apply_ms


class Bench:
    def __init__(self, num_blocks: int, requests: int, step_tokens: int, overlap: int) -> None:
        self.manager = OffloadManager(HostSlots(20_000), BLOCKS_PER_CHUNK)
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            length_max=8_000,
            batch_max=max(256, requests),
            step_tokens_max=step_tokens,
            overlap=overlap,
        )
        self.scheduler = Scheduler(config, self.manager)
        self._in_flight: list[StepPlan] = []
        self._fill_pool()

    def _fill_pool(self) -> None:
        """Every block is cached: free, but with content that can be hit."""
        pool = self.scheduler.kv.pool
        blocks = pool.take(pool.num_blocks)
        for block in blocks:
            pool.publish(0, block.to_bytes(32, "big"), block)
        pool.drop(blocks)

    def step(self) -> Cost:
        """One turn of the engine's loop: schedule a plan, apply the oldest one."""
        start = time.process_time()
        plan = self.scheduler.schedule(0.0)
        scheduled = time.process_time() - start
        if plan is not None:
            self._in_flight.append(plan)
        if len(self._in_flight) < self.scheduler.config.overlap:
            return self.step()
        oldest = self._in_flight.pop(0)
        outcome = StepOutcome([7] * sum(row.sampling is not None for row in oldest.rows))
        start = time.process_time()
        self.scheduler.apply(oldest, outcome)
        applied = time.process_time() - start
        self.scheduler.transferred(TransferResult(t) for t in self.scheduler.take_transfers())
        return Cost(scheduled * 1e3, applied * 1e3)

    def settle_garbage(self) -> None:
        gc.collect()
        gc.freeze()


def decoding(requests: int, num_blocks: int, rounds: int, overlap: int) -> Cost:
    """Cost of a step in which every one of ``requests`` decodes one token."""
    bench = Bench(num_blocks, requests, max(512, requests * BLOCK_SIZE), overlap)
    for number in range(requests):
        prompt = [number % 50_000, *range(BLOCK_SIZE - 1)]
        bench.scheduler.add(f"request-{number}", prompt, PARAMS)
    for _ in range(3):
        bench.step()
    assert bench.scheduler.running == requests
    bench.settle_garbage()
    medians = []
    for _ in range(rounds):
        costs = [bench.step() for _ in range(STEPS_PER_ROUND)]
        # a mean within the round: the blocks that fill up are a part of the work
        medians.append(Cost(*(statistics.fmean(column) for column in zip(*costs, strict=True))))
    gc.unfreeze()
    return Cost(*(statistics.median(column) for column in zip(*medians, strict=True)))


def admission(length: int, num_blocks: int, rounds: int) -> float:
    """Microseconds to admit a request whose prompt is all cached, its digests included."""
    bench = Bench(num_blocks, 256, 4096, overlap=1)
    scheduler = bench.scheduler
    prompts = [[number, *range(length - 1)] for number in range(8)]
    for number, prompt in enumerate(prompts):
        scheduler.add(f"warm-{number}", prompt, SamplingParams(max_tokens=1))
    while scheduler.requests:
        bench.step()
    bench.settle_garbage()
    batch = 64
    medians = []
    for turn in range(rounds):
        for number in range(batch):
            prompt = prompts[number % len(prompts)]
            scheduler.add(f"{turn}-{number}", prompt, SamplingParams(max_tokens=1))
        medians.append(bench.step().schedule_ms * 1e3 / batch)
        assert scheduler.counters.finished
        assert not scheduler.requests, "all of them were admitted in one step, and ended"
    gc.unfreeze()
    return statistics.median(medians)


def measure(rounds: int, overlap: int) -> Iterator[dict[str, float | int | str]]:
    for requests in (8, 64, 256, 1_024):
        for num_blocks in (10_000, 1_000_000):
            cost = decoding(requests, num_blocks, rounds, overlap)
            yield {
                "what": "decoding",
                "requests": requests,
                "blocks": num_blocks,
                "schedule_ms": round(cost.schedule_ms, 4),
                "apply_ms": round(cost.apply_ms, 4),
                "total_ms": round(cost.total_ms, 4),
            }
    for num_blocks in (10_000, 1_000_000):
        yield {
            "what": "admission of a cached prompt of 1000 tokens",
            "requests": 1,
            "blocks": num_blocks,
            "total_ms": round(admission(1_000, num_blocks, rounds) / 1e3, 4),
        }


class FixedDevice:
    """An executor whose steps take ``step_s`` and no CPU; it samples ``tokens`` in turn."""

    def __init__(self, step_s: float, tokens: Sequence[int]) -> None:
        self.steps = 0
        self._step_s = step_s
        self._tokens = tokens
        self._worker = ThreadPoolExecutor(max_workers=1)

    def submit(self, plan: StepPlan) -> Future[StepOutcome]:
        return self._worker.submit(self._run, plan)

    def close(self) -> None:
        self._worker.shutdown()

    def alone_s(self, steps: int) -> float:
        """Seconds per step with nothing to do for the host: a sleep takes longer than it says."""
        times = [self._worker.submit(self._timed_sleep).result() for _ in range(steps)]
        return statistics.median(times)

    def _timed_sleep(self) -> float:
        begin_s = time.perf_counter()
        time.sleep(self._step_s)
        return time.perf_counter() - begin_s

    def _run(self, plan: StepPlan) -> StepOutcome:
        time.sleep(self._step_s)
        self.steps += 1
        count = sum(row.sampling is not None for row in plan.rows)
        turns = range(self.steps, self.steps + count)
        return StepOutcome([self._tokens[turn % len(self._tokens)] for turn in turns])


class Listener:
    """The engine's own way from tokens to deltas; reads the clocks of its thread at every step's end."""

    def __init__(self, streams: Streams, steps: int) -> None:
        self.readings: list[tuple[float, float]] = []  # seconds: wall, CPU of the engine's thread
        self.done = threading.Event()
        self._streams = streams
        self._steps = steps

    def __call__(self, outputs: Sequence[Output]) -> list[str]:
        stopped = self._streams.listen(outputs)
        if outputs and not self.done.is_set():
            self.readings.append((time.perf_counter(), time.thread_time()))
            if len(self.readings) > self._steps:
                self.done.set()
        return stopped


def hiding(requests: int, overlap: int, rounds: int, tokenizer: Tokenizer) -> dict[str, float]:
    """The whole loop with ``requests`` decoding: milliseconds per step, medians, and the share hidden.

    Hidden is 1 - (step - device) / host, from 0 to 1: the host's work that made no step longer.
    """
    bench = Bench(10_000, requests, max(512, requests * BLOCK_SIZE), overlap)
    tokens = tokenizer.encode(
        "The tide goes out, and what it leaves on the sand is a café: 海 🌊. "
    )
    device = FixedDevice(DEVICE_STEP_S, tokens)
    streams = Streams(tokenizer)
    listener = Listener(streams, WARMUP_STEPS + rounds * DEVICE_STEPS_PER_ROUND)
    mover = Mover(TransferResult, lambda: loop.wake())
    loop = EngineLoop(bench.scheduler, bench.manager, device, mover, listener)
    heard: list[Delta] = []
    for number in range(requests):
        streams.open(f"request-{number}", 0, PARAMS, heard.append)
    prompts = [[number, *range(BLOCK_SIZE - 1)] for number in range(requests)]
    loop.add((f"request-{n}", prompt, PARAMS) for n, prompt in enumerate(prompts))
    bench.settle_garbage()
    device_s = device.alone_s(DEVICE_STEPS_PER_ROUND)
    loop.start()
    listener.done.wait()
    loop.close()
    gc.unfreeze()
    readings = listener.readings[WARMUP_STEPS:]
    costs = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(readings)]
    step_s, host_s = (statistics.median(column) for column in zip(*costs, strict=True))
    return {
        "host_ms": round(host_s * 1e3, 4),
        "device_ms": round(device_s * 1e3, 4),
        "step_ms": round(step_s * 1e3, 4),
        "hidden": round(min(1.0, max(0.0, 1 - (step_s - device_s) / host_s)), 3),
    }


def measure_hiding(rounds: int) -> tuple[Table, list[dict[str, float | int | str]]]:
    tokenizer = load_checkpoint(DEFAULT_MODEL, torch.float32).tokenizer
    title = f"The whole loop on a device of {DEVICE_STEP_S * 1e3:g} ms per step"
    table = Table(title=title, title_justify="left")
    for column in ("requests", "overlap", "host CPU", "device", "step", "hidden"):
        table.add_column(column, justify="right")
    figures: list[dict[str, float | int | str]] = []
    for requests in (64, 256):
        for overlap in (1, 2):
            figure = hiding(requests, overlap, rounds, tokenizer)
            times = (f"{figure[name]:.3f} ms" for name in ("host_ms", "device_ms", "step_ms"))
            table.add_row(str(requests), str(overlap), *times, f"{figure['hidden']:.0%}")
            known = {"what": "whole loop", "requests": requests, "overlap": overlap}
            figures.append(known | figure)
    return table, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--overlap", type=int, choices=(1, 2), default=1)
    arguments = parser.parse_args()
    table = Table(title=f"Scheduler, CPU time per step (overlap {arguments.overlap})")
    for column in ("", "requests", "pool, blocks", "schedule", "apply", "both"):
        table.add_column(column, justify="left" if not column else "right")
    figures = []
    for figure in measure(arguments.rounds, arguments.overlap):
        figures.append(figure)
        parts = [figure.get(name) for name in ("schedule_ms", "apply_ms", "total_ms")]
        table.add_row(
            str(figure["what"]),
            f"{figure['requests']:,}",
            f"{figure['blocks']:,}",
            *("" if part is None else f"{part:.3f} ms" for part in parts),
        )
    Console().print(table)
    table, hidden = measure_hiding(arguments.rounds)
    figures += hidden
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
