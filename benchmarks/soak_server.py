"""The server of the soak: a child process that is started, watched and stopped, and its measures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

MIB = 1 << 20
START_S = 180.0
STOP_S = 60.0  # grace, steps in flight and what is to be kept
WARM_UP = 0.25  # of a life's samples, which are not compared
SAMPLES_MIN = (
    75  # of a life, else nothing can be said of growth: pools start threads as they need them
)
GROWTH_MAX = {"rss": 32 * MIB, "files": 4, "threads": 2}


class Sample(NamedTuple):
    """``threads``: without those of the object store's client, whose runtime starts as many as it has calls
    that block, up to 512, and ends them after ten idle seconds."""

    rss: int  # bytes
    files: int
    threads: int


@dataclass
class LifeOfServer:
    samples: list[Sample] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)  # as they were last seen


def growth(samples: Sequence[Sample]) -> list[str]:
    """What has grown from the first third of a life to the last, in sentences."""
    warm = samples[int(len(samples) * WARM_UP) :]
    if len(samples) < SAMPLES_MIN:
        return []
    third = len(warm) // 3
    problems = []
    for name, limit in GROWTH_MAX.items():
        before, after = (
            statistics.median(getattr(sample, name) for sample in part)
            for part in (warm[:third], warm[-third:])
        )
        if after - before > limit:
            unit, word = (MIB, "MiB of RSS") if name == "rss" else (1, f"open {name}")
            problems.append(f"{before / unit:,.0f} {word} became {after / unit:,.0f}")
    return problems


def _threads(process: psutil.Process) -> int:
    count = 0
    for thread in process.threads():
        try:
            name = Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text()
        except OSError:  # it has ended, or this is not Linux
            name = ""
        count += not name.startswith("tokio")
    return count


def bytes_under(folder: Path) -> int:
    """Lengths of all files. One that is given another name meanwhile counts once."""
    seen: dict[int, int] = {}
    for entry in _files(str(folder)):
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            seen[status.st_ino] = status.st_size
    return sum(seen.values())


def _files(folder: str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            else:
                yield entry


def counters_in(text: str) -> Counter[str]:
    """Counters of a page of metrics: name and labels as they stand there, without ``ebbtide_``."""
    lines = re.findall(r"^ebbtide_(\w+_total(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)
    return Counter({name: int(float(value)) for name, value in lines})


def gauge_in(text: str, name: str) -> float:
    """The sum over all labels."""
    return sum(
        float(v)
        for v in re.findall(rf"^ebbtide_{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    )


class Server:
    """``ready`` is set while it answers. ``problems``: what went wrong with the process itself."""

    def __init__(self, port: int, options: Sequence[str], log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.ready = asyncio.Event()
        self.lives: list[LifeOfServer] = []
        self.problems: list[str] = []
        self._command = [sys.executable, "-m", "ebbtide.cli.main", "serve", "--port", str(port)]
        self._command += options
        self._log = log
        self._child: asyncio.subprocess.Process | None = None
        self._process: psutil.Process | None = None
        self._ready_at = 0.0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.AsyncClient(base_url=self.url, limits=limits, timeout=None)

    def was_disturbed(self, since: float) -> bool:
        """Whether it was down, or on its way there, at any moment since then (``time.monotonic``)."""
        return not self.ready.is_set() or self._ready_at > since

    async def start(self) -> None:
        """Raises SystemExit where it does not come up."""
        with self._log.open("ab") as log:
            self._child = await asyncio.create_subprocess_exec(
                *self._command, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL
            )
        until = time.monotonic() + START_S
        while not await self._is_healthy():
            if self._child.returncode is not None or time.monotonic() > until:
                raise SystemExit(f"the server did not start:\n{self.log_text()[-2000:]}")
            await asyncio.sleep(0.1)
        self._process = psutil.Process(self._child.pid)
        self.lives.append(LifeOfServer())
        self._ready_at = time.monotonic()
        self.ready.set()

    async def _is_healthy(self) -> bool:
        try:
            return (await self.http.get("/health", timeout=5)).status_code == 200
        except httpx.HTTPError:
            return False

    async def stop(self) -> None:
        """As a service manager does."""
        assert self._child is not None
        with contextlib.suppress(httpx.HTTPError):
            await self.scrape()
        self.ready.clear()
        self._child.send_signal(signal.SIGTERM)
        try:
            code = await asyncio.wait_for(self._child.wait(), STOP_S)
        except TimeoutError:
            self.problems.append(f"the server did not end within {STOP_S:.0f} s of SIGTERM")
            self.kill()
            await self._child.wait()
            return
        if code:
            self.problems.append(f"the server ended with code {code}")

    def kill(self) -> None:
        if self._child is not None and self._child.returncode is None:
            self._child.kill()

    def sample(self) -> Sample | None:
        """None where the process is gone."""
        assert self._process is not None
        try:
            usage = self._process
            sample = Sample(usage.memory_info().rss, usage.num_fds(), _threads(usage))
        except psutil.Error:
            if self.ready.is_set():
                self.problems.append("the server's process is gone")
                self.ready.clear()
            return None
        self.lives[-1].samples.append(sample)
        return sample

    async def scrape(self) -> str:
        """The page of metrics; takes note of the counters, which must not go down."""
        text = (await self.http.get("/metrics", timeout=30)).text
        life = self.lives[-1]
        now = counters_in(text)
        for name, value in life.counters.items():
            if now[name] < value:
                self.problems.append(f"the counter {name} went from {value} to {now[name]}")
        life.counters = now
        return text

    def total(self, *words: str) -> int:
        """The sum, over all lives, of the counters whose names have all of these words."""
        return sum(
            value
            for life in self.lives
            for name, value in life.counters.items()
            if all(word in name for word in words)
        )

    def log_text(self) -> str:
        return self._log.read_text(errors="replace")

    def all_problems(self) -> list[str]:
        grown = [
            f"life {number}: {sentence}"
            for number, life in enumerate(self.lives, 1)
            for sentence in growth(life.samples)
        ]
        log = self.log_text()
        bugs = [
            f"its log has {word!r} {log.count(word)} times"
            for word in ("Traceback", "because of a bug")
            if word in log
        ]
        return [*self.problems, *grown, *bugs]
