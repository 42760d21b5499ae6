"""Answers in the API's two shapes, whole or as the chunks of a stream.

A stream makes one chunk per delta that says something, so what a chunk costs is paid per token: its
constant parts are put together once, and only its text goes through the JSON encoder.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ebbtide.core.plan import TokenLogprob
from ebbtide.engine.output import Delta, Usage
from ebbtide.server.generation import Generation
from ebbtide.server.logprobs import CompletionLogprobs, chat_logprobs

if TYPE_CHECKING:
    from ebbtide.models.tokenizer import Tokenizer

FINGERPRINT = f"ebbtide-{version('ebbtide')}"
DONE = b"data: [DONE]\n\n"

_FINISH = {"stop": "stop", "length": "length", "repetition": "stop"}


def usage_object(usage: Usage) -> dict[str, Any]:
    """``usage`` as the API shapes it; device, host, the tiers, computed and recomputed are our own."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "device": usage.device,
            "host": usage.host,
            **usage.tiers,
            "computed": usage.computed,
        },
        "recomputed_tokens": {
            "preempted": usage.recomputed_preempted,
            "failed": usage.recomputed_failed,
        },
    }


class Answer:
    """What both shapes share: identity, and where the pieces go."""

    prefix = ""
    whole_kind = ""
    chunk_kind = ""

    def __init__(self, tokenizer: Tokenizer, generation: Generation, model: str) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._tokenizer = tokenizer
        self._generation = generation
        self._wants_logprobs = generation.options.sampling.logprobs is not None
        self._identity = {
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        head = json.dumps({"id": self.id, "object": self.chunk_kind, **self._identity})
        self._head = f'data: {head[:-1]}, "choices": ['
        self._tail = '], "usage": null}\n\n' if generation.options.include_usage else "]}\n\n"

    async def whole(self) -> dict[str, Any]:
        """Wait for everything. Raises what ``Generation.batches`` raises."""
        deltas: list[list[Delta]] = [[] for _ in range(self._generation.choices)]
        async for batch in self._generation.batches():
            for choice, delta in batch:
                deltas[choice].append(delta)
        return {
            "id": self.id,
            "object": self.whole_kind,
            **self._identity,
            "choices": [self._choice(choice, parts) for choice, parts in enumerate(deltas)],
            "usage": usage_object(self._generation.usage()),
        }

    def _choice(self, choice: int, deltas: list[Delta]) -> dict[str, Any]:
        reason = deltas[-1].finish_reason or ""
        logprobs = [item for delta in deltas for item in delta.logprobs]
        made = {
            "index": choice,
            **self._content("".join(delta.text for delta in deltas)),
            "logprobs": self._logprobs(choice, logprobs) if self._wants_logprobs else None,
            "finish_reason": _FINISH[reason],
        }
        return made | {"stop_reason": reason} if reason not in ("stop", "length") else made

    def chunks(self, batch: Iterable[tuple[int, Delta]]) -> bytes:
        """The events for a batch of deltas, as one piece to write; empty if there is none to tell."""
        events = []
        for choice, delta in batch:
            reason = delta.finish_reason
            finish = _FINISH.get(reason) if reason else None
            opening = self._opening(choice)
            if opening:
                events.append(f"{self._head}{opening}{self._tail}")
            if not delta.text and not delta.logprobs and finish is None:
                continue
            logprobs = "null"
            if delta.logprobs and self._wants_logprobs:
                logprobs = json.dumps(self._logprobs(choice, delta.logprobs))
            ending = "null"
            if finish:
                ending = f'"{finish}"'
                if finish != reason:
                    ending += f', "stop_reason": "{reason}"'
            events.append(
                f'{self._head}{{"index": {choice}, {self._piece(delta.text)}, '
                f'"logprobs": {logprobs}, "finish_reason": {ending}}}{self._tail}'
            )
        return "".join(events).encode()

    def usage_chunk(self) -> bytes:
        """The last event before ``DONE`` where the client asked for usage."""
        usage = json.dumps(usage_object(self._generation.usage()))
        return f'{self._head}], "usage": {usage}}}\n\n'.encode()

    def _opening(self, choice: int) -> str:
        """The choice object of a chunk that goes before a choice's first, if there is one."""
        return ""

    def _content(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _piece(self, text: str) -> str:
        raise NotImplementedError

    def _logprobs(self, choice: int, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        raise NotImplementedError


class CompletionAnswer(Answer):
    """``text_completion``."""

    prefix = "cmpl"
    whole_kind = chunk_kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer, generation: Generation, model: str) -> None:
        super().__init__(tokenizer, generation, model)
        self._renderers = [CompletionLogprobs(tokenizer) for _ in range(generation.choices)]

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _piece(self, text: str) -> str:
        return f'"text": {json.dumps(text)}'

    def _logprobs(self, choice: int, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        return self._renderers[choice].render(list(logprobs))


class ChatAnswer(Answer):
    """``chat.completion``, streamed as ``chat.completion.chunk``."""

    prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, generation: Generation, model: str) -> None:
        super().__init__(tokenizer, generation, model)
        self._opened: set[int] = set()

    def _opening(self, choice: int) -> str:
        if choice in self._opened:
            return ""
        self._opened.add(choice)
        return (
            f'{{"index": {choice}, "delta": {{"role": "assistant", "content": ""}}, '
            '"logprobs": null, "finish_reason": null}'
        )

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _piece(self, text: str) -> str:
        return f'"delta": {{"content": {json.dumps(text)}}}' if text else '"delta": {}'

    def _logprobs(self, choice: int, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, list(logprobs))
