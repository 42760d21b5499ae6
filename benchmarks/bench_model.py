"""How fast the model runs, beside transformers and beside what the machine allows, in one run.

The same weights; ours in the form that "auto" takes, theirs in bfloat16. Both engines, and the
machine's limits, are measured in turns, several rounds of each, so that whatever else the machine does
hits all of them; the ratio is the median of the rounds' ratios. transformers runs its cached forward
with the cache that its ``generate`` takes by default, which counts, and with a static one made for
exactly these lengths. Each engine has a process of its own, which sleeps while the other is measured:
in one process, their OpenMP threads would slow each other down.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import multiprocessing
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table as RichTable
from torch.profiler import ProfilerActivity, profile, record_function

from ebbtide.core.plan import Row, StepPlan, Table, TransferResult
from ebbtide.engine.build import build_model
from ebbtide.engine.config import EngineConfig
from ebbtide.models.checkpoint import Checkpoint, Form
from ebbtide.models.executor import TorchExecutor
from ebbtide.models.kv import KVMemory, layout_for
from ebbtide.models.load import DEFAULT_MODEL, load_checkpoint
from ebbtide.models.native import NativeKernels, NativeNorm, NativePacked
from ebbtide.models.packed import Quantized
from ebbtide.models.sampler import Ask, sample
from ebbtide.params import SamplingParams
from reference import transformers_model

EMBEDDING = "model.embed_tokens.weight"
PREFILL_TOKENS = 1024
PROMPT_TOKENS = 128  # before the first decode step that is timed
STEPS = 12  # decode steps per round
BATCHES = (1, 8, 32)
CACHES = ("dynamic", "static")
BLOCK_SIZE = 16
TARGETS = {"prefill": 1.1, "decode 1": 2.0, "decode 8": 2.2}
GREEDY = SamplingParams(temperature=0.0).with_defaults({})
READ_BYTES = 512 << 20
MATMUL_SIZE = 2048


@dataclass(frozen=True)
class Result:
    """One case. Rates in tokens/s, medians over the rounds."""

    case: str
    ebbtide: float
    dynamic: float  # transformers with the cache that its generate takes by default
    static: float  # transformers with its other cache, made for exactly these lengths
    ratio: float  # to dynamic
    ratio_static: float
    limit: float
    limited_by: str


class Ours:
    """Drives a ``TorchExecutor`` with plans made by hand; blocks in sequence."""

    def __init__(self, checkpoint: Checkpoint, num_blocks: int, kernels: str) -> None:
        self.layout = layout_for(checkpoint.config, BLOCK_SIZE, torch.bfloat16)
        self.kv = KVMemory(self.layout, num_blocks * len(self.layout.groups), "cpu")
        config = EngineConfig(kernels=kernels)
        cpu = torch.device("cpu")
        self.model = build_model(config, checkpoint, self.layout, cpu, torch.bfloat16)
        self._executor = TorchExecutor(self.model, self.kv, TransferResult)
        self._rows: list[Row] = []
        self._free = 0

    def resident_mib(self) -> float:
        """What this process has in memory."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20

    def prefill(self, prompts: list[list[int]]) -> float:
        """Feed prompts in one step, in blocks that others may have used before. Returns seconds."""
        self._rows = self.rows(prompts)
        return seconds(self._step)

    def decode(self, steps: int) -> float:
        """Seconds for this many steps of what was last fed."""
        return seconds(lambda: [self._step() for _ in range(steps)])

    def rows(self, prompts: list[list[int]]) -> list[Row]:
        self._free = 0
        return [
            self._row(f"r{i}", list(prompt), 0, self._tables()) for i, prompt in enumerate(prompts)
        ]

    def _tables(self) -> tuple[Table, ...]:
        return tuple(Table(0, []) for _ in self.layout.groups)

    def _row(self, name: str, tokens: list[int], start: int, tables: tuple[Table, ...]) -> Row:
        end = len(tokens)
        for table in tables:
            while len(table.blocks) * BLOCK_SIZE < end:
                table.blocks.append(self._free)
                self._free += 1
        return Row(name, tokens, end, start, end, tables, GREEDY, 0)

    def _step(self) -> None:
        rows = self._rows
        plan = StepPlan(0, rows, (), sum(row.end - row.start for row in rows))
        outcome = self._executor.submit(plan).result()
        if outcome.error is not None:
            raise outcome.error
        for row, token in zip(rows, outcome.tokens, strict=True):
            row.tokens.append(token)
        self._rows = [self._row(row.request_id, row.tokens, row.end, row.tables) for row in rows]

    @torch.inference_mode()
    def breakdown(self, prompts: list[list[int]], decode: bool) -> dict[str, float]:
        """Milliseconds of one step by part, on this thread. The executor is gone after that."""
        self._executor.close()
        rows = self.rows(prompts)
        if decode:
            self.model.forward(self.model.plan(rows, {}), self.kv)
            rows = [self._row(r.request_id, [*r.tokens, 1], r.end, r.tables) for r in rows]
        return breakdown(self, rows)


