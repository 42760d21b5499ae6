"""What two plans in flight bring: the same engine with overlap 1 and 2, in turns.

    python benchmarks/bench_overlap.py [--rounds 9] [--trace FILE] [--plot FILE] [--json FILE]

Each variant has a process of its own, which sleeps while the other is measured. In every round each
case runs on both, one right after the other, in an order that turns round; the ratio is the median
of the rounds' ratios, so that whatever else the machine does hits both alike. After the rounds,
traced runs show where the host's time lies: `--trace` writes them for Perfetto or chrome://tracing,
`--plot` draws a few steps of them (needs matplotlib, which the package does not ask for). On a machine
that is shared, `--others-max 0.1` waits for quiet moments.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ebbtide.engine.config import DEFAULT_MODEL, MIB, EngineConfig
from ebbtide.engine.engine import Engine
from ebbtide.engine.output import Delta
from ebbtide.params import SamplingParams
from spans import Recorder, Span, Summary, draw, summarise, write_trace

T = TypeVar("T")

BATCHES = (1, 8, 32)
OVERLAPS = (1, 2)
PROMPT_TOKENS = 128  # before the first decode step that is timed
STEPS = {
    1: 48,
    8: 32,
    32: 24,
}  # decode steps per round: few, so that the variants alternate quickly
TRACED_STEPS = 40
VOCAB = (1_000, 40_000)  # ids of ordinary tokens
MIXED_USERS, MIXED_REQUESTS = 8, 16
MIXED_STOPS = frozenset(range(0, 49_000, 24))  # one token in 24 or so ends its request


class Heard(NamedTuple):
    """A delta that reached its owner."""

    at_s: float
    owner: int
    tokens: int
    last: bool


class Speed(NamedTuple):
    """tokens_per_s: by the clock. cpu_ms: processor time of all threads per token, which says much
    less about speed, but is hardly disturbed by what else the machine does."""

    tokens_per_s: float
    cpu_ms: float


class Variant:
    """An engine with one setting of overlap, and the workloads it is measured with."""

    def __init__(self, overlap: int, model: str, dtype: str, threads: int | None) -> None:
        self._engine = Engine(
            EngineConfig(
                model=model,
                dtype=dtype,
                threads=threads,
                overlap=overlap,
                kv_bytes=256 * MIB,
                host_bytes=64 * MIB,
                max_length=2048,
            )
        )
        self._recorder: Recorder | None = None

    def decode(self, batch: int, steps: int) -> Speed:
        """The speed from when all of ``batch`` requests decode until the last has ended."""
        cpu_s = time.process_time()
        heard = self._decode(batch, steps)
        cpu_s = time.process_time() - cpu_s
        first_s: dict[int, float] = {}
        for each in heard:
            first_s.setdefault(each.owner, each.at_s)
        begin_s = max(first_s.values())
        timed = sum(h.tokens for h in heard if h.at_s > begin_s)
        cpu_ms = cpu_s * 1e3 / sum(h.tokens for h in heard)
        return Speed(timed / (heard[-1].at_s - begin_s), cpu_ms)

    def _decode(self, batch: int, steps: int) -> list[Heard]:
        rng = random.Random(batch)  # the same prompts each time: their KV is cached, mostly
        params = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
        jobs = [(prompt_of(rng, PROMPT_TOKENS), params) for _ in range(batch)]
        return self._serve(jobs, users=batch)

    def mixed(self, seed: int) -> Speed:
        """The speed from the first arrival to the last end. Prompts are new each time."""
        cpu_s = time.process_time()
        heard, seconds = self._mixed(seed)
        tokens = sum(h.tokens for h in heard)
        return Speed(tokens / seconds, (time.process_time() - cpu_s) * 1e3 / tokens)

    def _mixed(self, seed: int) -> tuple[list[Heard], float]:
        """A number of users, each of whom asks again once answered: prompts arrive while others
        decode, and most answers end on a stop token, which no scheduler can know in advance."""
        rng = random.Random(seed)
        jobs = []
        for _ in range(MIXED_REQUESTS):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=rng.randint(16, 48),
                ignore_eos=True,
                stop_token_ids=MIXED_STOPS,
            )
            jobs.append((prompt_of(rng, rng.randint(32, 256)), params))
        begin_s = time.perf_counter()
        heard = self._serve(jobs, MIXED_USERS)
        return heard, heard[-1].at_s - begin_s

    def _serve(self, jobs: list[tuple[list[int], SamplingParams]], users: int) -> list[Heard]:
        """Run jobs, ``users`` at a time. What was heard, in order."""
        heard: list[Heard] = []
        failures: list[str] = []
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()

        def sink(owner: int, delta: Delta) -> None:
            failures.extend([delta.error] if delta.error else [])
            last = delta.finish_reason is not None
            heard.append(Heard(time.perf_counter(), owner, len(delta.token_ids), last))
            if last:
                ended.put(owner)

        for owner, (prompt, params) in enumerate(jobs):
            if owner >= users:
                ended.get()
            self._engine.submit(prompt, params, partial(sink, owner))
        for _ in range(min(users, len(jobs))):
            ended.get()
        assert not failures, failures[0]
        return heard

    def trace(self, batch: int) -> list[Span]:
        """The spans of a run of decoding requests. Tracing costs a little: not for rates."""
        self._start_trace()
        self._decode(batch, TRACED_STEPS)
        return self._stop_trace()

    def trace_mixed(self, seed: int) -> tuple[list[Span], int]:
        """The spans of a mixed run, and how many tokens it delivered."""
        self._start_trace()
        heard, _ = self._mixed(seed)
        return self._stop_trace(), sum(h.tokens for h in heard)

    def _start_trace(self) -> None:
        if self._recorder is None:
            self._recorder = Recorder(self._engine._loop)
        self._recorder.start()

    def _stop_trace(self) -> list[Span]:
        assert self._recorder is not None
        while self._engine.stats().running:  # a step that nobody waits for may still be running
            time.sleep(0.01)
        return self._recorder.stop()

    def close(self) -> None:
        self._engine.close()


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(*VOCAB) for _ in range(length)]


def serve(connection: Connection, *arguments: Any) -> None:
    """A process with one variant: answers (method, arguments) with what the method returns."""
    variant = Variant(*arguments)
    connection.send(None)
    while (call := connection.recv()) is not None:
        method, arguments = call
        connection.send(getattr(variant, method)(*arguments))
    variant.close()


class Remote:
    """A variant in a process of its own. ``wait`` until it is ready."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(target=serve, args=(child, *arguments), daemon=True)
        self._process.start()
        child.close()
        self._connection.recv()
        self._usage = psutil.Process(self._process.pid)

    def cpu_s(self) -> float:
        """CPU time that the process has used."""
        times = self._usage.cpu_times()
        return times.user + times.system

    def __call__(self, method: str, *arguments: Any) -> Any:
        self._connection.send((method, arguments))
        return self._connection.recv()

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


