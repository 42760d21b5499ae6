"""The engine for asyncio programs: a request is an async iterator of deltas."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from ebbtide.engine.config import EngineConfig
from ebbtide.engine.engine import Engine, Progress
from ebbtide.engine.output import Delta, EngineStats
from ebbtide.offload.tiers.base import TierStats
from ebbtide.params import SamplingParams


class AsyncEngine:
    """Built with ``AsyncEngine.start``; used from any number of tasks of one event loop."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        self._arrived: deque[tuple[_Results, Delta]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine = Engine(config, progress, self._flush)
        self.model_name = self._engine.model_name
        self.max_length = self._engine.max_length
        self.tokenizer = self._engine.tokenizer

    @classmethod
    def start(cls, config: EngineConfig, progress: Progress | None = None) -> AsyncEngine:
        """Load the model; takes as long as that takes. Raises InputError."""
        return cls(config, progress)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        fail_on_lost_kv: bool | None = None,
    ) -> AsyncIterator[Delta]:
        """Deltas of all ``params.n`` completions, as they come; the last of each has its reason.

        Raises InputError or QueueFull here, before the first delta. Closing the iterator, or
        cancelling the task that waits for it, aborts what is unfinished.
        """
        self._loop = asyncio.get_running_loop()
        results = _Results(self._engine, params.n)
        results.names = self._engine.submit(
            prompt,
            params,
            lambda delta: self._arrived.append((results, delta)),
            priority=priority,
            cache_salt=cache_salt,
            fail_on_lost_kv=fail_on_lost_kv,
        )
        return results

    def reset(self, tiers: Sequence[str] | None = None) -> None:
        """Forget all cached KV, on the device and in every tier; or that in the tiers named."""
        self._engine.reset(tiers)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def tier_stats(self) -> dict[str, TierStats]:
        """What each tier below the host tier says of itself."""
        return await asyncio.to_thread(self._engine.tier_stats)

    async def close(self) -> str:
        """Abort what is unfinished and stop. Returns a sentence per tier on what it keeps."""
        return await asyncio.to_thread(self._engine.close)

    def _flush(self) -> None:
        """On the engine's thread: one call into the event loop for all deltas of a step."""
        if self._arrived and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                self._arrived.clear()  # the event loop has ended, and everyone who listened

    def _deliver(self) -> None:
        while self._arrived:
            results, delta = self._arrived.popleft()
            results.put(delta)


class _Results(AsyncIterator[Delta]):
    """The deltas of one request, as an async generator would give them, but validated before."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.names: list[str] = []
        self._engine = engine
        self._unfinished = count
        self._deltas: deque[Delta] = deque()
        self._ready = asyncio.Event()

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._ready.set()

    async def __anext__(self) -> Delta:
        if not self._deltas:
            if not self._unfinished:
                raise StopAsyncIteration
            self._ready.clear()
            try:
                await self._ready.wait()
            except asyncio.CancelledError:
                self._abort()
                raise
        delta = self._deltas.popleft()
        if delta.finish_reason is not None:
            self._unfinished -= 1
        return delta

    async def aclose(self) -> None:
        """Abort what is unfinished."""
        self._abort()

    def _abort(self) -> None:
        if self._unfinished:
            self._unfinished = 0
            self._deltas.clear()
            self._engine.abort(self.names)

    def __del__(self) -> None:
        self._abort()
