"""How one request wants its tokens chosen, and when it wants to stop.

A token is a function of (logits, parameters, seed, output index), nothing else: a token sampled
again after recovery is the same token.

``None`` means "not said": the model's own defaults fill the gap (``with_defaults``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ebbtide.errors import InputError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_COMPLETIONS = 64


@dataclass(frozen=True, slots=True)
class RepetitionStop:
    """Stop once the output ends in a pattern of 1..``max_pattern_size`` tokens said ``min_count`` times."""

    max_pattern_size: int
    min_count: int

    def __post_init__(self) -> None:
        _integer("max_pattern_size", self.max_pattern_size, 1, 512)
        _integer("min_count", self.min_count, 2, 1_000)


class RepetitionDetector:
    """Whether the output ends in one pattern of 1..``max_pattern_size`` tokens said ``min_count`` times.

    An output of period p that is said k times has (k - 1) p tokens that equal the token p places
    before them. So it is enough to keep, for every p, the length of the run of such tokens.
    """

    def __init__(self, rule: RepetitionStop) -> None:
        self._rule = rule
        self._runs = [0] * (rule.max_pattern_size + 1)

    def push(self, tokens: list[int], output_length: int) -> bool:
        """Call after each new token; ``tokens`` end in the output. True once it repeats."""
        token = tokens[-1]
        found = False
        for period in range(1, min(self._rule.max_pattern_size, output_length - 1) + 1):
            same = tokens[-1 - period] == token
            self._runs[period] = self._runs[period] + 1 if same else 0
            found = found or self._runs[period] >= period * (self._rule.min_count - 1)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop parameters of one request; validated when built (``InputError``).

    temperature: 0 is greedy. top_k: 0 is off. top_p, min_p: probabilities. Penalties as in the
    OpenAI API (presence, frequency: over the output) and CTRL (repetition: over prompt and output).
    logit_bias: token id -> added logit. seed: None lets the engine draw one. logprobs: how many
    alternatives to report per token (0: the sampled token only; None: none at all).
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    repetition: RepetitionStop | None = None
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 1 << 31)
        _integer("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        _optional_number("temperature", self.temperature, 0.0, 100.0)
        if self.top_k is not None:
            _integer("top_k", self.top_k, 0, 1 << 31)
        _optional_number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _optional_number("min_p", self.min_p, 0.0, 1.0)
        _optional_number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, above_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 1 << 31)
            _number("logit_bias", bias, -100.0, 100.0)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 1 << 31)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InputError(
                f"stop has {len(self.stop)} strings; {MAX_STOP_STRINGS} at most", "stop"
            )
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InputError("every stop string must be a non-empty string", "stop")
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _integer("n", self.n, 1, MAX_COMPLETIONS)

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Fill every parameter that was not said from ``defaults``, then from neutral values."""
        neutral = {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        unsaid = {f.name for f in fields(self) if getattr(self, f.name) is None} & neutral.keys()
        filled = {name: defaults.get(name, neutral[name]) for name in unsaid}
        return replace(self, **filled) if filled else self


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(f"{name} must be an integer from {low} to {high}, got {value!r}", name)


def _number(name: str, value: object, low: float, high: float, above_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and low <= value <= high and not (above_low and value == low):  # type: ignore[operator]
        return  # NaN and the infinities do not get here
    bounds = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
    raise InputError(f"{name} must be a number {bounds}, got {value!r}", name)


def _optional_number(
    name: str, value: object, low: float, high: float, above_low: bool = False
) -> None:
    if value is not None:
        _number(name, value, low, high, above_low)