class Pair(NamedTuple):
    """One case, measured on both variants, one right after the other.

    speeds: by overlap. others: the share of all processors that other programs took meanwhile, 0
    to 1.
    """

    speeds: dict[int, Speed]
    others: float

    @property
    def ratio(self) -> float:
        return self.speeds[2].tokens_per_s / self.speeds[1].tokens_per_s

    @property
    def cpu_ratio(self) -> float:
        return self.speeds[2].cpu_ms / self.speeds[1].cpu_ms


Pairs = dict[str, list[Pair]]


class Quiet:
    """Runs work on the variants while other programs take no more than ``others_max`` of all
    processors, and runs it again where they took more meanwhile; until the time has run out."""

    def __init__(self, variants: dict[int, Remote], others_max: float, limit_s: float) -> None:
        self._variants = variants
        self._others_max = others_max
        self._until_s = time.monotonic() + limit_s

    def time_left(self) -> bool:
        return time.monotonic() < self._until_s

    def run(self, work: Callable[[], T]) -> tuple[T, float]:
        """What the work returned, and the others' share. Chosen by that share, never by the result."""
        while True:
            while self.time_left() and psutil.cpu_percent(0.5) > self._others_max * 100:
                pass  # the variants sleep: all of it is others
            before, ours_s = psutil.cpu_times(), self._ours_s()
            result = work()
            after, ours_s = psutil.cpu_times(), self._ours_s() - ours_s
            total_s = sum(after) - sum(before)
            idle_s = after.idle - before.idle + after.iowait - before.iowait
            others = max(0.0, total_s - idle_s - ours_s) / total_s
            if others <= self._others_max or not self.time_left():
                return result, others

    def _ours_s(self) -> float:
        return sum(variant.cpu_s() for variant in self._variants.values())


def measure(
    variants: dict[int, Remote], quiet: Quiet, batches: Sequence[int], rounds: int
) -> Pairs:
    """Case -> one pair per round, or fewer where time ran out. One run of each warms up."""
    calls: dict[str, tuple[Any, ...]] = {
        f"decode, batch {batch}": ("decode", batch, STEPS.get(batch, 24)) for batch in batches
    }
    pairs: Pairs = {}
    for number in track(range(rounds + 1), description="rounds", transient=True):
        order = OVERLAPS if number % 2 else OVERLAPS[::-1]
        for case, call in {**calls, "mixed": ("mixed", number)}.items():
            work = partial(run_both, variants, order, call)
            if number == 0:
                work()
            elif quiet.time_left():
                pairs.setdefault(case, []).append(Pair(*quiet.run(work)))
    return pairs


