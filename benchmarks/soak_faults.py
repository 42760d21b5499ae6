"""What the soak does to a server's tiers from outside, and how much of it."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from ebbtide.offload.tiers.base import Status, TierContext
from ebbtide.offload.tiers.file import FileTier
from ebbtide.offload.tiers.file_settings import FileSettings
from soak_server import Server

TIERS = ("host", "file", "valkey", "object")
PAUSE_S = (0.5, 5.0)  # between two faults
FROZEN_S = (0.2, 8.0)
GONE_S = (0.0, 5.0)
STRUCK_MAX = 12  # files, at a time
NEIGHBOUR_CHUNK = 256 << 10  # bytes
NEIGHBOUR_S = 10.0  # that it takes to fill its part of the quota


def spoil(path: Path, kind: str, rng: random.Random) -> bool:
    """Delete a file, cut it, or turn a byte of it. False where it has gone by itself."""
    try:
        size = path.stat().st_size
        if kind == "delete":
            path.unlink()
        elif kind == "cut":
            os.truncate(path, rng.randrange(size) if size else 0)
        elif size:
            with path.open("r+b") as file:
                file.seek(rng.randrange(size))
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0x40]))
    except OSError:
        return False
    return True


def neighbour(directory: str, size: int, share: float, empties: bool) -> None:
    """Another process with a tier in the same directory and another model: fills ``share`` of the quota,
    and takes its chunks away again if it ``empties``."""
    settings = FileSettings(directory, size, floor=0)
    tier = FileTier(settings, TierContext(os.urandom(32), NEIGHBOUR_CHUNK))
    tier.start()
    while tier.stats().state == "starting":
        time.sleep(0.05)
    chunk = memoryview(mmap.mmap(-1, NEIGHBOUR_CHUNK))  # page-aligned, as tiers are promised
    chunk[:] = os.urandom(NEIGHBOUR_CHUNK)
    count = int(size * share) // NEIGHBOUR_CHUNK
    for _ in range(count):
        (result,) = tier.write([os.urandom(34)], [chunk])
        assert result.status in (Status.OK, Status.FULL), result
        time.sleep(NEIGHBOUR_S / count)
    if empties:
        tier.clear()
    tier.close()


class Faults:
    """One after the other, at random, until told to end. ``server``'s restarts come on top.

    ``counts``: of each kind, how often. ``problems``: what must not have happened.
    """

    def __init__(
        self, server: Server, redis: Any, disk: Path, disk_bytes: int, objects: Path, seed: int
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.neighbour_until = 0.0  # the quota may be over a little until then
        self._server = server
        self._redis = redis
        self._disk = disk
        self._disk_bytes = disk_bytes
        self._objects = objects
        self._rng = random.Random(seed)
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "freeze": self._freeze,
            "kill": self._kill,
            "files": lambda: self._spoil(self._disk, "*/*/*.kv"),
            "objects": lambda: self._spoil(self._objects, "*/*/*"),
            "neighbour": self._neighbour,
            "reset": self._reset,
        }

    async def run(self, over: asyncio.Event) -> None:
        names = list(self._kinds)
        self._rng.shuffle(names)
        number = 0
        while not over.is_set():
            if number and number % len(names) == 0:
                self._rng.shuffle(names)
            await self._kinds[names[number % len(names)]]()  # each kind comes as often as any other
            number += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), self._rng.uniform(*PAUSE_S))

    async def _freeze(self) -> None:
        self.counts["freeze"] += 1
        self._redis.freeze()
        await asyncio.sleep(self._rng.uniform(*FROZEN_S))
        self._redis.thaw()

    async def _kill(self) -> None:
        self.counts["kill"] += 1
        await asyncio.to_thread(self._redis.kill)
        await asyncio.sleep(self._rng.uniform(*GONE_S))
        await asyncio.to_thread(self._redis.start)

    async def _spoil(self, folder: Path, pattern: str) -> None:
        files = await asyncio.to_thread(lambda: sorted(folder.glob(pattern)))
        for path in self._rng.sample(files, min(len(files), self._rng.randint(1, STRUCK_MAX))):
            kind = self._rng.choice(("delete", "cut", "turn"))
            self.counts[f"{folder.name} {kind}"] += spoil(path, kind, self._rng)

    async def _neighbour(self) -> None:
        self.counts["neighbour"] += 1
        share, empties = self._rng.uniform(0.3, 1.2), self._rng.random() < 0.7
        self.neighbour_until = float("inf")
        child = multiprocessing.get_context("spawn").Process(
            target=neighbour, args=(str(self._disk), self._disk_bytes, share, empties), daemon=True
        )
        child.start()
        await asyncio.to_thread(child.join)
        self.neighbour_until = time.monotonic() + 3
        if child.exitcode:
            self.problems.append(f"the neighbour on the disk ended with {child.exitcode}")

    async def _reset(self) -> None:
        asked = time.monotonic()
        names = self._rng.sample(TIERS, self._rng.randint(0, len(TIERS)))
        try:
            answer = await self._server.http.post(
                "/v1/kv/reset", json={"tiers": names} if names else {}, timeout=30
            )
        except httpx.HTTPError as error:
            if not self._server.was_disturbed(asked):
                self.problems.append(f"a reset of {names} failed: {error!r}")
            return
        self.counts["reset"] += 1
        if answer.status_code != 200 and not self._server.was_disturbed(asked):
            self.problems.append(f"a reset of {names} got {answer.status_code}: {answer.text}")
