"""Are the tokens the same with everything on and everything failing? On the real model.

    python benchmarks/exactness.py [--dtype float32] [--conversations 50] [--seed 1] [--model MODEL]

The reference: every turn of every conversation by itself, one after the other, with no cache at all.
Then the same turns by concurrent clients, in engines whose device pool and host tier are far too
small, while loads, stores and steps fail, transfers are late, and other clients that send the same
prompts give up midway. All tokens must be the same, no counter may go down, and in the end nothing
may be left. Exits with 1 otherwise, and where a fault or a path of recovery was not met at all.

In float32 a logit still depends a little on what else is in its batch (about 1e-5 here), so a token
can hang on a hair: two best logits, or the edge of top_p, that close. The reference finds such tokens
by adding noise to its logits, and a difference is reported with what it hangs on.
In bfloat16 a logit depends on nothing else where native kernels multiply with packed weights, and on much
elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from unittest.mock import patch

import torch
from rich.console import Console

import ebbtide.engine.engine
from conversations import NOISE, Traffic, Turn, reference
from ebbtide.core.plan import Direction, Row, StepOutcome, StepPlan, Transfer, TransferResult
from ebbtide.core.scheduler import Scheduler
from ebbtide.engine.async_engine import AsyncEngine
from ebbtide.engine.config import DEFAULT_MODEL, MIB, EngineConfig
from ebbtide.engine.llm import LLM
from ebbtide.engine.output import EngineStats
from ebbtide.models.kv import KVMemory
from ebbtide.offload.arena import Arena
from ebbtide.offload.mover import move
from ebbtide.testing.invariants import check_drained

NAN = 255  # bytes that are no number in any of the types

# --- faults -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How often each fault strikes: a share of the transfers, steps or turns that it can strike."""

    load_error: float = 0.05  # the bytes are garbage, and the load says that it failed
    load_garbage: float = 0.05  # it says nothing: the first step that reads them reports them
    load_late: float = 0.02  # beside the steps, past the deadline
    store_error: float = 0.10
    step_before: float = 0.005  # the step fails before it has done anything
    step_after: float = 0.005  # ... when all is written, and what it wrote is spoiled
    slow: float = 0.20  # transfers that take up to ``SLOW_S`` longer
    abort: float = 0.10


SLOW_S = 0.02