def run_both(
    variants: dict[int, Remote], order: Sequence[int], call: tuple[Any, ...]
) -> dict[int, Speed]:
    return {overlap: variants[overlap](*call) for overlap in order}


def rate_table(measured: Pairs) -> Table:
    table = Table(title="Tokens per second, medians of the rounds", title_justify="left")
    table.add_column("case")
    columns = ("rounds", "overlap 1", "overlap 2", "ratio 2/1", "quartiles", "min, max")
    for column in (*columns, "quieter half", "CPU/token 2/1", "others' CPU"):
        table.add_column(column, justify="right")
    for case, pairs in measured.items():
        ratios = [pair.ratio for pair in pairs]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        quiet = sorted(pairs, key=lambda pair: pair.others)[: (len(pairs) + 1) // 2]
        table.add_row(
            case,
            str(len(pairs)),
            *(
                f"{statistics.median(p.speeds[o].tokens_per_s for p in pairs):.1f}"
                for o in OVERLAPS
            ),
            f"{statistics.median(ratios):.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{min(ratios):.3f}, {max(ratios):.3f}",
            f"{statistics.median(pair.ratio for pair in quiet):.3f}",
            f"{statistics.median(pair.cpu_ratio for pair in pairs):.3f}",
            f"{statistics.median(pair.others for pair in pairs):.0%}",
        )
    return table


def step_table(summaries: dict[tuple[int, int], Summary]) -> Table:
    table = Table(title="One decode step, ms (traced)", title_justify="left")
    columns = ("batch", "overlap", "step", "device", "schedule", "submit", "apply", "hand out")
    for column in (*columns, "host", "host CPU", "hidden", "device idle"):
        table.add_column(column, justify="right")
    for (batch, overlap), summary in summaries.items():
        parts = [summary.host_ms.get(name, 0.0) for name in columns[4:]]
        figures = (*parts, summary.host_total_ms, summary.host_cpu_ms)
        table.add_row(
            str(batch),
            str(overlap),
            f"{summary.wall_ms:.2f}",
            f"{summary.device_ms:.2f}",
            *(f"{figure:.3f}" for figure in figures),
            f"{summary.hidden:.0%}",
            f"{summary.idle_ms:.3f}",
        )
    return table


def wasted_line(overlap: int, spans: Sequence[Span], tokens: int) -> str:
    """How many sampled tokens nobody got: those of requests that had ended a step before."""
    sampled = sum(span.sampled for span in spans)
    return (
        f"mixed, overlap {overlap}: {sampled:,} tokens sampled, {tokens:,} delivered, "
        f"{(sampled - tokens) / sampled:.1%} wasted"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="of the device; PyTorch's own choice if unsaid")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--minutes", type=float, default=60, help="start no pair after this time")
    parser.add_argument(
        "--others-max",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="measure while other programs take no more than this of all processors, 0 to 1",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write all traced runs here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a few steps, as PNG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    console = Console(width=150)
    variants = {
        overlap: Remote(overlap, args.model, args.dtype, args.threads) for overlap in OVERLAPS
    }
    quiet = Quiet(variants, args.others_max, args.minutes * 60)
    pairs = measure(variants, quiet, args.batches, args.rounds)
    console.print(rate_table(pairs))
    runs = {
        (batch, overlap): quiet.run(partial(variants[overlap], "trace", batch))[0]
        for batch in args.batches
        for overlap in OVERLAPS
    }
    summaries = {(b, o): summarise(spans, b) for (b, o), spans in runs.items()}
    console.print(step_table(summaries))
    mixed = {overlap: variants[overlap]("trace_mixed", 0) for overlap in OVERLAPS}
    for overlap, (spans, tokens) in mixed.items():
        console.print(wasted_line(overlap, spans, tokens))
    for variant in variants.values():
        variant.close()
    if args.trace:
        named = {f"batch {b}, overlap {o}": spans for (b, o), spans in runs.items()}
        named |= {f"mixed, overlap {o}": spans for o, (spans, _) in mixed.items()}
        write_trace(args.trace, named)
    if args.plot:
        batch = args.batches[-1]
        shown = {f"overlap {o}": (runs[batch, o], batch) for o in OVERLAPS}
        draw(args.plot, shown, f"{batch} requests decode, {args.model}", steps=6)
    if args.json:
        figures = {
            "pairs": {case: [pair._asdict() for pair in each] for case, each in pairs.items()},
            "steps": {f"batch {b}, overlap {o}": asdict(s) for (b, o), s in summaries.items()},
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
