"""Does a tier that hardly answers make requests slower than no tier? TTFT with both, in turns.

    python benchmarks/bench_slow_disk.py [--only SIDE ...] [--conversations 20] [--rounds 3] [--delay 5]
                                         [--threads N] [--dir FOLDER] [--json FILE]

Conversations of a few turns, 200 to 800 tokens each, 4 requests at a time; the device pool and the host
tier are far too small for them. Each life of an engine serves all turns once, on one of these sides:

    none       no tier below the host tier: what is not found is computed
    sleeping   a file tier with all KV of these conversations, each read of a chunk takes --delay seconds
    late       the same, but as fast as it can be until the first request
    falling    the same, but until the middle of the requests
    stopped    a Valkey server with all the KV, stopped (SIGSTOP) before the first request
    stopping   the same, stopped in the middle

A tier cannot be known to be slow before somebody has waited for it. So the first request after that has begun
is reported apart, and those that were under way when it began, or came before the engine gives up waiting
(``KNOWN_S``); all others count: their p99 may be 1.2 times that of ``none`` at most. All tokens must be the
same. Exits with 1 otherwise. Run it where the processors are free: the sides come one after the other, and
what else the machine does is in their figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

import ebbtide.engine.tiers
from conversations import ASKS, RULES, TOPICS
from ebbtide.engine.build import choose_dtype
from ebbtide.engine.config import DEFAULT_MODEL, EngineConfig
from ebbtide.engine.engine import Engine
from ebbtide.engine.output import Delta
from ebbtide.models.checkpoint import Checkpoint
from ebbtide.models.kv import layout_for
from ebbtide.models.load import load_checkpoint
from ebbtide.offload.tiers.base import Tier, TierContext
from ebbtide.offload.tiers.registry import open_tier
from ebbtide.params import SamplingParams
from ebbtide.testing.tiers import Fault, FaultyTier
from tier_sides import Skipped, running_server

USERS = 4
TURNS = 5
LENGTHS = (200, 800)  # tokens of a prompt
SHARED = 64  # tokens of a system prompt, which four conversations have in common
OUTPUT = 8
BLOCK, PER_CHUNK = 16, 2
TARGET = 1.2  # p99 over that of no tier, at most
HAIR = 1e-3  # two log-probabilities so close may change places with what else is in the batch
KNOWN_S = 0.5  # a load is given up after 0.3 to 0.4 s: 12 times what computing its chunk takes
FILE_SIDES = ("sleeping", "late", "falling")
VALKEY_SIDES = ("stopped", "stopping")
MIDWAY = ("falling", "stopping")
SIDES = ("none", *FILE_SIDES, *VALKEY_SIDES)


@dataclass(frozen=True, slots=True)
class Answer:
    asked_s: float
    first_s: float
    ended_s: float
    tokens: list[int]
    gaps: list[float]  # of each token: by how much its log-probability beats the next

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.asked_s


@dataclass
class Life:
    """What one engine served. ``apart``: numbers of the requests that had to find out."""

    answers: list[Answer]
    apart: set[int]
    tier: dict[str, Any] = field(default_factory=dict)

    def counted(self) -> list[float]:
        return [a.ttft_s for number, a in enumerate(self.answers) if number not in self.apart]

    def others(self) -> list[float]:
        return [self.answers[number].ttft_s for number in sorted(self.apart)]


# --- requests ---------------------------------------------------------------------------------


def streams(encode: Callable[[str], list[int]], count: int, rng: random.Random) -> list[list[int]]:
    """Texts of conversations as tokens, ``LENGTHS[1]`` each; groups of four begin alike."""
    made: list[list[int]] = []
    system: list[int] = []
    for number in range(count):
        if number % 4 == 0:
            system = encode(" ".join(rng.choices(RULES, k=20)))[:SHARED]
        tokens = list(system)
        while len(tokens) < LENGTHS[1]:
            a, b = rng.sample(TOPICS, 2)
            tokens += encode("\n" + rng.choice(ASKS).format(a=a, b=b))
        made.append(tokens[: LENGTHS[1]])
    return made


def prompts(texts: Sequence[list[int]], rng: random.Random) -> list[list[int]]:
    """All first turns in some order, then all second ones: between two turns of one, all others come."""
    lengths = [
        [*sorted(rng.randrange(*LENGTHS) for _ in range(TURNS - 1)), LENGTHS[1]] for _ in texts
    ]
    made = []
    for turn in range(TURNS):
        order = list(range(len(texts)))
        rng.shuffle(order)
        made += [texts[number][: lengths[number][turn]] for number in order]
    return made


def chunks_of(texts: Sequence[list[int]]) -> int:
    """How many different chunks these have, per KV group."""
    size = BLOCK * PER_CHUNK
    return len({tuple(t[:end]) for t in texts for end in range(size, len(t) + 1, size)})


def ask(engine: Engine, prompt: list[int], output: int = OUTPUT) -> Answer:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, logprobs=2)
    deltas: queue.SimpleQueue[tuple[float, Delta]] = queue.SimpleQueue()
    asked_s = time.perf_counter()
    engine.submit(prompt, params, lambda delta: deltas.put((time.perf_counter(), delta)))
    first_s, tokens, gaps = 0.0, [], []
    while True:
        at_s, delta = deltas.get()
        if delta.error:
            raise SystemExit(f"a request failed: {delta.error}")
        if delta.token_ids and not tokens:
            first_s = at_s
        tokens += delta.token_ids
        gaps += [entry.top[0][1] - entry.top[1][1] for entry in delta.logprobs]
        if delta.finish_reason is not None:
            return Answer(asked_s, first_s, at_s, tokens, gaps)


def differences(expected: Sequence[Answer], got: Sequence[Answer]) -> tuple[int, int]:
    """Answers whose tokens differ; and those that do from a token on that hung on a hair."""
    real = hairs = 0
    for a, b in zip(expected, got, strict=True):
        pairs = enumerate(zip(a.tokens, b.tokens, strict=True))
        at = next((n for n, (x, y) in pairs if x != y), None)
        if at is not None:
            hairs += a.gaps[at] < HAIR
            real += a.gaps[at] >= HAIR
    return real, hairs


# --- sides ------------------------------------------------------------------------------------


class Switch:
    """Makes reads of a tier slow from when it is ``on``, until it is let go."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._slow = threading.Event()
        self._over = threading.Event()

    def on(self) -> None:
        self._slow.set()

    def let_go(self) -> None:
        self._over.set()

    def open(self, url: str, context: TierContext) -> Tier:
        def fault(method: str, key: bytes) -> Fault | None:
            return Fault.SLOW if method == "read" and self._slow.is_set() else None

        tier = open_tier(url, context)
        return FaultyTier(tier, fault, delay_s=self._delay_s, sleep=self._over.wait)


