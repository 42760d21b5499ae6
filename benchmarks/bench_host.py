"""Time to first token of a long turn: computing its KV, against loading it from the host tier.

    python benchmarks/bench_host.py [--tokens 1000] [--rounds 7] [--json FILE]

Each round computes a fresh prompt, floods the device pool with other prompts until nothing of it is
left there, and sends the prompt again: now its KV comes from the host tier. Ratios are per round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
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
    return seconds, {"device": usage.device, "host": usage.host, "computed": usage.computed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chunk", type=int, default=EngineConfig().blocks_per_chunk)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = random.Random(1)
    results = []
    with LLM(
        dtype=args.dtype,
        blocks_per_chunk=args.chunk,
        kv_bytes=64 * MIB,
        host_bytes=1024 * MIB,
        max_length=4096,
    ) as llm:
        pool_tokens = llm.stats().kv_blocks * EngineConfig().block_size

        def fresh(length: int) -> list[int]:
            return [rng.randrange(1000, 40_000) for _ in range(length)]

        ttft(llm, fresh(args.tokens))  # warm up
        for _ in track(range(args.rounds), description="rounds", transient=True):
            prompt = fresh(args.tokens)
            compute_s, computed = ttft(llm, prompt)
            for _ in range(-(-pool_tokens // args.tokens) + 1):
                ttft(llm, fresh(args.tokens))
            load_s, loaded = ttft(llm, prompt)
            assert computed["computed"] == args.tokens, computed
            assert loaded["host"] >= args.tokens * 0.9, loaded
            results.append({"compute_s": compute_s, "load_s": load_s, **loaded})
    report(results, args.tokens)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


def report(results: list[dict[str, float]], tokens: int) -> None:
    table = Table(title=f"Time to first token, prompt of {tokens:,} tokens", title_justify="left")
    for column in ("", "median", "min", "max"):
        table.add_column(column, justify="right" if column else "left")
    rows = {
        "computed": [r["compute_s"] * 1000 for r in results],
        "from host": [r["load_s"] * 1000 for r in results],
    }
    for name, values in rows.items():
        figures = (statistics.median(values), min(values), max(values))
        table.add_row(name, *(f"{value:,.1f} ms" for value in figures))
    ratios = [r["compute_s"] / r["load_s"] for r in results]
    figures = (statistics.median(ratios), min(ratios), max(ratios))
    table.add_row("ratio", *(f"{value:.1f}x" for value in figures))
    console = Console()
    console.print(table)
    last = results[-1]
    console.print(
        f"of the second turn's tokens {last['host']:.0f} came from host memory, "
        f"{last['computed']:.0f} were computed"
    )


if __name__ == "__main__":
    main()
