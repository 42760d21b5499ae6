"""The engine for plain Python programs: prompts in, completions out."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ebbtide.core.plan import TokenLogprob
from ebbtide.engine.config import DEFAULT_MODEL, EngineConfig
from ebbtide.engine.engine import Engine, Progress
from ebbtide.engine.output import Delta, EngineStats, Usage
from ebbtide.errors import InputError, QueueFull
from ebbtide.params import SamplingParams

Prompt = str | Sequence[int]
Message = dict[str, Any]
OPTIONS = ("priority", "cache_salt", "fail_on_lost_kv")


@dataclass(slots=True)
class Completion:
    """One finished completion. ``finish_reason``: stop, length, repetition, abort or error."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    usage: Usage | None = None
    error: str | None = None

    def add(self, delta: Delta) -> bool:
        """Take in a delta; whether it was the last one."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.finish_reason is None:
            return False
        self.finish_reason, self.usage, self.error = delta.finish_reason, delta.usage, delta.error
        return True


class LLM:
    """A model to call. ``settings`` are the fields of ``EngineConfig``.

    >>> with LLM() as llm:
    ...     print(llm.generate("The tide", SamplingParams(max_tokens=8))[0].text)
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, progress: Progress | None = None, **settings: Any
    ) -> None:
        known = EngineConfig.__dataclass_fields__
        for name in settings:
            if name not in known:
                raise InputError(f"unknown setting {name!r}{_nearest(name, known)}", name)
        self._engine = Engine(EngineConfig(model=model, **settings), progress)
        self.model_name = self._engine.model_name
        self.max_length = self._engine.max_length
        self.tokenizer = self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_done: Callable[[int, Completion], None] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Complete prompts (texts or token ids), together; the results come in their order.

        With ``n`` above 1, a prompt's completions follow each other. ``params``: one for all, or
        one for each. ``on_done(number, completion)`` is called as completions finish. ``options``:
        priority, cache_salt, fail_on_lost_kv. Raises InputError before anything is computed; when
        interrupted, aborts what is unfinished.
        """
        listed = _listed(prompts)
        each_params = _params_for(listed, params)
        _check_options(options)
        batch = _Batch(self._engine, on_done)
        try:
            for prompt, each in zip(listed, each_params, strict=True):
                batch.submit(prompt, each, options)
            while batch.unfinished:
                batch.wait_for_one()
        except BaseException:
            batch.abort()
            raise
        return batch.results

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Answer one conversation, or several together. Messages have a ``role`` and a ``content``."""
        prompts = [self.tokenizer.encode_chat(each) for each in _conversations(messages)]
        return self.generate(prompts, params, **options)

    def reset(self, tiers: Sequence[str] | None = None) -> None:
        """Forget all cached KV, on the device and in every tier."""
        self._engine.reset(tiers)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _listed(prompts: Any) -> Sequence[Prompt]:
    """One prompt or several, as a list. Token ids are checked by the engine."""
    wanted = "a text, a list of token ids, or a list of either"
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise InputError(f"prompts must be {wanted}, got {_shown(prompts)}", "prompts")
    if prompts and isinstance(prompts[0], int):
        return [prompts]
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not _is_list(prompt):
            raise InputError(
                f"prompts must be {wanted}, got {_shown(prompt)} at index {number}", "prompts"
            )
    return list(prompts)


def _params_for(prompts: Sequence[Prompt], params: Any) -> Sequence[SamplingParams]:
    """One set of parameters for each prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if not _is_list(params) or not all(isinstance(each, SamplingParams) for each in params):
        raise InputError(
            f"params must be SamplingParams, or a list of them, got {_shown(params)}", "params"
        )
    if len(params) != len(prompts):
        raise InputError(f"{len(prompts)} prompts, but {len(params)} sets of parameters", "params")
    return list(params)


def _check_options(options: dict[str, Any]) -> None:
    for name in options:
        if name in SamplingParams.__dataclass_fields__:
            raise InputError(f"{name} belongs into SamplingParams({name}=...)", name)
        if name not in OPTIONS:
            raise InputError(f"unknown option {name!r}{_nearest(name, OPTIONS)}", name)


def _conversations(messages: Any) -> list[list[Message]]:
    """One conversation or several, as a list of lists of messages."""
    if not _is_list(messages):
        hint = "; generate() completes a text" if isinstance(messages, str) else ""
        raise InputError(
            "messages must be a list such as [{'role': 'user', 'content': 'Hi'}], "
            f"got {_shown(messages)}{hint}",
            "messages",
        )
    several = messages if messages and _is_list(messages[0]) else [messages]
    for conversation in several:
        if not _is_list(conversation):
            raise InputError(
                f"messages holds {_shown(conversation)} among conversations", "messages"
            )
        if not conversation:
            raise InputError(
                "messages is empty: a conversation has at least one message", "messages"
            )
    return [list(conversation) for conversation in several]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}... ({type(value).__name__})"


class _Batch:
    """The completions of one call, as they come in."""

    def __init__(self, engine: Engine, on_done: Callable[[int, Completion], None] | None) -> None:
        self.results: list[Completion] = []
        self.unfinished = 0
        self._engine = engine
        self._on_done = on_done
        self._names: list[str] = []
        self._arrived: queue.SimpleQueue[tuple[int, Delta]] = queue.SimpleQueue()

    def submit(self, prompt: Prompt, params: SamplingParams, options: dict[str, Any]) -> None:
        """Queue a prompt; where the engine's queue is full, wait until there is room."""
        first = len(self.results)

        def sink(delta: Delta) -> None:
            self._arrived.put((first + delta.index, delta))

        while True:
            try:
                self._names += self._engine.submit(prompt, params, sink, **options)
                break
            except QueueFull:
                if not self.unfinished:
                    raise
                self.wait_for_one()
        self.results += [Completion() for _ in range(params.n)]
        self.unfinished += params.n

    def wait_for_one(self) -> None:
        """Take deltas in until one more completion is finished."""
        while True:
            number, delta = self._arrived.get()
            if self.results[number].add(delta):
                self.unfinished -= 1
                if self._on_done is not None:
                    self._on_done(number, self.results[number])
                return

    def abort(self) -> None:
        self._engine.abort(self._names)


def _nearest(name: str, known: Any) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, 1)
    return f": did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