class Bench:
    """All sides over the same requests, and the places where the tiers keep what they know."""

    def __init__(self, args: argparse.Namespace, folder: Path, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._delay_s = args.delay
        self._threads = args.threads
        self.valkey: Any = None
        rng = random.Random(args.seed)
        encode = partial(checkpoint.tokenizer.encode, add_special=False)
        self.texts = streams(encode, args.conversations, rng)
        self.prompts = prompts(self.texts, rng)
        import torch

        layout = layout_for(checkpoint.config, BLOCK, torch.float32)
        self._token_bytes = layout.block_bytes * len(layout.groups) // BLOCK
        self._chunks = chunks_of(self.texts) * len(layout.groups)

    def url(self, side: str) -> str:
        if side in FILE_SIDES:
            return f"file://{self._folder}/{side}?size=100GiB&floor=0"
        return f"valkey://127.0.0.1:{self.valkey.port}"

    @contextmanager
    def engine(self, tiers: Sequence[str], host_tokens: int) -> Iterator[Engine]:
        """A device pool for the requests that run at once, and not much besides."""
        config = EngineConfig(
            dtype="float32",
            device="cpu",
            threads=self._threads,
            block_size=BLOCK,
            blocks_per_chunk=PER_CHUNK,
            kv_bytes=(USERS + 1) * (LENGTHS[1] + 2 * BLOCK) * self._token_bytes,
            host_bytes=host_tokens * self._token_bytes,
            max_length=2 * LENGTHS[1],
            tiers=tuple(tiers),
        )
        engine = Engine(config, checkpoint=self._checkpoint)
        try:
            yield engine
        finally:
            engine.close()
            gc.unfreeze()
            gc.collect()

    def fill(self, side: str) -> int:
        """An earlier, healthy life, which leaves all KV in the tier. Returns how many chunks are there."""
        everything = 2 * LENGTHS[1] * len(self.texts)
        with self.engine([self.url(side)], everything) as engine:
            there = self._there(engine)
            if there < self._chunks:
                with ThreadPoolExecutor(USERS) as pool:
                    list(pool.map(partial(ask, engine, output=1), self.texts))
        with self.engine([self.url(side)], everything) as engine:
            there = self._there(engine)
        if there < self._chunks:
            raise SystemExit(f"{side}: {there} chunks are there of {self._chunks}")
        return there

    @staticmethod
    def _there(engine: Engine) -> int:
        while True:
            (stats,) = engine.tier_stats().values()
            if stats.state != "starting":
                return stats.chunks
            time.sleep(0.05)

    def life(self, side: str) -> Life:
        switch = Switch(self._delay_s)
        turn_bad = self.valkey.freeze if side in VALKEY_SIDES else switch.on
        midway = len(self.prompts) // 2 if side in MIDWAY else 0
        urls = [] if side == "none" else [self.url(side)]
        if side == "sleeping":
            switch.on()
        with (
            patch.object(ebbtide.engine.tiers, "open_tier", switch.open),
            self.engine(urls, host_tokens=LENGTHS[1]) as engine,
        ):
            try:
                engine._loop.wait_for_jobs(
                    2 * self._delay_s
                )  # as a server has waited for its first
                return self._serve(engine, midway, turn_bad)
            finally:
                switch.let_go()
                if self.valkey is not None:
                    self.valkey.thaw()

    def _serve(self, engine: Engine, midway: int, turn_bad: Callable[[], None]) -> Life:
        """The first request by itself; then all others, ``USERS`` at a time."""
        since: list[float] = []

        def run(number: int) -> Answer:
            if number == midway:
                since.append(time.perf_counter())
                turn_bad()
            return ask(engine, self.prompts[number])

        answers = [run(0)]
        with ThreadPoolExecutor(USERS) as pool:
            answers += pool.map(run, range(1, len(self.prompts)))
        apart = {0, midway}
        known = since[0] + KNOWN_S
        apart |= {n for n, a in enumerate(answers) if a.asked_s <= known and since[0] <= a.ended_s}
        stats = engine.stats()
        tier = {name: each.reads | {"left": each.left_alone} for name, each in stats.tiers.items()}
        start, by_ttft = answers[0].asked_s, sorted(answers, key=lambda a: a.ttft_s, reverse=True)
        facts = {
            "turned bad at": f"{since[0] - start:.1f} s",
            "slowest, as asked at + TTFT": [
                f"{a.asked_s - start:.1f} + {a.ttft_s:.1f} s" for a in by_ttft[:8]
            ],
            "blocks still held": f"{stats.kv_blocks_in_use} of {stats.kv_blocks}",
        }
        return Life(answers, apart, {"sources": stats.prompt_tokens, "tiers": tier, "facts": facts})


# --- report -----------------------------------------------------------------------------------


def percentile_99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def ratio(lives: dict[str, list[Life]], side: str) -> float:
    """p99 of all that counts, over that of no tier."""
    pooled = {s: [t for life in lives[s] for t in life.counted()] for s in ("none", side)}
    return percentile_99(pooled[side]) / percentile_99(pooled["none"])


def table(lives: dict[str, list[Life]]) -> Table:
    made = Table(title=f"TTFT in s; p99 may be {TARGET} times that of none", title_justify="left")
    made.add_column("tier")
    for column in ("requests", "median", "p99", "max", "p99 / none", "by round", "apart, max"):
        made.add_column(column, justify="right")
    for side, each in lives.items():
        nones = lives["none"]
        counted = [t for life in each for t in life.counted()]
        rounds = [ratio({"none": [a], side: [b]}, side) for a, b in zip(nones, each, strict=True)]
        apart = [t for life in each for t in life.others()]
        made.add_row(
            side,
            str(len(counted)),
            f"{statistics.median(counted):.2f}",
            f"{percentile_99(counted):.2f}",
            f"{max(counted):.2f}",
            f"{ratio(lives, side):.2f}",
            " ".join(f"{each:.2f}" for each in rounds),
            f"{len(apart)}: {max(apart):.2f}",
        )
    return made


def verdict(lives: dict[str, list[Life]]) -> list[str]:
    """What is wrong."""
    problems = []
    expected = lives["none"][0].answers
    for side, each in lives.items():
        if (r := ratio(lives, side)) > TARGET:
            problems.append(f"{side}: p99 is {r:.2f} times that of no tier, not {TARGET}")
        real = sum(differences(expected, life.answers)[0] for life in each)
        if real:
            problems.append(f"{side}: {real} answers have other tokens than with no tier")
    return problems


def run_rounds(
    bench: Bench, sides: Sequence[str], rounds: int, console: Console
) -> dict[str, list[Life]]:
    lives: dict[str, list[Life]] = defaultdict(list)
    for number in range(rounds):
        for side in [*sides[number % len(sides) :], *sides[: number % len(sides)]]:
            filled = "" if side == "none" else f", {bench.fill(side)} chunks there"
            start = time.perf_counter()
            life = bench.life(side)
            lives[side].append(life)
            took = time.perf_counter() - start
            console.print(f"round {number + 1}, {side}{filled}: {took:.0f} s, {life.tier}")
    return {side: lives[side] for side in sides}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=SIDES[1:], default=SIDES[1:], metavar="SIDE")
    parser.add_argument("--conversations", type=int, default=20, help=f"of {TURNS} turns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay", type=float, default=5.0, help="seconds per read of a chunk")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, help="of the model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="where files are made, and removed at the end")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    console = Console(width=110, highlight=False)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    console.print(f"{os.cpu_count()} processors, load before: {load}")
    checkpoint = load_checkpoint(args.model, choose_dtype("float32", "cpu"))
    with ExitStack() as running:
        folder = running.enter_context(
            tempfile.TemporaryDirectory(prefix="slow-disk-", dir=args.dir)
        )
        bench = Bench(args, Path(folder), checkpoint)
        sides = ["none", *args.only]
        try:
            if set(VALKEY_SIDES) & set(sides):
                bench.valkey = running.enter_context(running_server("redis_server", Path(folder)))
        except Skipped as reason:
            console.print(f"{', '.join(VALKEY_SIDES)}: skipped, {reason}")
            sides = [side for side in sides if side not in VALKEY_SIDES]
        lives = run_rounds(bench, sides, args.rounds, console)
    console.print(table(lives))
    hairs = sum(
        differences(lives["none"][0].answers, life.answers)[1] for e in lives.values() for life in e
    )
    problems = verdict(lives)
    for problem in problems:
        console.print(f"[red]wrong:[/] {problem}")
    console.print(f"slow disk: {len(problems)} problems, {hairs} tokens hung on a hair")
    if args.json:
        figures = {
            side: [
                {"ttft_s": each.counted(), "apart_s": each.others(), **each.tier} for each in own
            ]
            for side, own in lives.items()
        }
        args.json.write_text(json.dumps({"load": load, "sides": figures}, indent=1))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
