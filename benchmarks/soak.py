"""The server with all tiers, clients that come and go, and faults from outside: does it stay right and well?

    python benchmarks/soak.py [--minutes 20] [--seed 1] [--clients 32] [--restart-every 300]
                              [--threads N] [--dir FOLDER] [--keep-log FILE]

`ebbtide serve` in a process of its own, with pools for a few requests, a file tier with a small quota, a
redis-server with a small memory, and an object store in a folder. Clients hold conversations with shared
system prompts over streaming HTTP; some close the connection midway. Meanwhile, at random:

    freeze, kill    redis-server gets SIGSTOP, and SIGCONT later; or is killed and comes back empty
    files, objects  some chunks are deleted, cut, or have a byte turned
    neighbour       another process fills the quota of the directory, and may empty it again
    reset           POST /v1/kv/reset of some tiers, or of all
    restart         SIGTERM and a new start; requests that this hits are tried again

Every answer is compared with that of an engine that has no cache, in float32, for the same prompt. Wrong
is, too: an error while the server was not restarted; a request that takes over --patience seconds; growth
of memory, open files or threads of the server between two restarts; a quota that is exceeded (but by
what a neighbour and the server cannot know of each other yet); anything left when all is over. A line per
minute says how it goes. Exits with 1 where something was wrong, or, from 10 minutes on, never happened.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track

from conversations import ASKS, TOPICS, Traffic, stems
from ebbtide.cli.options import parse_bytes
from ebbtide.engine.config import DEFAULT_MODEL, MIB
from ebbtide.engine.llm import LLM
from ebbtide.params import SamplingParams
from soak_faults import Faults
from soak_server import Server, bytes_under, gauge_in
from tier_sides import Skipped, running_server

TURNS = 4
OUTPUT = (4, 28)  # tokens of an answer
SALTS = ("", "", "a", "b", "c")  # the same prompt with another one is other KV
ABORTS = 0.12  # of the requests
ABORT_S = 3.0  # after its start, at most
THINK_S = (0.0, 3.0)  # between two turns
HAIR = 1e-3  # two log-probabilities so close may change places with what else is in the batch
SAMPLE_S = 2.0
OVER_MAX = 0.25  # of the quota, while a neighbour writes there
QUIET_S = (
    60.0  # until nothing may be left, after the last request; a load that is given up ends by then
)
EXCUSES = ("shutting_down", "aborted", "engine_error")  # codes, while the server is restarted

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request, and its answer by the reference."""

    messages: list[Message]
    max_tokens: int
    text: str
    reason: str
    tokens: int


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    disk_max: int = 0


# --- reference --------------------------------------------------------------------------------


def reference(llm: LLM, count: int, rng: random.Random) -> list[list[Turn]]:
    """Conversations, each turn by itself, with nothing in any cache. Ends answers where a token hangs on
    a hair, and leaves out those that begin so."""
    systems = stems(Traffic(rules=(3, 8), stems=4), rng)
    made = []
    for number in track(range(count), "reference", transient=True):
        messages = [{"role": "system", "content": systems[number % len(systems)]}]
        turns: list[Turn] = []
        while len(turns) < TURNS:
            a, b = rng.sample(TOPICS, 2)
            ask = {"role": "user", "content": rng.choice(ASKS).format(a=a, b=b)}
            turn = _hold(llm, [*messages, ask], rng.randint(*OUTPUT))
            if turn is not None:
                turns.append(turn)
                messages = [*turn.messages, {"role": "assistant", "content": turn.text}]
        made.append(turns)
    return made


def _hold(llm: LLM, messages: list[Message], max_tokens: int) -> Turn | None:
    """None where even the first token is uncertain."""
    while True:
        llm.reset()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2)
        (done,) = llm.chat(messages, params)
        gaps = [entry.top[0][1] - entry.top[1][1] for entry in done.logprobs]
        sure = next((n for n, gap in enumerate(gaps) if gap < HAIR), len(gaps))
        if sure == len(gaps):
            made = (done.text, done.finish_reason, len(done.token_ids))
            return Turn(messages, max_tokens, *made)
        if sure == 0:
            return None
        max_tokens = sure


