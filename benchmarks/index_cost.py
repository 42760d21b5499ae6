"""What the file tier's index costs per chunk, and how long a tier of many files takes to start."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ebbtide.offload.policies import POLICIES, make_policy
from ebbtide.offload.tiers.base import TierContext
from ebbtide.offload.tiers.file import open_file
from ebbtide.offload.tiers.file_index import NAMESPACE_BYTES, Index
from ebbtide.offload.tiers.file_io import HEAD_BYTES
from ebbtide.offload.tiers.file_scan import chunk_path, directory_path

T = TypeVar("T")

KEY_BYTES = 34
CHUNK_BYTES = 1 << 20
SPACE = bytes(NAMESPACE_BYTES)
STARTS = 3
INODES_SPARE = 1.1
FOLDER_BYTES = 600  # that a file takes in its directory and among the inodes, at most


def shown(things: Sequence[T], what: str, console: Console) -> Iterable[T]:
    """With a progress bar, on a terminal."""
    return track(things, what, transient=True, console=console, disable=not console.is_terminal)


class TooLarge(Exception):
    """There is no room for the files."""


def ids_of(count: int) -> list[bytes]:
    rng = random.Random(1)
    return [SPACE + rng.randbytes(KEY_BYTES) for _ in range(count)]


# --- index -----------------------------------------------------------------------------------


def put(index: Index, id: bytes) -> None:
    index.reserve(CHUNK_BYTES)
    index.put(id, CHUNK_BYTES)


def bytes_per_chunk(policy: str, chunks: int) -> float:
    """Ids included, as nobody else keeps them."""
    rng = random.Random(1)
    tracemalloc.start()
    index = Index(make_policy(policy, chunks))
    for _ in range(chunks):
        put(index, SPACE + rng.randbytes(KEY_BYTES))
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size / chunks


def index_costs(policy: str, chunks: int) -> dict[str, float]:
    """Microseconds of CPU time per operation, locks included, of a full index; and bytes per chunk."""
    ids = ids_of(chunks)
    drawn = random.Random(2).sample(ids, chunks // 5)
    index = Index(make_policy(policy, chunks))

    def us(operation: Callable[[bytes], object], ids: Sequence[bytes]) -> float:
        start = time.process_time()
        for id in ids:
            operation(id)
        return (time.process_time() - start) / len(ids) * 1e6

    def evict(_: bytes) -> None:
        assert index.victim() is not None
        index.release(CHUNK_BYTES)

    return {
        "add": us(lambda id: put(index, id), ids),
        "lookup": us(index.size, drawn),
        "touch": us(index.touch, drawn),
        "evict": us(evict, drawn),
        "bytes": bytes_per_chunk(policy, chunks),
    }


def report_index(chunks: int, console: Console) -> dict[str, dict[str, float]]:
    costs = {
        policy: index_costs(policy, chunks) for policy in shown(list(POLICIES), "index", console)
    }
    title = f"index of the file tier: microseconds of CPU time per operation, {chunks:,} chunks"
    table = Table("policy")
    for column in costs["lru"]:
        table.add_column(column.replace("bytes", "bytes per chunk"), justify="right")
    for policy, row in costs.items():
        *times, size = row.values()
        table.add_row(policy, *(f"{value:.2f}" for value in times), f"{size:.0f}")
    console.print(title, table, sep="\n", highlight=False)
    return costs


# --- start -----------------------------------------------------------------------------------


def check_room(root: Path, files: int) -> None:
    """Raises TooLarge."""
    space = os.statvfs(root)
    if space.f_files and space.f_favail < INODES_SPARE * files:
        raise TooLarge(f"{files:,} files need more inodes than are free: use fewer (--files)")
    if space.f_bavail * space.f_frsize < FOLDER_BYTES * files:
        raise TooLarge(f"{files:,} files need more space than is free: use fewer (--files)")


def make_files(root: Path, ids: Sequence[bytes], console: Console) -> None:
    """Files as long as those of chunks, without their contents: names and sizes are all that is read."""
    size = HEAD_BYTES + CHUNK_BYTES
    for place in {id[: NAMESPACE_BYTES + 1] for id in ids}:
        os.makedirs(directory_path(str(root), place))
    for id in shown(ids, "files", console):
        descriptor = os.open(chunk_path(str(root), id), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        os.truncate(descriptor, size)
        os.close(descriptor)


def start_once(root: Path, ids: Sequence[bytes]) -> dict[str, float]:
    """Seconds until the tier is open, has found a chunk, and knows all; the slowest lookup meanwhile."""
    size = (len(ids) + 1) * (HEAD_BYTES + CHUNK_BYTES)
    rng = random.Random(3)
    begin = time.perf_counter()
    tier = open_file(f"file://{root}?size={size}&floor=0", TierContext(SPACE, CHUNK_BYTES))
    opened = time.perf_counter() - begin
    first, lookups = 0.0, []
    while tier.stats().state == "starting":
        at = time.perf_counter()
        found = tier.lookup([rng.choice(ids)[NAMESPACE_BYTES:]])[0]
        lookups.append(time.perf_counter() - at)
        if found and not first:
            first = time.perf_counter() - begin
        time.sleep(0.001)
    loaded = time.perf_counter() - begin
    stats = tier.stats()
    assert (stats.chunks, stats.state) == (len(ids), "up"), stats
    tier.close()
    slowest = max(lookups, default=0.0)
    return {"opened": opened, "first": first or loaded, "loaded": loaded, "slowest": slowest}


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def report_start(
    files: int, parent: Path | None, cold: bool, console: Console
) -> list[dict[str, float]]:
    root = Path(tempfile.mkdtemp(prefix="bench-tiers-", dir=parent))
    starts = []
    try:
        check_room(root, files)
        ids = ids_of(files)
        make_files(root, ids, console)
        for _ in shown(range(STARTS), "starts", console):
            if cold:
                drop_caches()
            starts.append(start_once(root, ids))
    finally:
        shutil.rmtree(root)
    caches = "dropped before each start" if cold else "warm"
    title = f"start of a file tier with {files:,} files, caches {caches}: {STARTS} times"
    table = Table("ms", "median", "range")
    names = {
        "opened": "open and serving",
        "first": "first chunk found",
        "loaded": "all found",
        "slowest": "slowest lookup meanwhile",
    }
    for name, text in names.items():
        ms = [start[name] * 1e3 for start in starts]
        table.add_row(text, f"{statistics.median(ms):,.2f}", f"{min(ms):,.2f} to {max(ms):,.2f}")
    console.print(title, table, sep="\n", highlight=False)
    return starts
