"""Eviction policies on real request traces, beside the optimum, and what a policy costs.

    python benchmarks/bench_policies.py FOLDER [--chunks 1000000] [--plot FILE] [--json FILE]

FOLDER holds Mooncake's traces (`docs/eviction.md` says where to get them): JSON lines, one request each,
`hash_ids` naming the blocks of its prompt; equal ids mean equal prefixes.

A block hits while all blocks before it in its request do. Then the blocks of the request that are not there
are added, first to last, and all are touched, last to first, as the engine does it at a request's end.

*Optimum* is Belady's for prefix hits, exactly. After each request any cache holds some of what it held
and of the request's blocks. Here it keeps those whose next use is nearest, by request, and within one by
place. For the number of block hits that is the best choice: each hit is an interval from one use of a
block to its next, no more than the capacity can lie over one point in time, and dropping whichever ends
last loses the fewest intervals (Faigle and Nawijn, "Note on scheduling intervals on-line", 1995). And a
block is never needed later than those behind it in its chain, so what is kept has no holes, and all its
block hits are prefix hits: no cache can have more.

Tables "below host" are of a file tier that sees what the host tier above it misses: a block that is computed
is written to both; one that only the file tier has is read and touched there, and comes to the host tier.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ebbtide.offload.policies import DEFAULT_POLICY, POLICIES, EvictionPolicy

CAPACITIES = (1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000)
HOST_BLOCKS = 5_000  # above a file tier
TRACES = ("conversation", "synthetic")
# hit rates of a cache that evicts the least recent block, with each request used first block to last
KNOWN_LRU = {
    "conversation": {0: 36.64, 50_000: 35.46, 30_000: 32.57, 10_000: 21.12, 1_000: 4.45},
    "synthetic": {0: 63.96, 50_000: 63.96, 30_000: 62.42, 10_000: 42.35, 1_000: 8.25},
}
KEY_BYTES = 34
NEVER = 1 << 60

Requests = list[list[bytes]]
Rates = dict[str, dict[int, float]]  # policy -> capacity (0: unbounded) -> share of hits, percent


def read_trace(path: Path) -> Requests:
    with path.open() as lines:
        ids = [json.loads(line)["hash_ids"] for line in lines]
    return [[block.to_bytes(8, "little") for block in request] for request in ids]


class Cache:
    """Counts the hits of one policy."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.held: set[bytes] = set()
        self.hits = 0

    def serve(self, request: Sequence[bytes]) -> None:
        self.count(request)
        for block in request:
            if block not in self.held:
                self.add(block)
        for block in reversed(request):
            self.policy.touch(block)

    def serve_forwards(self, request: Sequence[bytes]) -> None:
        """The order that the known figures are for: each block added or touched, first to last."""
        self.count(request)
        for block in request:
            if block in self.held:
                self.policy.touch(block)
            else:
                self.add(block)

    def count(self, request: Sequence[bytes]) -> None:
        self.hits += sum(1 for _ in takewhile(self.held.__contains__, request))

    def add(self, block: bytes) -> None:
        if len(self.held) == self.capacity:
            victim = self.policy.victim()
            assert victim is not None, "nothing is pinned here"
            self.held.remove(victim)
        self.policy.add(block)
        self.held.add(block)


def policy_rate(
    make: Callable[[int], EvictionPolicy], capacity: int, requests: Requests, forwards: bool = False
) -> float:
    cache = Cache(make(capacity), capacity)
    serve = cache.serve_forwards if forwards else cache.serve
    for request in requests:
        serve(request)
    return 100 * cache.hits / sum(map(len, requests))


