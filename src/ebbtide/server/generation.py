"""One HTTP request's completions: started together, merged into batches of deltas, ended together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.types import Receive

from ebbtide.engine.output import Delta, Usage
from ebbtide.server.errors import RequestError, ServerFailure
from ebbtide.server.requests import Options

if TYPE_CHECKING:
    from ebbtide.engine.async_engine import AsyncEngine
    from ebbtide.models.tokenizer import Tokenizer
    from ebbtide.server.metrics import RequestTimer

THREAD_CHARACTERS_MIN = 20_000  # longer texts are tokenised beside the event loop


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[str | list[int]]
) -> list[list[int]]:
    """Every prompt as token ids."""
    return [
        await _encode(len(prompt), tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]


async def encode_messages(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """A conversation as token ids, ready for the model's answer."""
    if not tokenizer.has_chat_template:
        raise RequestError(
            "this model has no chat template; use /v1/completions", code="unsupported_model"
        )
    size = sum(len(message["content"]) for message in messages)
    return await _encode(size, tokenizer.encode_chat, messages)


async def _encode(characters: int, encode: Any, text: Any) -> list[int]:
    if characters < THREAD_CHARACTERS_MIN:
        return list(encode(text))
    return list(await asyncio.to_thread(encode, text))


class Generation:
    """The engine requests of one HTTP request. Choice ``p * n + i`` is completion i of prompt p.

    ``close`` must be called however it ends; it aborts whatever is still running.
    """

    def __init__(self, options: Options, choices: int, timer: RequestTimer | None = None) -> None:
        self.options = options
        self.choices = choices
        self.usages: list[Usage | None] = [None] * choices
        self._timer = timer
        self._arrived: list[tuple[int, Delta]] = []
        self._ready = asyncio.Event()
        self._failure: Exception | None = None
        self._streams: list[AsyncIterator[Delta]] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._open = 0

    @classmethod
    async def start(
        cls,
        engine: AsyncEngine,
        prompts: Sequence[list[int]],
        options: Options,
        timer: RequestTimer | None = None,
    ) -> Generation:
        """Hand every prompt to the engine: all of them, or none where it refuses one.

        Raises ``InputError``, with code ``context_length_exceeded`` for a prompt that is too long.
        """
        for prompt in prompts:
            check_length(len(prompt), engine.max_length)
        self = cls(options, len(prompts) * options.sampling.n, timer)
        try:
            for prompt in prompts:
                stream = engine.generate(
                    prompt,
                    options.sampling,
                    priority=options.priority,
                    cache_salt=options.cache_salt,
                    fail_on_lost_kv=options.fail_on_lost_kv,
                )
                self._streams.append(stream)
        except BaseException:
            await self.close()
            raise
        self._open = len(self._streams)
        self._pumps = [
            asyncio.create_task(self._pump(number * options.sampling.n, stream))
            for number, stream in enumerate(self._streams)
        ]
        return self

    async def _pump(self, first: int, stream: AsyncIterator[Delta]) -> None:
        try:
            async for delta in stream:
                choice = first + delta.index
                if self._timer is not None:
                    self._timer.observe(choice, delta)
                if delta.usage is not None:
                    self.usages[choice] = delta.usage
                self._arrived.append((choice, delta))
                self._ready.set()
        except Exception as error:
            self.fail(error)
        finally:
            self._open -= 1
            self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the merged stream with ``error``, after what has already arrived."""
        self._failure = self._failure or error
        self._ready.set()

    async def batches(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """Yield (choice, delta) pairs, as many at once as have arrived meanwhile.

        Raises ``ServerFailure`` where a choice ends without an answer, ``ClientGone`` where nobody
        reads on.
        """
        finished = 0
        while True:
            await self._ready.wait()
            self._ready.clear()
            batch, self._arrived = self._arrived, []
            if batch and not isinstance(self._failure, ClientGone):
                yield batch
                for _, delta in batch:
                    finished += delta.finish_reason is not None
                    check_ending(delta)
            if self._failure is not None:
                raise self._failure
            if not self._open and not self._arrived:
                break
        if finished != self.choices:
            raise ServerFailure("the engine left a choice without an end", code="engine_error")
        if self._timer is not None:
            self._timer.finish()

    def end_when_gone(self, receive: Receive) -> asyncio.Task[None]:
        """Watch the connection: once it is closed, ``batches`` raises ``ClientGone``."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.fail(ClientGone())

        return asyncio.create_task(watch())

    async def close(self) -> None:
        """Stop everything. What the engine had finished is finished, the rest is aborted."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()  # type: ignore[attr-defined]  # the engine's streams have it

    def usage(self) -> Usage:
        """Prompt tokens once per prompt, output tokens of every choice.

        The choices of one prompt share its KV. Where the prompt's tokens came from is told for the
        choice that computed the most of it: that one paid for all.
        """
        n = self.options.sampling.n
        known = [usage for usage in self.usages if usage is not None]
        groups = [self.usages[at : at + n] for at in range(0, len(self.usages), n)]
        paid = [
            max(present, key=lambda usage: usage.computed)
            for group in groups
            if (present := [usage for usage in group if usage is not None])
        ]
        tiers: Counter[str] = Counter()
        for usage in paid:
            tiers.update(usage.tiers)
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in paid),
            completion_tokens=sum(usage.completion_tokens for usage in known),
            device=sum(usage.device for usage in paid),
            host=sum(usage.host for usage in paid),
            computed=sum(usage.computed for usage in paid),
            recomputed_preempted=sum(usage.recomputed_preempted for usage in known),
            recomputed_failed=sum(usage.recomputed_failed for usage in known),
            tiers=dict(tiers),
        )


def check_length(tokens: int, limit: int) -> None:
    """Refuse a prompt that is empty, or that leaves no room for a single token of output."""
    if tokens == 0:
        raise RequestError("the prompt has no tokens", "prompt", code="empty_prompt")
    if tokens >= limit:
        raise RequestError(
            f"the prompt has {tokens} tokens, and this server takes {limit} per request, of which "
            "at least one must be left for the answer",
            "prompt",
            code="context_length_exceeded",
        )


def check_ending(delta: Delta) -> None:
    """Raise ``ServerFailure`` if ``delta`` ends its completion without an answer."""
    if delta.finish_reason == "error":
        raise ServerFailure(delta.error or "the engine gave up on this", code="engine_error")
    if delta.finish_reason == "abort":
        raise ServerFailure("the request was aborted", code="aborted", status=503)
