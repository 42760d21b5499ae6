"""Ebbtide, as its users have it: the asynchronous engine with its defaults, but that its memory is taken at
the start, as vLLM's is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from protocol import Ran, Request, serve

from ebbtide.engine.async_engine import AsyncEngine
from ebbtide.engine.config import EngineConfig
from ebbtide.params import SamplingParams


class Ebbtide:
    def __init__(self, settings: dict[str, Any]) -> None:
        config = EngineConfig(
            model=settings["model"],
            threads=settings["threads"],
            kv_bytes=settings["kv_bytes"],
            host_bytes=settings["host_bytes"],
            populate=True,
        )
        self._engine = AsyncEngine.start(config)

    def run(self, requests: Sequence[Request], limit: int) -> Ran:
        return asyncio.run(self._run(requests, limit))

    async def _run(self, requests: Sequence[Request], limit: int) -> Ran:
        first = [0.0] * len(requests)
        outputs: list[list[int]] = [[] for _ in requests]
        waiting = iter(range(len(requests)))

        async def client() -> None:
            for number in waiting:
                prompt, count = requests[number]
                params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                handed_in = time.perf_counter()
                async for delta in self._engine.generate(prompt, params):
                    if not outputs[number]:
                        first[number] = time.perf_counter() - handed_in
                    outputs[number] += delta.token_ids

        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(min(limit, len(requests)))))
        return Ran(time.perf_counter() - begin, first, outputs)


if __name__ == "__main__":
    serve(Ebbtide)