class Dice:
    """Whether a fault strikes now. Seeded; a fault of rate r strikes within the first 2 / r calls."""

    def __init__(self, rates: Rates, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._rates = asdict(rates)
        self._rng = rng
        self._lock = threading.Lock()
        self._left: dict[str, int] = {}

    def strikes(self, fault: str) -> bool:
        with self._lock:
            if fault not in self._left:
                self._left[fault] = self._rng.randint(1, max(1, round(2 / self._rates[fault]) - 1))
            self._left[fault] -= 1
            if self._left[fault]:
                return False
            del self._left[fault]
            self.counts[fault] += 1
            return True


class Faults:
    """The faults of one engine. ``move`` and ``step`` stand in front of the real ones.

    A *bad* mark stands for a checksum. It travels with the content: a store of a bad block makes a
    bad chunk, which makes a bad block when it is loaded.
    """

    def __init__(self, dice: Dice, late_s: float) -> None:
        self._dice = dice
        self._late_s = late_s
        self._lock = threading.Lock()  # of the marks: the mover and the steps have threads
        self._bad_blocks: set[int] = set()
        self._bad_slots: set[tuple[int, int]] = set()  # (slot, block of the chunk)

    def move(self, transfer: Transfer, arena: Arena, memory: KVMemory) -> TransferResult:
        """Move the bytes, or fail, or do harm, now or later."""
        dice, blocks = self._dice, memory.blocks.view(torch.uint8).numpy()
        is_load = transfer.direction is Direction.LOAD
        if dice.strikes("slow"):
            time.sleep(random.Random(transfer.id).uniform(0, SLOW_S))
        beside = threading.current_thread().name.startswith("ebbtide-mover")
        if is_load and beside and dice.strikes("load_late"):
            time.sleep(self._late_s)
        if is_load and dice.strikes("load_error"):
            blocks[list(transfer.blocks)] = NAN
            return TransferResult(transfer, "injected")
        if not is_load and dice.strikes("store_error"):
            arena.slot(transfer.slot, 0, len(transfer.blocks))[:] = 0xFF
            return TransferResult(transfer, "injected")
        result = move(transfer, arena, memory)
        with self._lock:
            for number, block in enumerate(transfer.blocks, transfer.offset):
                place = (transfer.slot, number)
                if is_load:
                    _mark(self._bad_blocks, block, place in self._bad_slots)
                else:
                    _mark(self._bad_slots, place, block in self._bad_blocks)
            if is_load and dice.strikes("load_garbage"):
                blocks[list(transfer.blocks)] = NAN
                self._bad_blocks.update(transfer.blocks)
        return result

    def step(self, run: Callable[[StepPlan], StepOutcome], memory: KVMemory, plan: StepPlan):  # type: ignore[no-untyped-def]
        """Run the step and report the bad blocks that it read, or fail."""
        if self._dice.strikes("step_before"):
            raise RuntimeError("injected, before the step")
        outcome = run(plan)
        if self._dice.strikes("step_after"):
            spoil_written(plan, memory)
            raise RuntimeError("injected, after the step")
        size, groups = memory.layout.block_size, memory.layout.groups
        with self._lock:
            for row in plan.rows:
                self._bad_blocks.difference_update(blocks_begun(row, size))
            windows = [group.first_visible for group in groups]
            read = {block for row in plan.rows for block in blocks_read(row, size, windows)}
            noticed = frozenset(self._bad_blocks & read)
        return replace(outcome, invalid_blocks=outcome.invalid_blocks | noticed)

    @contextmanager
    def installed(self, config: EngineConfig) -> Iterator[AsyncEngine]:
        """An engine that has these faults. It must be closed inside."""
        with patch.object(ebbtide.engine.engine, "move", self.move):
            engine = AsyncEngine.start(config)
            executor = engine._engine._loop._executor
            run, memory = executor._step, executor._kv  # type: ignore[attr-defined]
            executor._step = lambda plan: self.step(run, memory, plan)  # type: ignore[attr-defined]
            yield engine


def _mark(marks: set, item: object, bad: bool) -> None:  # type: ignore[type-arg]
    (marks.add if bad else marks.discard)(item)


def blocks_begun(row: Row, size: int) -> list[int]:
    """Blocks that the row fills from their first position on: what was there does not matter."""
    begin, end = -(-row.start // size), -(-row.end // size)
    return [block for first, table in row.tables for block in table[begin - first : end - first]]


def blocks_read(row: Row, size: int, first_visible: Sequence[Callable[[int], int]]) -> list[int]:
    """Blocks that hold earlier positions which the row can see."""
    blocks: list[int] = []
    for (first, table), visible in zip(row.tables, first_visible, strict=True):
        blocks += table[visible(row.start) // size - first : -(-row.start // size) - first]
    return blocks


def spoil_written(plan: StepPlan, memory: KVMemory) -> None:
    """What the plan loaded and wrote turns to garbage."""
    blocks, size = memory.blocks.view(torch.uint8).numpy(), memory.layout.block_size
    for load in plan.loads:
        blocks[list(load.blocks)] = NAN
    for row in plan.rows:
        for first, table in row.tables:
            for position in range(row.start, row.end):
                index, offset = divmod(position, size)
                blocks[table[index - first], :, offset] = NAN


# --- clients ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """What all engines together did. problems: sentences."""

    problems: list[str] = field(default_factory=list)
    differences: int = 0
    turns: int = 0
    tokens: int = 0
    counters: Counter[str] = field(default_factory=Counter)


class Clients:
    """All clients of one engine: one per conversation, and those that give up."""

    def __init__(self, engine: AsyncEngine, dice: Dice, rng: random.Random, tally: Tally) -> None:
        self._engine = engine
        self._dice = dice
        self._rng = rng
        self._tally = tally

    async def talk(self, number: int, turns: Sequence[Turn]) -> None:
        """Hold a conversation; after each turn it goes on as in the reference."""
        rivals: list[asyncio.Task[None]] = []
        for at, turn in enumerate(turns):
            name = f"conversation {number}, turn {at}"
            if self._dice.strikes("abort"):
                rivals.append(asyncio.create_task(self._give_up(f"{name}, aborted", turn)))
                await asyncio.sleep(self._rng.choice((0.0, 0.02)))
            tokens: list[int] = []
            text, last = "", None
            for_this = self._engine.generate(turn.prompt, turn.params, priority=self._priority())
            async for delta in for_this:
                tokens += delta.token_ids
                text += delta.text
                last = delta
            self._tally.turns += 1
            self._tally.tokens += len(tokens)
            self._compare(name, turn, tokens, whole=True)
            assert last is not None
            if (text, last.finish_reason) != (turn.text, turn.reason):
                self._tally.problems.append(
                    f"{name}: ended with {last.finish_reason} ({last.error}), not {turn.reason}; "
                    f"text {text!r}, not {turn.text!r}"
                )
            usage = last.usage
            if usage is None or usage.cached_tokens + usage.computed != len(turn.prompt):
                self._tally.problems.append(f"{name}: {usage} for {len(turn.prompt)} tokens")
        await asyncio.gather(*rivals)

    def _priority(self) -> int:
        return self._rng.choice((0, 0, 0, 1))

    async def _give_up(self, name: str, turn: Turn) -> None:
        """Send the same request, and leave after some of its tokens, or after some time."""
        enough = self._rng.randrange(len(turn.tokens))
        patience_s = self._rng.choice((None, None, self._rng.uniform(0, 3)))
        stream = self._engine.generate(turn.prompt, turn.params, priority=self._priority())
        tokens: list[int] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                async for delta in stream:
                    tokens += delta.token_ids
                    if len(tokens) >= enough:
                        break
        await stream.aclose()  # type: ignore[attr-defined]
        self._compare(name, turn, tokens, whole=False)

    def _compare(self, name: str, turn: Turn, tokens: list[int], whole: bool) -> None:
        expected = turn.tokens if whole else turn.tokens[: len(tokens)]
        if tokens == expected:
            return
        self._tally.differences += 1
        both = zip(tokens, expected, strict=False)
        at = next((i for i, (ours, theirs) in enumerate(both) if ours != theirs), None)
        if at is None:
            detail = f"{len(tokens)} tokens instead of {len(expected)}"
        else:
            detail = (
                f"token {at} (position {len(turn.prompt) + at}) is {tokens[at]}, not {expected[at]}; "
                f"temperature {turn.params.temperature}, best beats second by {turn.gaps[at]:.1e}, "
                f"{'steady' if turn.steady[at] else 'not steady'} under noise of {NOISE:g}"
            )
        self._tally.problems.append(f"{name}: {detail}")


# --- engines ----------------------------------------------------------------------------------

GAUGES = {
    "running",
    "waiting",
    "loading",
    "kv_blocks",
    "kv_blocks_in_use",
    "kv_blocks_cached",
    "host_slots",
    "host_slots_in_use",
}


def counters(stats: EngineStats) -> Counter[str]:
    """All counters of ``stats``, by name: ``transfers.load_ok``."""
    flat: Counter[str] = Counter()
    for name, value in asdict(stats).items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": count for key, count in value.items()})
        elif name not in GAUGES:
            flat[name] = value
    return flat


async def watch(engine: AsyncEngine, tally: Tally) -> None:
    """Look at the counters again and again: none may go down."""
    before = counters(engine.stats())
    while True:
        await asyncio.sleep(0.02)
        now = counters(engine.stats())
        for name, value in before.items():
            if now[name] < value:
                tally.problems.append(f"counter {name} went down from {value} to {now[name]}")
        before = now
        tally.counters["samples"] += 1


async def check_nothing_left(engine: AsyncEngine) -> None:
    """Raises AssertionError where, soon after the last request has ended, something is still held."""
    loop, offload = engine._engine._loop, engine._engine._offload

    def busy(scheduler: Scheduler) -> bool:
        return bool(scheduler.requests or scheduler.kv.transfers_in_flight)

    for _ in range(1000):
        if not loop.inspect(busy):
            break
        await asyncio.sleep(0.01)
    loop.inspect(lambda scheduler: check_drained(scheduler, offload))
    stats = engine.stats()
    assert stats.kv_blocks_in_use == 0, stats
    assert stats.running == stats.waiting == stats.loading == 0, stats


async def serve(
    config: EngineConfig,
    conversations: Sequence[tuple[int, list[Turn]]],
    dice: Dice,
    rng: random.Random,
    tally: Tally,
) -> None:
    """All of these conversations at once, in an engine of their own."""
    before = set(threading.enumerate())
    faults = Faults(dice, late_s=config.load_deadline_s * 1.2)
    with faults.installed(config) as engine:
        watcher = asyncio.create_task(watch(engine, tally))
        clients = Clients(engine, dice, rng, tally)
        try:
            await asyncio.gather(*(clients.talk(*each) for each in conversations))
            await check_nothing_left(engine)
            tally.counters += counters(engine.stats())
        except AssertionError as error:
            tally.problems.append(f"something is left: {error}")
        finally:
            watcher.cancel()
            await engine.close()
    ours = [t for t in threading.enumerate() if t not in before and t.name.startswith("ebbtide")]
    if ours:
        tally.problems.append(f"threads are left: {ours}")


def too_little_memory(
    llm: LLM, conversations: list[list[Turn]], engines: int, spare: int = 2
) -> dict[str, int]:
    """``kv_bytes`` for the longest request and ``spare`` blocks per client, ``host_bytes`` for half of
    all KV, where the conversations are shared among ``engines``."""
    layout = llm._engine._loop.inspect(lambda scheduler: scheduler.config)
    clients = -(-len(conversations) // engines)

    def blocks(turn: Turn) -> int:
        assert turn.params.max_tokens is not None
        return -(-(len(turn.prompt) + turn.params.max_tokens) // layout.block_size)

    block_bytes = llm._engine._block_bytes * len(layout.groups)
    longest = max(blocks(turn) for turns in conversations for turn in turns)
    everything = sum(blocks(turns[-1]) for turns in conversations) // engines
    return {
        "kv_bytes": (longest + spare * clients) * block_bytes,
        "host_bytes": everything // 2 * block_bytes,
    }


def run_all(
    conversations: list[list[Turn]],
    config: EngineConfig,
    sync_load_bytes: Sequence[int],
    rates: Rates,
    rng: random.Random,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Tally, Counter[str]]:
    """Every conversation with one and with two plans in flight; each of the load sizes serves its
    share of them. Returns what happened, and the faults injected."""
    dice, tally = Dice(rates, rng), Tally()
    numbered = list(enumerate(conversations))
    kinds = len(sync_load_bytes)
    for overlap in (1, 2):
        for at, size in enumerate(sync_load_bytes):
            share = numbered[(at + overlap) % kinds :: kinds]
            start = time.perf_counter()
            each = replace(config, overlap=overlap, sync_load_bytes_max=size)
            asyncio.run(serve(each, share, dice, rng, tally))
            say(
                f"overlap {overlap}, loads up to {size / MIB:.0f} MiB inside the step: "
                f"{len(share)} conversations, {time.perf_counter() - start:.0f} s"
            )
    return tally, dice.counts


MUST_HAPPEN = {
    "load failures injected": ("fault.load_error", "fault.load_garbage", "fault.load_late"),
    "store failures injected": ("fault.store_error",),
    "step failures injected": ("fault.step_before", "fault.step_after"),
    "failed steps": ("failed_steps",),
    "loads": ("transfers.load_ok", "transfers.load_failed"),
    "stores": ("transfers.store_ok", "transfers.store_failed"),
    "prompt tokens": ("prompt_tokens.device", "prompt_tokens.host", "prompt_tokens.computed"),
    "tokens recomputed": ("recomputed_tokens.preempted", "recomputed_tokens.failed"),
    "preemptions": ("preemptions",),
    "aborts": ("finished_requests.abort",),
    "evictions from host": ("host_evictions",),
    "looks at the counters": ("samples",),
}


def verdict(tally: Tally, faults: Counter[str]) -> tuple[list[str], list[str]]:
    """Lines to print, and everything that is wrong."""
    found = tally.counters + Counter({f"fault.{name}": count for name, count in faults.items()})
    lines, problems = [], list(tally.problems)
    for title, names in MUST_HAPPEN.items():
        parts = [f"{n.rpartition('.')[2].replace('_', ' ')} {found[n]:,}" for n in names]
        lines.append(
            f"  {title}: " + (f"{found[names[0]]:,}" if len(names) == 1 else ", ".join(parts))
        )
        problems += [f"this run has met no {title} ({name})" for name in names if not found[name]]
    if errors := found["finished_requests.error"]:
        problems.append(f"{errors} requests ended with an error")
    return lines, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, help="1 is fastest where other work has the cores")
    args = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    rng = random.Random(args.seed)
    start = time.perf_counter()
    traffic = Traffic(conversations=args.conversations)
    plain = {
        "model": args.model,
        "dtype": args.dtype,
        "device": "cpu",
        "threads": args.threads,
        "max_length": 2048,
        "block_size": 8,  # small ones: more of them grow, and move, and more requests are preempted
    }
    with LLM(**plain, overlap=1, host_bytes=0, max_step_tokens=2048) as llm:  # type: ignore[arg-type]
        conversations = reference(llm, traffic, rng)
        memory = too_little_memory(llm, conversations, engines=2)
    longest = max(len(turn.prompt) for turns in conversations for turn in turns)
    hairs = sum(turn.steady.count(False) for turns in conversations for turn in turns)
    console.print(
        f"reference: {time.perf_counter() - start:.0f} s, longest prompt {longest} tokens, "
        f"{hairs} tokens not steady under noise of {NOISE:g}"
    )
    config = EngineConfig(
        **plain,  # type: ignore[arg-type]
        **memory,
        max_step_tokens=128,
        max_batch=16,
        load_deadline_s=1.0,
    )
    tally, faults = run_all(
        conversations, config, (0, 8 * MIB), Rates(), rng, say=lambda line: console.print(line)
    )
    lines, problems = verdict(tally, faults)
    console.print(
        f"exactness: {len(conversations)} conversations, {tally.turns // 2:,} turns, "
        f"{tally.tokens // 2:,} tokens, overlap 1 and 2: {tally.differences} differences"
    )
    console.print("\n".join(lines))
    for problem in problems:
        console.print(f"[red]wrong:[/] {problem}")
    console.print(f"{time.perf_counter() - start:.0f} s")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