class Theirs:
    """transformers with the same weights and either of its caches, "dynamic" or "static"."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._model = transformers_model(checkpoint, torch.bfloat16)
        self._caches: dict[str, transformers.Cache] = {}
        self._next: dict[str, torch.Tensor] = {}

    def prefill(self, kind: str, prompts: list[list[int]], positions: int) -> float:
        """Seconds to feed prompts. positions: how many the cache will have to hold."""
        config = self._model.config
        self._next[kind] = torch.tensor(prompts)

        def work() -> None:
            self._caches[kind] = (
                transformers.StaticCache(config=config, max_cache_len=positions)
                if kind == "static"
                else transformers.DynamicCache(config=config)
            )
            self._forward(kind)

        return seconds(work)

    def decode(self, kind: str, steps: int) -> float:
        """Seconds for this many steps of what was last fed."""
        return seconds(lambda: [self._forward(kind) for _ in range(steps)])

    @torch.inference_mode()
    def _forward(self, kind: str) -> None:
        cache = self._caches[kind]
        out = self._model(self._next[kind], past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._next[kind] = out.logits[:, -1].argmax(-1, keepdim=True)
        self._next[kind].tolist()  # a generation loop looks at every token


def serve(
    connection: Connection,
    form: Form | None,
    model: str,
    threads: int,
    blocks: int,
    kernels: str = "auto",
) -> None:
    """A process with one engine: ours with weights in a form, or theirs. Answers (method, arguments)
    with what the method returns."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(threads)
    checkpoint = load_checkpoint(model, torch.bfloat16, form=form or Form.WIDE)
    engine = Ours(checkpoint, blocks, kernels) if form else Theirs(checkpoint)
    del checkpoint
    connection.send(None)
    while (call := connection.recv()) is not None:
        method, arguments = call
        connection.send(getattr(engine, method)(*arguments))


class Remote:
    """An engine in a process of its own."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(target=serve, args=(child, *arguments), daemon=True)
        self._process.start()
        child.close()
        self._connection.recv()

    def __call__(self, method: str, *arguments: Any) -> Any:
        self._connection.send((method, arguments))
        return self._connection.recv()

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Limits:
    """What the machine gives: bytes read per second, and multiplications."""

    def __init__(self) -> None:
        self._data = torch.ones(READ_BYTES // 4)
        shape = (MATMUL_SIZE, MATMUL_SIZE)
        self._a = torch.randn(shape).to(torch.bfloat16)
        self._b = torch.randn(shape).to(torch.bfloat16)
        self.read_rate = self.matmul_rate = 0.0

    def measure(self) -> None:
        """Once more; the best counts."""
        self.read_rate = max(self.read_rate, READ_BYTES / seconds(self._data.sum))
        took = seconds(lambda: self._a @ self._b)
        self.matmul_rate = max(self.matmul_rate, 2 * MATMUL_SIZE**3 / took)


def weight_counts(checkpoint: Checkpoint) -> tuple[int, int]:
    """Weights that every token is multiplied with: those of the layers, and the output head's."""
    layers = sum(math.prod(weight.shape) for weight in layer_weights(checkpoint).values())
    return layers, checkpoint.config.vocab_size * checkpoint.config.hidden_size


def layer_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor | Quantized]:
    held = {**checkpoint.weights, **checkpoint.quantized}
    return {n: w for n, w in held.items() if ".layers." in n and len(w.shape) == 2}


def read_bytes(checkpoint: Checkpoint) -> int:
    """Of weights, that a decode step reads at least: as the file has them."""
    head = checkpoint.quantized.get(EMBEDDING, checkpoint.weights[EMBEDDING])
    used = [*layer_weights(checkpoint).values(), head]
    return sum(w.raw.nbytes if isinstance(w, Quantized) else w.nbytes for w in used)


