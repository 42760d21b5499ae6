"""Store and load bandwidth of each tier beside its limit, and what the file tier's index costs.

    python benchmarks/bench_tiers.py [--only host file valkey object index start] [--sizes-kib 256 1024]
                                     [--rounds 7] [--threads 2] [--batch 8] [--dir FOLDER] [--json FILE]

Each round moves the same chunks through the tier and through its limit, in an order that turns round; a
ratio is the limit's time over the tier's, per round. As a mover does, each of ``threads`` threads passes
``batch`` chunks per call, all from and to an arena; the host tier's lane is one thread, one chunk per call.

    tier     limit, with the same threads, batches and buffers
    host     numpy copies whole chunks, from one end of the memory to the other
    file     open, one vectored write or read of a page and the payload, close; direct I/O where the tier's is
    valkey   pipelines of the client library with SET and GET, over as many bytes per round trip
    object   put and get of the client library, on a pool of as many threads as the tier has

The file tier's ``store`` makes new files; ``replace`` is what a full one does, beside overwriting files.

What is cached: the chunks of a round (``--round-mib``, or one batch per thread) may fit a large processor
cache, on both sides. Direct I/O passes the page cache, but not the disk's own; buffered reads come from the
page cache. Servers run here, and keep chunks in memory (Valkey) or in files in the page cache (object).

``start`` leaves its files in the caches, too; ``--cold`` drops the system's before each start (Linux, root).
The whole needs 8 GiB of free space, most of it for the object server, and a file per ``--files``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ebbtide.engine.config import EngineConfig
from index_cost import TooLarge, report_index, report_start, shown
from tier_sides import (
    MIB,
    Action,
    Batch,
    Shape,
    Skipped,
    file_actions,
    host_actions,
    object_actions,
    valkey_actions,
)

ACTIONS: dict[str, Callable[[Shape, Path], AbstractContextManager[Sequence[Action]]]] = {
    "host": host_actions,
    "file": file_actions,
    "valkey": valkey_actions,
    "object": object_actions,
}
TARGETS = {"host": 0.8, "file": 0.8, "valkey": 0.7, "object": 0.7}
PARTS = (*ACTIONS, "index", "start")
SIZES_KIB = (256, 1024, 4096, 8192)
COLUMNS = ("chunk", "", "MiB/s", "chunks/s", "limit, MiB/s", "ratio", "range")


@dataclass
class Row:
    """One action with chunks of one size. Seconds are those of each round."""

    tier: str
    action: str
    shape: Shape
    note: str
    tier_s: list[float] = field(default_factory=list)
    limit_s: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [limit / tier for limit, tier in zip(self.limit_s, self.tier_s, strict=True)]

    def cells(self) -> list[str]:
        chunks = self.shape.chunks
        mib = chunks * self.shape.chunk_bytes / MIB
        tier_s, limit_s = statistics.median(self.tier_s), statistics.median(self.limit_s)
        ratio = statistics.median(self.ratios)
        text = f"{ratio:.2f}" if ratio >= TARGETS[self.tier] else f"[bold red]{ratio:.2f}[/]"
        return [
            f"{self.shape.chunk_bytes >> 10:,} KiB",
            self.action,
            f"{mib / tier_s:,.0f}",
            f"{chunks / tier_s:,.0f}",
            f"{mib / limit_s:,.0f}",
            text,
            f"{min(self.ratios):.2f} to {max(self.ratios):.2f}",
        ]


def seconds_for(act: Callable[[Batch], object], shape: Shape, pool: ThreadPoolExecutor) -> float:
    def work(batches: Sequence[Batch]) -> None:
        for batch in batches:
            act(batch)

    shares = shape.batches()
    start = time.perf_counter()
    for _ in pool.map(work, shares):
        pass
    return time.perf_counter() - start


def measure(name: str, shape: Shape, rounds: int, folder: Path, console: Console) -> list[Row]:
    """Every round does all actions in order, as later ones read what earlier ones stored. The first
    round warms up, and is not counted."""
    with (
        ACTIONS[name](shape, folder) as actions,
        ThreadPoolExecutor(shape.threads) as pool,
    ):
        rows = [Row(name, action.name, shape, action.note) for action in actions]
        what = f"{name}, {shape.chunk_bytes >> 10:,} KiB"
        for number in shown(range(rounds + 1), what, console):
            for action, row in zip(actions, rows, strict=True):
                action.prepare()
                sides = [(action.tier, row.tier_s), (action.limit, row.limit_s)]
                for act, taken in sides if number % 2 else sides[::-1]:
                    taken.append(seconds_for(act, shape, pool))
        for row in rows:
            del row.tier_s[0], row.limit_s[0]
    return rows


def shape_of(name: str, chunk_bytes: int, args: argparse.Namespace) -> Shape:
    threads, batch = (1, 1) if name == "host" else (args.threads, args.batch)
    per_call = threads * batch
    calls = max(1, args.round_mib * MIB // (chunk_bytes * per_call))
    return Shape(chunk_bytes, calls * per_call, threads, batch, args.blocks_per_chunk)


def bandwidth(name: str, args: argparse.Namespace, console: Console) -> list[Row]:
    rows: list[Row] = []
    for size in args.sizes_kib:
        with tempfile.TemporaryDirectory(prefix="bench-tiers-", dir=args.dir) as folder:
            shape = shape_of(name, size << 10, args)
            rows += measure(name, shape, args.rounds, Path(folder), console)
    shape = shape_of(name, args.sizes_kib[0] << 10, args)
    notes = [f"{shape.threads} threads" if shape.threads > 1 else "1 thread"]
    notes += [f"{shape.batch} chunks per call" if shape.batch > 1 else "1 chunk per call"]
    notes += sorted({row.note for row in rows if row.note})
    title = f"{name}: {', '.join(notes)}; target {TARGETS[name]}"
    table = Table()
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(*row.cells())
    console.print(title, table, sep="\n", highlight=False)
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--sizes-kib", nargs="+", type=int, default=SIZES_KIB)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="that call a tier at once")
    parser.add_argument("--batch", type=int, default=8, help="chunks per call: a mover's, 1 to 8")
    parser.add_argument("--round-mib", type=int, default=64, help="moved per round, at least")
    parser.add_argument("--blocks-per-chunk", type=int, default=EngineConfig().blocks_per_chunk)
    parser.add_argument("--dir", type=Path, help="where files are made, and removed at the end")
    parser.add_argument("--chunks", type=int, default=1_000_000, help="in the index")
    parser.add_argument("--files", type=int, default=1_000_000, help="at the start")
    parser.add_argument("--cold", action="store_true", help="drop caches before each start")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    console = Console(width=110)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    console.print(f"{os.cpu_count()} processors, load before: {load}")
    results: dict[str, object] = {"load": load}
    for part in args.only:
        try:
            if part == "index":
                results[part] = report_index(args.chunks, console)
            elif part == "start":
                results[part] = report_start(args.files, args.dir, args.cold, console)
            else:
                results[part] = [asdict(row) for row in bandwidth(part, args, console)]
        except (Skipped, TooLarge) as reason:
            console.print(f"{part}: skipped, {reason}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
