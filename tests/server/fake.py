"""A stand-in for AsyncEngine: scripted text over a tokenizer of bytes, no model and no threads."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ebbtide.core.plan import TokenLogprob
from ebbtide.engine.output import Delta, EngineStats, TierFigures, Usage
from ebbtide.errors import EngineStopped, InputError, QueueFull
from ebbtide.offload.tiers.base import TierStats
from ebbtide.params import SamplingParams

END = 256  # the one token that is no byte
VOCABULARY = 257


class FakeTokenizer:
    """A token is a byte of UTF-8; 256 ends a text."""

    has_chat_template = True

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < END).decode(errors="replace")

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < END else b""

    def encode_chat(
        self, messages: Any, tools: Any = None, add_generation_prompt: bool = True
    ) -> list[int]:
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return self.encode(text + "<assistant>" if add_generation_prompt else text)


class FakeStream:
    """The iterator that ``generate`` returns: nothing runs unless somebody asks for the next delta."""

    def __init__(self, engine: FakeEngine, deltas: Iterator[Delta | Exception]) -> None:
        self._engine = engine
        self._deltas = deltas
        self._over = False
        engine.unfinished += 1

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Delta:
        if self._over:
            raise StopAsyncIteration
        try:
            if self._engine.delay_s:
                await asyncio.sleep(self._engine.delay_s)
            delta = next(self._deltas, None)
        except BaseException:
            self._end(aborted=True)
            raise
        if delta is None:
            self._end()
            raise StopAsyncIteration
        if isinstance(delta, Exception):
            self._end()
            raise delta
        return delta

    async def aclose(self) -> None:
        self._end(aborted=True)

    def _end(self, aborted: bool = False) -> None:
        if not self._over:
            self._over = True
            self._engine.unfinished -= 1
            self._engine.aborted += aborted


class FakeEngine:
    """Answers every prompt with ``script(prompt text, completion index)``; by default an echo.

    delay_s: waited before each delta. failing: completion indices that end in an error after two
    tokens. crash: raised in the middle of a stream. The counters tell what became of requests.
    """

    model_name = "fake"
    max_length = 4096

    def __init__(self, script: Callable[[str, int], str] | None = None) -> None:
        self.tokenizer = FakeTokenizer()
        self.script = script or (lambda text, index: text)
        self.delay_s = 0.0
        self.failing: frozenset[int] = frozenset()
        self.crash: Exception | None = None
        self.waiting_max = 10_000
        self.stopped = False
        self.requests: list[dict[str, Any]] = []
        self.unfinished = 0
        self.aborted = 0
        self.closed = False
        self.generated = 0
        self.tiers: dict[str, tuple[TierFigures, TierStats]] = {}
        self.resets: list[Sequence[str] | None] = []

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        fail_on_lost_kv: bool | None = None,
    ) -> FakeStream:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if any(not 0 <= token < VOCABULARY for token in tokens):
            raise InputError(f"prompt has a token id outside of 0..{VOCABULARY - 1}", "prompt")
        if self.stopped:
            raise EngineStopped("the engine has stopped: a bug")
        if self.unfinished >= self.waiting_max:
            raise QueueFull(f"{self.unfinished} requests are waiting already; try again later")
        self.requests.append(
            {
                "tokens": tokens,
                "params": params,
                "priority": priority,
                "cache_salt": cache_salt,
                "fail_on_lost_kv": fail_on_lost_kv,
            }
        )
        return FakeStream(self, self._interleaved(tokens, params))

    def _interleaved(
        self, tokens: list[int], params: SamplingParams
    ) -> Iterator[Delta | Exception]:
        text = self.tokenizer.decode(tokens)
        running = [self._one(text, len(tokens), i, params) for i in range(params.n)]
        while running:
            for completion in list(running):
                delta = next(completion, None)
                if delta is None:
                    running.remove(completion)
                else:
                    yield delta

    def _one(
        self, prompt: str, prompt_tokens: int, index: int, params: SamplingParams
    ) -> Iterator[Delta | Exception]:
        answer, reason = self.script(prompt, index), "stop"
        stops = [at for stop in params.stop if (at := answer.find(stop)) >= 0]
        answer = answer[: min(stops)] if stops else answer
        if params.repetition and answer.endswith("la" * params.repetition.min_count):
            reason = "repetition"
        tokens = self.tokenizer.encode(answer)
        if params.max_tokens is not None and len(tokens) > params.max_tokens:
            tokens, reason = tokens[: params.max_tokens], "length"
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        for number, token in enumerate(tokens):
            if number == 2 and self.crash is not None:
                yield self.crash
            if number == 2 and index in self.failing:
                usage = _usage(prompt_tokens, number, index)
                yield Delta(index, finish_reason="error", usage=usage, error="the device burnt")
                return
            self.generated += 1
            yield Delta(index, decoder.decode(bytes([token])), (token,), _logprobs(token, params))
        usage = _usage(prompt_tokens, len(tokens), index)
        yield Delta(index, finish_reason=reason, usage=usage)

    def stats(self) -> EngineStats:
        if self.closed:
            raise RuntimeError("closed")
        return EngineStats(
            running=self.unfinished,
            waiting=0,
            loading=0,
            kv_blocks=64,
            kv_blocks_in_use=3,
            kv_blocks_cached=2,
            host_slots=16,
            host_slots_in_use=1,
            steps=self.generated,
            failed_steps=0,
            preemptions=0,
            prompt_tokens={"device": 1, "host": 2, "computed": 3},
            generated_tokens=self.generated,
            recomputed_tokens={"preempted": 0, "failed": 0},
            finished_requests={"stop": 1},
            transfers={"load_ok": 4, "store_dropped": 5},
            transfer_bytes={"load": 400, "store": 500},
            host_evictions=6,
            tiers={name: figures for name, (figures, _) in self.tiers.items()},
        )

    async def tier_stats(self) -> dict[str, TierStats]:
        return {name: stats for name, (_, stats) in self.tiers.items()}

    def reset(self, tiers: Sequence[str] | None = None) -> None:
        if tiers and tiers != ["host"]:
            raise InputError(f"there is no tier {tiers[0]!r}", "tiers")
        self.resets.append(tiers)

    async def close(self) -> str:
        self.closed = True
        return ""


def _logprobs(token: int, params: SamplingParams) -> tuple[TokenLogprob, ...]:
    if params.logprobs is None:
        return ()
    top = tuple((token + k, -0.5 - k) for k in range(params.logprobs))
    return (TokenLogprob(token, -0.5, top),)


def _usage(prompt_tokens: int, completion_tokens: int, index: int) -> Usage:
    """The first completion finds one token on the device and one on the host; the others, all but
    one on the device."""
    device, host = (1, 1) if index == 0 else (prompt_tokens - 1, 0)
    if prompt_tokens < 3:
        device, host = 0, 0
    computed = prompt_tokens - device - host
    return Usage(prompt_tokens, completion_tokens, device, host, computed, 2, 1)