def measure(
    contenders: dict[str, Callable[[], float]], limits: Limits, rounds: int, tokens: int
) -> dict[str, list[float]]:
    """tokens/s of each contender in each round. The order turns round with every round."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for work in contenders.values():
        work()
    for number in range(rounds):
        limits.measure()
        names = list(contenders)
        for name in names if number % 2 == 0 else reversed(names):
            rates[name].append(tokens / contenders[name]())
    return rates


def result(case: str, rates: dict[str, list[float]], limit: float, limited_by: str) -> Result:
    def ratio(other: str) -> float:
        return statistics.median(a / b for a, b in zip(rates["ebbtide"], rates[other], strict=True))

    medians = (statistics.median(rates[name]) for name in ("ebbtide", *CACHES))
    return Result(case, *medians, ratio("dynamic"), ratio("static"), limit, limited_by)


def random_prompts(vocab: int, count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(vocab, (count, length), generator=generator).tolist()


def bench_prefill(
    ours: Remote, theirs: Remote, limits: Limits, rounds: int, vocab: int
) -> dict[str, list[float]]:
    prompts = random_prompts(vocab, 1, PREFILL_TOKENS)
    contenders = {"ebbtide": partial(ours, "prefill", prompts)}
    contenders |= {
        kind: partial(theirs, "prefill", kind, prompts, PREFILL_TOKENS) for kind in CACHES
    }
    return measure(contenders, limits, rounds, PREFILL_TOKENS)


def bench_decode(
    ours: Remote, theirs: Remote, limits: Limits, rounds: int, vocab: int, batch: int
) -> dict[str, list[float]]:
    prompts = random_prompts(vocab, batch, PROMPT_TOKENS)
    ours("prefill", prompts)
    contenders = {"ebbtide": partial(ours, "decode", STEPS)}
    for kind in CACHES:
        theirs("prefill", kind, prompts, PROMPT_TOKENS + STEPS * (rounds + 1))
        contenders[kind] = partial(theirs, "decode", kind, STEPS)
    return measure(contenders, limits, rounds, batch * STEPS)


GROUPS = {
    "linear": (
        "_linear_pointwise",
        "_weight_int4pack_mm",
        "linear_dynamic_fp16",
        "NativePacked",
        "::addmm",
        "::mm",
        "aten::linear",
    ),
    "attention": ("scaled_dot_product", "::index_", "::bmm", "softmax", "NativeKernels"),
}
COMPILED = {NativePacked: "_run", NativeKernels: "attend", NativeNorm: "_run"}


@contextmanager
def compiled_kernels_recorded() -> Iterator[None]:
    """The profiler sees PyTorch's operators only: here, these as well, by the name of their class."""

    def recorded(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with record_function(name):
                return work(*args)

        return run

    before = {each: getattr(each, method) for each, method in COMPILED.items()}
    for each, method in COMPILED.items():
        setattr(each, method, recorded(each.__name__, before[each]))
    try:
        yield
    finally:
        for each, method in COMPILED.items():
            setattr(each, method, before[each])


def breakdown(ours: Ours, rows: list[Row]) -> dict[str, float]:
    """Milliseconds of one step, by what they went to: the least of several runs of each part.

    Inside the forward pass the profiler says how the time splits; what no operator accounts for is
    Python and dispatch. What profiling itself costs is scaled away.
    """
    batch = ours.model.plan(rows, {})
    logits = ours.model.forward(batch, ours.kv)
    asks = [Ask(GREEDY, 0, row.tokens, row.end) for row in rows]
    runs = 3 if len(batch.tokens) > PROMPT_TOKENS else 15
    plan_s = min(seconds(lambda: ours.model.plan(rows, {})) for _ in range(runs))
    forward_s = min(seconds(lambda: ours.model.forward(batch, ours.kv)) for _ in range(runs))
    sample_s = min(seconds(lambda: sample(logits, asks)) for _ in range(runs))
    with compiled_kernels_recorded(), profile(activities=[ProfilerActivity.CPU]) as recorded:
        profiled_s = seconds(lambda: ours.model.forward(batch, ours.kv))
    spent = {"linear": 0.0, "attention": 0.0, "norm, rope, elementwise": 0.0}
    for event in recorded.key_averages():
        names = (g for g, parts in GROUPS.items() if any(part in event.key for part in parts))
        spent[next(names, "norm, rope, elementwise")] += event.self_cpu_time_total / 1e6
    spent["python, dispatch"] = max(0.0, profiled_s - sum(spent.values()))
    scale = forward_s / sum(spent.values())
    table = {name: value * scale * 1e3 for name, value in spent.items()}
    return table | {"plan the step": plan_s * 1e3, "sampling": sample_s * 1e3}


def show(console: Console, results: list[Result], parts: dict[str, dict[str, float]]) -> None:
    table = RichTable(title="tokens per second, bfloat16")
    table.add_column("case")
    columns = ("ebbtide", "transformers", "ratio", "target", "static cache", "ratio")
    for name in (*columns, "limit", "of limit"):
        table.add_column(name, justify="right")
    table.add_column("limited by")
    for r in results:
        target = TARGETS.get(r.case)
        reached = (
            "-" if target is None else f"{target:.1f} {'ok' if r.ratio >= target else 'MISSED'}"
        )
        table.add_row(
            r.case, f"{r.ebbtide:.0f}", f"{r.dynamic:.0f}", f"{r.ratio:.2f}", reached,
            f"{r.static:.0f}", f"{r.ratio_static:.2f}", f"{r.limit:.0f}",
            f"{r.ebbtide / r.limit:.0%}", r.limited_by,
        )  # fmt: skip
    console.print(table)
    shares = RichTable(title="where a step's time goes, ms")
    shares.add_column("part")
    for case in parts:
        shares.add_column(case, justify="right")
    for part in next(iter(parts.values())):
        shares.add_row(part, *(f"{values[part]:.2f}" for values in parts.values()))
    totals = (f"{sum(values.values()):.2f}" for values in parts.values())
    shares.add_section()
    shares.add_row("step", *totals)
    console.print(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    positions = PROMPT_TOKENS + STEPS * (args.rounds + 2)
    blocks = max(args.batches) * (positions // BLOCK_SIZE + 1) + PREFILL_TOKENS // BLOCK_SIZE + 1
    checkpoint = load_checkpoint(args.model, torch.bfloat16, form=Form.BOTH)
    step_bytes = read_bytes(checkpoint)
    vocab = checkpoint.config.vocab_size
    limits, layers, head = Limits(), *weight_counts(checkpoint)
    del checkpoint
    ours, theirs = (Remote(f, args.model, args.threads, blocks) for f in (Form.BOTH, None))

    rates = {"prefill": bench_prefill(ours, theirs, limits, args.rounds, vocab)}
    for batch in args.batches:
        rates[f"decode {batch}"] = bench_decode(ours, theirs, limits, args.rounds, vocab, batch)
    results = []
    for case, measured in rates.items():
        if case == "prefill":
            limit, by = limits.matmul_rate / (2 * layers), "multiplying with the weights"
        else:
            batch = int(case.split()[1])
            read = batch * limits.read_rate / step_bytes
            multiply = limits.matmul_rate / (2 * (layers + head))
            limit = min(read, multiply)
            by = "reading the weights" if read < multiply else "multiplying with the weights"
        results.append(result(case, measured, limit, by))

    parts = {"prefill": ours("breakdown", random_prompts(vocab, 1, PREFILL_TOKENS), False)}
    for batch in args.batches:
        prompts = random_prompts(vocab, batch, PROMPT_TOKENS)
        parts[f"decode {batch}"] = ours("breakdown", prompts, True)
    ours.close()
    theirs.close()

    console = Console(width=120)
    show(console, results, parts)
    console.print(
        f"{args.threads} threads of {platform.processor() or platform.machine()}; memory read "
        f"{limits.read_rate / 1e9:.1f} GB/s, bfloat16 products {limits.matmul_rate / 1e9:.0f} GFLOP/s; "
        f"{step_bytes / 1e6:.0f} MB of weights; torch {torch.__version__}, "
        f"transformers {transformers.__version__}; {args.rounds} rounds"
    )
    if args.json:
        report = {
            "threads": args.threads,
            "read_bytes_per_s": limits.read_rate,
            "matmul_flop_per_s": limits.matmul_rate,
            "results": [asdict(r) for r in results],
            "rounds": rates,
            "breakdown_ms": parts,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