# --- clients ----------------------------------------------------------------------------------


class Refused(Exception):
    """The server said no, in the middle of a stream or before. ``code``: why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Clients:
    def __init__(
        self, server: Server, book: list[list[Turn]], model: str, patience_s: float
    ) -> None:
        self.tally = Tally()
        self._server = server
        self._book = book
        self._model = model
        self._patience_s = patience_s

    async def talk(self, number: int, seed: int, over: asyncio.Event) -> None:
        """One client: conversation after conversation."""
        rng = random.Random(f"{seed}.{number}")
        while not over.is_set():
            salt = rng.choice(SALTS)
            for turn in rng.choice(self._book):
                while not over.is_set() and not (settled := await self._try(turn, salt, rng)):
                    pass
                if over.is_set() or settled == "aborted":
                    break
                await asyncio.sleep(rng.uniform(*THINK_S))

    async def _try(self, turn: Turn, salt: str, rng: random.Random) -> str:
        """Ask once: "answered", "aborted", or "" where the server was restarted meanwhile."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._server.ready.wait(), 1)
        if not self._server.ready.is_set():
            return ""
        aborts = rng.random() < ABORTS
        limit_s = rng.uniform(0, ABORT_S) if aborts else self._patience_s
        asked = time.monotonic()
        counts, tally = self.tally.counts, self.tally
        try:
            async with asyncio.timeout(limit_s):
                got = await self._ask(turn, salt)
        except TimeoutError:
            counts["aborted" if aborts else "hung"] += 1
            if not aborts:
                tally.problems.append(f"a request took over {limit_s:.0f} s")
            return "aborted"
        except (httpx.HTTPError, Refused) as error:
            if self._server.was_disturbed(asked) and getattr(error, "code", EXCUSES[0]) in EXCUSES:
                counts["interrupted"] += 1
                await asyncio.sleep(0.1)
                return ""
            counts["errors"] += 1
            tally.problems.append(f"a request failed: {type(error).__name__}: {error}")
            return "aborted"
        tally.longest_s = max(tally.longest_s, time.monotonic() - asked)
        counts["answers"] += 1
        if got != (turn.text, turn.reason, turn.tokens):
            counts["wrong"] += 1
            tally.problems.append(f"wrong answer: {got}, not {turn} (salt {salt!r})")
        return "answered"

    async def _ask(self, turn: Turn, salt: str) -> tuple[str, str, int]:
        """Text, reason of the end and number of tokens. Raises httpx.HTTPError, Refused."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": turn.messages,
            "max_tokens": turn.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if salt:
            body["cache_salt"] = salt
        async with self._server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise _refusal(json.loads(await answer.aread()), answer.status_code)
            return await _read(answer)


async def _read(answer: httpx.Response) -> tuple[str, str, int]:
    text, reason, tokens, is_whole = "", "", 0, False
    async for line in answer.aiter_lines():
        if not line.startswith("data: "):
            continue
        is_whole = line == "data: [DONE]"
        if is_whole:
            break
        event = json.loads(line[6:])
        if "error" in event:
            raise _refusal(event, 200)
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            reason = choice["finish_reason"] or reason
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    if not is_whole:
        raise Refused("cut", f"the stream ended without [DONE] after {text!r}")
    return text, reason, tokens


def _refusal(body: dict[str, Any], status: int) -> Refused:
    error = body["error"]
    return Refused(str(error["code"]), f"{status} {error['code']}: {error['message']}")


# --- the run ----------------------------------------------------------------------------------


class Watch:
    """Looks at the server and the directory, and says how it goes."""

    def __init__(
        self, server: Server, faults: Faults, tally: Tally, disk: Path, disk_bytes: int
    ) -> None:
        self._server = server
        self._faults = faults
        self._tally = tally
        self._disk = disk
        self._disk_bytes = disk_bytes

    async def run(self, over: asyncio.Event, console: Console) -> None:
        start = time.monotonic()
        minute = 1
        while not over.is_set():
            await asyncio.sleep(SAMPLE_S)
            await self._look()
            if time.monotonic() >= start + 60 * minute:
                console.print(await self._line(minute))
                minute += 1

    async def _look(self) -> None:
        if self._server.ready.is_set():
            self._server.sample()
        used = 0
        for _ in range(3):  # while it is counted, files go and others come
            used = await asyncio.to_thread(bytes_under, self._disk)
            beside = time.monotonic() < self._faults.neighbour_until
            limit = self._disk_bytes * (1 + OVER_MAX * beside)
            if used <= limit:
                break
        else:
            self._tally.problems.append(
                f"the directory has {used / MIB:.1f} MiB, and its quota is {self._disk_bytes / MIB:.1f}"
                + (" (a neighbour writes there, too)" if beside else "")
            )
        self._tally.disk_max = max(self._tally.disk_max, used)

    async def _line(self, minute: int) -> str:
        server, tally = self._server, self._tally
        with suppress(httpx.HTTPError):
            await server.scrape()
        counts = tally.counts
        life = server.lives[-1].samples
        rss, files, threads = life[-1] if life else (0, 0, 0)
        reads = " ".join(
            f"{tier} {server.total('tier_reads', 'ok', tier)}"
            for tier in ("file", "valkey", "object")
        )
        return (
            f"minute {minute}: {counts['answers']} answers ({counts['wrong']} wrong), "
            f"{counts['aborted']} aborted, {counts['interrupted']} interrupted, "
            f"longest {tally.longest_s:.1f} s; life {len(server.lives)}: RSS {rss / MIB:,.0f} MiB, "
            f"{files} files, {threads} threads; disk {tally.disk_max / MIB:.1f} MiB at most; "
            f"reads {reads}; {self._faults.counts.total()} faults; "
            f"{len(tally.problems) + len(self._faults.problems) + len(server.problems)} problems"
        )


async def restarts(server: Server, every_s: float, over: asyncio.Event) -> None:
    while True:
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), every_s)
            return
        await server.stop()
        await server.start()


async def wait_until_quiet(server: Server, problems: list[str]) -> None:
    """All is over: nothing may be left in the engine."""
    until = time.monotonic() + QUIET_S
    while True:
        page = await server.scrape()
        names = ("requests", "kv_blocks_in_use")
        left = {name: n for name in names if (n := gauge_in(page, name))}
        if not left:
            return
        if time.monotonic() > until:
            problems.append(f"{QUIET_S:.0f} s after the last request there are still {left}")
            return
        await asyncio.sleep(0.5)


async def soak(
    args: argparse.Namespace, book: list[list[Turn]], folder: Path, redis: Any, console: Console
) -> tuple[Tally, Faults, Server]:
    disk, objects = folder / "disk", folder / "objects"
    disk_bytes = parse_bytes(args.disk_size, "--disk-size")
    options = ["--model", args.model, "--dtype", "float32", "--device", "cpu"]
    options += ["--kv-memory", args.kv_memory, "--host-memory", args.host_memory]
    options += ["--block-size", "8", "--max-length", "1024", "--max-step-tokens", "128"]
    options += ["--threads", str(args.threads)] if args.threads else []
    options += ["--valkey", f"valkey://127.0.0.1:{redis.port}?timeout=1"]
    options += ["--object", f"file://{objects}"]
    options += ["--disk", str(disk), "--disk-size", str(disk_bytes)]
    server = Server(args.port, options, folder / "server.log")
    clients = Clients(server, book, args.model_name, args.patience)
    faults = Faults(server, redis, disk, disk_bytes, objects, args.seed)
    watch = Watch(server, faults, clients.tally, disk, disk_bytes)
    over, faults_over = asyncio.Event(), asyncio.Event()
    try:
        await server.start()
        console.print(f"the server is ready; {args.clients} clients, {args.minutes:g} minutes")
        work = [clients.talk(number, args.seed, over) for number in range(args.clients)]
        work += [watch.run(over, console), restarts(server, args.restart_every, over)]
        work += [faults.run(faults_over)]
        running = asyncio.gather(*work)
        await asyncio.wait([running], timeout=args.minutes * 60)
        over.set()
        faults_over.set()
        await asyncio.wait_for(running, args.patience + 120)
        await wait_until_quiet(server, clients.tally.problems)
        await server.stop()
    finally:
        server.kill()
        await server.http.aclose()
    return clients.tally, faults, server


def missing(tally: Tally, faults: Faults, server: Server) -> list[str]:
    """What a run of this kind is for, and has not met."""
    met = {
        "answers": tally.counts["answers"],
        "aborts": tally.counts["aborted"],
        "restarts": len(server.lives) - 1,
        "preemptions": server.total("preemptions_total"),
        "reads that failed": server.total("tier_reads", "failed"),
    }
    met |= {
        f"reads from {t}": server.total("tier_reads", "ok", t) for t in ("file", "valkey", "object")
    }
    met |= {
        f"fault {name}": faults.counts[name]
        for name in ("freeze", "kill", "neighbour", "reset", "disk cut", "objects delete")
    }
    return [f"this run has met no {name}" for name, count in met.items() if not count]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of what happens; not of when")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--conversations", type=int, default=12, help="different ones")
    parser.add_argument("--restart-every", type=float, default=300, metavar="SECONDS")
    parser.add_argument("--patience", type=float, default=60, metavar="SECONDS")
    parser.add_argument("--kv-memory", default="32MiB")
    parser.add_argument("--host-memory", default="32MiB")
    parser.add_argument("--disk-size", default="64MiB")
    parser.add_argument("--redis-memory", default="48mb")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, help="of the model")
    parser.add_argument("--dir", type=Path, help="where files are made, and removed at the end")
    parser.add_argument("--keep-log", type=Path, help="copy the server's log there")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    console = Console(highlight=False, soft_wrap=True)
    rng = random.Random(args.seed)
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": args.threads}
    with LLM(args.model, host_bytes=0, max_length=1024, **settings) as llm:
        args.model_name = llm.model_name
        book = reference(llm, args.conversations, rng)
    turns = [turn for each in book for turn in each]
    console.print(f"reference: {len(turns)} prompts, {sum(turn.tokens for turn in turns)} tokens")
    with ExitStack() as running:
        folder = Path(
            running.enter_context(tempfile.TemporaryDirectory(prefix="soak-", dir=args.dir))
        )
        memory = ("--maxmemory", args.redis_memory, "--maxmemory-policy", "allkeys-lru")
        try:
            redis = running.enter_context(running_server("redis_server", folder, *memory))
        except Skipped as reason:
            sys.exit(f"soak: {reason}")
        args.port = _free_port()
        tally, faults, server = asyncio.run(soak(args, book, folder, redis, console))
        problems = [*tally.problems, *faults.problems, *server.all_problems()]
        if args.keep_log:
            shutil.copy(folder / "server.log", args.keep_log)
    unmet = missing(tally, faults, server)
    problems += unmet if args.minutes >= 10 else []
    report(console, tally, faults, server, problems, unmet)
    sys.exit(bool(problems))


def report(
    console: Console,
    tally: Tally,
    faults: Faults,
    server: Server,
    problems: Sequence[str],
    unmet: Sequence[str],
) -> None:
    console.print("faults: " + ", ".join(f"{n} {c}" for n, c in sorted(faults.counts.items())))
    for number, life in enumerate(server.lives, 1):
        if life.samples:
            first, last = life.samples[len(life.samples) // 4], life.samples[-1]
            console.print(f"life {number}: {len(life.samples)} samples, {first} to {last}")
    for sentence, count in Counter(problems).most_common(30):
        console.print("[red]wrong:[/]" + (f" {count} times: " if count > 1 else " ") + sentence)
    for sentence in unmet:
        console.print(sentence)
    console.print(
        f"soak: {tally.counts['answers']} answers, {tally.counts['wrong']} wrong, "
        f"{tally.counts['errors']} errors, {tally.counts['hung']} hung; {faults.counts.total()} faults, "
        f"{len(server.lives) - 1} restarts; {len(problems)} problems"
    )


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    main()