def rate_below_host(
    make: Callable[[int], EvictionPolicy], capacity: int, requests: Requests
) -> float:
    """Hits in either, of a tier of ``capacity`` blocks below a host tier with the default policy."""
    host = Cache(POLICIES[DEFAULT_POLICY](HOST_BLOCKS), HOST_BLOCKS)
    tier = Cache(make(capacity), capacity)
    hits = 0
    for request in requests:
        found = sum(1 for _ in takewhile(lambda b: b in host.held or b in tier.held, request))
        hits += found
        for place, block in enumerate(request):
            if block in host.held:
                continue
            if block in tier.held and place < found:
                tier.policy.touch(block)
            elif block not in tier.held:
                tier.add(block)
                tier.policy.touch(block)
            host.add(block)
        for block in reversed(request):
            host.policy.touch(block)
    return 100 * hits / sum(map(len, requests))


def optimum_rate(capacity: int, requests: Requests) -> float:
    """See the module's text. Raises AssertionError where the blocks do not form chains."""
    next_uses: list[list[int]] = []
    seen: dict[bytes, int] = {}
    for number in range(len(requests) - 1, -1, -1):
        next_uses.append([seen.get(block, NEVER) for block in requests[number]])
        seen.update(dict.fromkeys(requests[number], number))
    held: dict[bytes, int] = {}  # block -> its next use
    furthest: list[tuple[int, int, bytes]] = []  # a heap, with old entries of blocks used since
    hits = 0
    for request, uses in zip(requests, reversed(next_uses), strict=True):
        found = sum(block in held for block in request)
        assert all(block in held for block in request[:found]), "what is kept has a hole"
        hits += found
        for place, (block, use) in enumerate(zip(request, uses, strict=True)):
            held[block] = use
            heapq.heappush(furthest, (-use, -place, block))
        while len(held) > capacity:
            use, _, block = heapq.heappop(furthest)
            if held.get(block) == -use:
                del held[block]
    return 100 * hits / sum(map(len, requests))


def check_lru(name: str, requests: Requests, unbounded: int) -> list[str]:
    """Lines to print. Raises SystemExit where LRU has other rates than are known of these traces."""
    rates = {
        capacity: policy_rate(POLICIES["lru"], capacity or unbounded, requests, forwards=True)
        for capacity in KNOWN_LRU[name]
    }
    lines = [
        f"  {capacity or 'unbounded':>9}: {rate:.2f}%, known {KNOWN_LRU[name][capacity]:.2f}%"
        for capacity, rate in rates.items()
    ]
    if any(f"{rates[c]:.2f}" != f"{KNOWN_LRU[name][c]:.2f}" for c in rates):
        raise SystemExit("\n".join([f"{name}: another trace, or a fault in LRU", *lines]))
    return lines


def compare(requests: Requests, unbounded: int) -> Rates:
    capacities = [*CAPACITIES, 0]
    rates = {
        name: {c: policy_rate(make, c or unbounded, requests) for c in capacities}
        for name, make in POLICIES.items()
    }
    rates["optimum"] = {c: optimum_rate(c or unbounded, requests) for c in capacities}
    return rates


def compare_below_host(requests: Requests) -> Rates:
    """The optimum is that of one cache as large as both."""
    capacities = [c for c in CAPACITIES if c >= 2 * HOST_BLOCKS]
    rates = {
        name: {c: rate_below_host(make, c, requests) for c in capacities}
        for name, make in POLICIES.items()
    }
    return rates | {"optimum": {c: optimum_rate(c + HOST_BLOCKS, requests) for c in capacities}}


def rates_table(title: str, rates: Rates) -> Table:
    table = Table("policy", title=title)
    for capacity in rates["optimum"]:
        table.add_column(f"{capacity:,}" if capacity else "unbounded", justify="right")
    online = [row for name, row in rates.items() if name != "optimum"]
    for name, row in rates.items():
        cells = []
        for capacity, rate in row.items():
            best = rate == max(other[capacity] for other in online)
            cells.append(f"[bold]{rate:.2f}[/]" if best and name != "optimum" else f"{rate:.2f}")
        table.add_row(name, *cells)
    return table


