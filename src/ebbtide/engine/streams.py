"""From tokens to text: one stream per sequence, from the engine's outputs to its owner's deltas."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ebbtide.core.ledger import COMPUTED, DEVICE, HOST, Cause
from ebbtide.core.output import Output, Report
from ebbtide.core.request import FinishReason
from ebbtide.engine.output import Delta, Usage
from ebbtide.engine.stop_strings import StopStrings
from ebbtide.errors import InputError
from ebbtide.models.tokenizer import Detokenizer, Tokenizer
from ebbtide.params import SamplingParams

Sink = Callable[[Delta], None]  # called on the engine's thread


def usage_of(report: Report) -> Usage:
    return Usage(
        prompt_tokens=report.prompt_tokens,
        completion_tokens=report.output_tokens,
        device=report.sources[DEVICE],
        host=report.sources[HOST],
        computed=report.sources[COMPUTED],
        recomputed_preempted=report.recomputed[Cause.PREEMPTED],
        recomputed_failed=report.recomputed[Cause.FAILED],
        tiers={s: n for s, n in report.sources.items() if s not in (DEVICE, HOST, COMPUTED)},
    )


class _Stream:
    """One sequence's way from tokens to deltas. ``over``: its stop string was found."""

    __slots__ = ("_detokenizer", "_index", "_stops", "over", "sink")

    def __init__(
        self, index: int, params: SamplingParams, tokenizer: Tokenizer, sink: Sink
    ) -> None:
        self.sink = sink
        self.over = False
        self._index = index
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(params.stop) if params.stop else None

    def token(self, output: Output) -> Delta:
        assert output.token is not None
        text = self._detokenizer.push(output.token)
        if self._stops is not None and text:
            text, self.over = self._stops.push(text)
        return self._delta(output, text)

    def last(self, output: Output) -> Delta:
        """The delta that ends the stream. Text held back comes out, unless a stop string ended it."""
        text = ""
        ended_by_token = output.finish is FinishReason.STOP and output.token is not None
        if not self.over:
            if output.token is not None and not ended_by_token:
                text = self._detokenizer.push(output.token)
            text += self._detokenizer.flush()
            if self._stops is not None:
                text, self.over = self._stops.push(text)
                text += "" if self.over else self._stops.flush()
        reason = output.finish
        assert reason is not None
        if self.over and reason is not FinishReason.ERROR:
            reason = FinishReason.STOP
        report = output.report
        return replace(
            self._delta(output, text),
            finish_reason=reason.value,
            usage=usage_of(report) if report else None,
            error=output.message or None,
        )

    def _delta(self, output: Output, text: str) -> Delta:
        return Delta(
            self._index,
            text,
            () if output.token is None else (output.token,),
            () if output.logprob is None else (output.logprob,),
        )


class Streams:
    """All open streams. ``listen`` is the engine loop's listener."""

    def __init__(self, tokenizer: Tokenizer, flush: Callable[[], None] = lambda: None) -> None:
        self._tokenizer = tokenizer
        self._flush = flush  # called once after each batch of deltas
        self._open: dict[str, _Stream] = {}

    def open(self, request_id: str, index: int, params: SamplingParams, sink: Sink) -> None:
        self._open[request_id] = _Stream(index, params, self._tokenizer, sink)

    def discard(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def listen(self, outputs: Sequence[Output]) -> list[str]:
        """Hand the outputs on. Returns the requests whose stop string has just been found."""
        stopped = []
        for output in outputs:
            stream = self._open.get(output.request_id)
            if stream is None:
                continue
            if output.finish is not None:
                del self._open[output.request_id]
                stream.sink(stream.last(output))
            elif not stream.over:
                stream.sink(stream.token(output))
                if stream.over:
                    stopped.append(output.request_id)
        self._flush()
        return stopped


def resolve(
    params: SamplingParams, tokenizer: Tokenizer, defaults: dict[str, Any]
) -> SamplingParams:
    """Fill in what was not said: the model's defaults, the seed, the ids that end its answers.

    Raises InputError for token ids that the model does not have.
    """
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        check_token_ids(ids, tokenizer.vocab_size, name)
    stops = params.stop_token_ids
    if not params.ignore_eos:
        stops = stops | tokenizer.eos_ids
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return replace(params.with_defaults(defaults), seed=seed, stop_token_ids=frozenset(stops))


def check_token_ids(ids: Iterable[int], vocab_size: int, name: str) -> None:
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise InputError(
                f"{name} has the token id {token!r}; this model's ids are integers "
                f"from 0 to {vocab_size - 1}",
                name,
            )
