"""Time to first token of a long turn: computing its KV, against loading it from the host tier or a disk.

    python benchmarks/bench_host.py [--tokens 1000] [--rounds 5] [--disk FOLDER] [--json FILE]

Each round computes a fresh prompt, floods the device pool with other prompts until nothing of it is
left there, and sends the prompt again: now its KV comes from the host tier, whose memory is all in use
before. With a folder on a disk, an engine that keeps its KV there computes the prompts, is closed, and the
next one gets them, too. Ratios are to the same prompt's computation.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ebbtide.engine.config import MIB, EngineConfig
from ebbtide.engine.llm import LLM
from ebbtide.params import SamplingParams

FIRST = SamplingParams(temperature=0.0, max_tokens=1)


def ttft(llm: LLM, prompt: list[int]) -> tuple[float, dict[str, int]]:
    """Seconds to the first token, and where the prompt's tokens came from."""
    start = time.perf_counter()
    done = llm.generate([prompt], FIRST)[0]
    seconds = time.perf_counter() - start
    usage = done.usage
    assert usage is not None
    return seconds, {"host": usage.host, "computed": usage.computed, **usage.tiers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chunk", type=int, default=EngineConfig().blocks_per_chunk)
    parser.add_argument("--disk", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = random.Random(1)
    prompts = [fresh(rng, args.tokens) for _ in range(args.rounds)]
    with start(args) as llm:
        in_use = -1
        while in_use < (in_use := llm.stats().host_slots_in_use):
            ttft(llm, fresh(rng, args.tokens))
        results = [round_in_host(llm, rng, prompt) for prompt in track(prompts, transient=True)]
    if args.disk:
        args.disk.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="ebbtide-bench-", dir=args.disk) as folder:
            with start(args, f"file://{folder}?size=16GiB") as llm:
                llm.generate(prompts, FIRST)
            with start(args, f"file://{folder}?size=16GiB") as llm:
                ttft(llm, fresh(rng, args.tokens))  # warm up
                for prompt, result in zip(prompts, results, strict=True):
                    result["from disk"], sources = ttft(llm, prompt)
                    assert sources["file"] >= args.tokens * 0.9, sources
    report(results, args.tokens)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


def start(args: argparse.Namespace, *tiers: str) -> LLM:
    return LLM(
        dtype=args.dtype,
        blocks_per_chunk=args.chunk,
        kv_bytes=64 * MIB,
        host_bytes=512 * MIB,
        max_length=4096,
        tiers=tiers,
    )


def fresh(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(length)]


def round_in_host(llm: LLM, rng: random.Random, prompt: list[int]) -> dict[str, float]:
    length = len(prompt)
    pool_tokens = llm.stats().kv_blocks * EngineConfig().block_size
    compute_s, computed = ttft(llm, prompt)
    for _ in range(-(-pool_tokens // length) + 1):
        ttft(llm, fresh(rng, length))
    load_s, loaded = ttft(llm, prompt)
    assert computed["computed"] == length, computed
    assert loaded["host"] >= length * 0.9, loaded
    return {"computed": compute_s, "from host": load_s, "rest": loaded["computed"]}


def report(results: list[dict[str, float]], tokens: int) -> None:
    table = Table(title=f"Time to first token, prompt of {tokens:,} tokens", title_justify="left")
    for column in ("", "median", "min", "max", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for name in results[0]:
        if name == "rest":
            continue
        values = [1000 * result[name] for result in results]
        figures = (statistics.median(values), min(values), max(values))
        ratio = statistics.median(result["computed"] / result[name] for result in results)
        table.add_row(name, *(f"{value:,.1f} ms" for value in figures), f"{ratio:.1f}x")
    console = Console()
    console.print(table)
    console.print(f"Where it was loaded, {results[-1]['rest']:.0f} tokens were still computed.")


if __name__ == "__main__":
    main()