def cost(make: Callable[[int], EvictionPolicy], chunks: int, rounds: int) -> dict[str, float]:
    """Microseconds of CPU time per operation with that many chunks held, and bytes per chunk.

    As many have come and gone before, so the bytes count ghosts, but no keys. Who is touched, pinned and
    brought again is drawn evenly.
    """
    rng = random.Random(1)
    keys = [rng.randbytes(KEY_BYTES) for _ in range(2 * chunks)]
    tracemalloc.start()
    policy = make(chunks)
    for number, key in enumerate(keys):
        if number >= chunks:
            policy.victim()
        policy.add(key)
        policy.touch(key)
    per_chunk = tracemalloc.get_traced_memory()[0] / chunks
    tracemalloc.stop()
    gone, held = keys[:chunks], keys[chunks:]  # nobody was used twice: all go in order of coming
    drawn, back = rng.sample(held, rounds), rng.sample(gone, rounds)

    def us(operation: Callable[[bytes], object], keys: Sequence[bytes]) -> float:
        start = time.process_time()
        for key in keys:
            operation(key)
        return (time.process_time() - start) / rounds * 1e6

    def replace(key: bytes) -> None:
        policy.victim()
        policy.add(key)

    def pin(key: bytes) -> None:
        policy.pin(key)
        policy.unpin(key)

    return {
        "touch": us(policy.touch, drawn),
        "pin, unpin": us(pin, drawn),
        "victim, add": us(replace, back),
        "bytes": per_chunk,
    }


def plot(results: dict[str, Rates], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(1, len(results), figsize=(9, 3.4), layout="constrained")
    for axes, (name, rates) in zip(all_axes, results.items(), strict=True):
        for policy, row in rates.items():
            style = "k--" if policy == "optimum" else "o-"
            shares = [row[capacity] for capacity in CAPACITIES]
            axes.plot(CAPACITIES, shares, style, label=policy, markersize=3, linewidth=1.2)
        axes.set(title=name, xscale="log", xlabel="capacity, blocks", ylabel="hits, % of blocks")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    all_axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="with conversation_trace.jsonl and synthetic_trace.jsonl"
    )
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    missing = [name for name in TRACES if not (args.folder / f"{name}_trace.jsonl").is_file()]
    if missing:
        parser.error(
            f"{args.folder} lacks {missing[0]}_trace.jsonl: docs/eviction.md says where it is"
        )
    console = Console(width=110)
    results: dict[str, Rates] = {}
    below: dict[str, Rates] = {}
    for name in TRACES:
        requests = read_trace(args.folder / f"{name}_trace.jsonl")
        unbounded = len({block for request in requests for block in request})
        console.print(f"{name}: {len(requests):,} requests, {unbounded:,} blocks; LRU forwards:")
        console.print("\n".join(check_lru(name, requests, unbounded)))
        results[name] = compare(requests, unbounded)
        console.print(
            rates_table(f"{name}: hits, % of blocks, by capacity in blocks", results[name])
        )
        below[name] = compare_below_host(requests)
        title = f"{name}, below host: {DEFAULT_POLICY}, {HOST_BLOCKS:,} blocks"
        console.print(rates_table(title, below[name]))
    costs = {name: cost(make, args.chunks, args.chunks // 5) for name, make in POLICIES.items()}
    table = Table(
        "policy", title=f"microseconds of CPU time per operation, {args.chunks:,} chunks held"
    )
    for column in costs["lru"]:
        table.add_column(column.replace("bytes", "bytes per chunk"), justify="right")
    for name, row in costs.items():
        *times, size = row.values()
        table.add_row(name, *(f"{value:.2f}" for value in times), f"{size:.0f}")
    console.print(table)
    if args.plot:
        plot(results, args.plot)
    if args.json:
        args.json.write_text(
            json.dumps({"rates": results, "below": below, "costs": costs}, indent=1)
        )


if __name__ == "__main__":
    main()
