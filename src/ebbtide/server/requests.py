"""The two request bodies of the API as values. Anything not understood in full is refused.

Raises ``InputError`` (most often ``RequestError``) that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebbtide.errors import InputError
from ebbtide.params import RepetitionStop, SamplingParams
from ebbtide.server import fields
from ebbtide.server.errors import RequestError
from ebbtide.server.messages import read_messages

COMPLETION_TOKENS_DEFAULT = 16  # what the OpenAI API says for /v1/completions
PROMPTS_MAX = 64
CHOICES_MAX = 256
LOGIT_BIAS_MAX = 1024
STOP_TOKENS_MAX = 256
PRIORITY_BOUND = 1 << 31

# Read as they are; SamplingParams checks their ranges.
_INTEGERS = frozenset({"top_k", "min_tokens", "seed", "n"})
_NUMBERS = frozenset(
    {
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    }
)
_PLAIN = _INTEGERS | _NUMBERS
_WITHOUT_EFFECT = ("user", "safety_identifier", "prompt_cache_key")
_COMMON = _PLAIN.union(
    ("model", "stream", "stream_options", "priority", "cache_salt", "on_lost_kv"),
    ("max_tokens", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "logprobs", "repetition"),
    ("metadata", "store", *_WITHOUT_EFFECT),
)
_COMPLETION = _COMMON | {"prompt", "echo"}
_CHAT = _COMMON | {"messages", "max_completion_tokens", "top_logprobs", "response_format"}

_NO_TOOLS = "this server does no tool calling"
_NO_AUDIO = "this server writes text only"
_REFUSED = {
    "service_tier": "there is one tier",
    "best_of": "choose among the choices of n yourself",
    "prompt_logprobs": "log-probabilities are those of the output only",
    "guided_json": "output is not constrained to a grammar",
    "guided_regex": "output is not constrained to a grammar",
    "guided_grammar": "output is not constrained to a grammar",
    "guided_choice": "output is not constrained to a grammar",
}
_REFUSED_COMPLETION = _REFUSED | {
    "suffix": "text is only ever continued at its end",
    "messages": "messages belong to /v1/chat/completions",
    "max_completion_tokens": "here it is called max_tokens",
    "top_logprobs": "here logprobs is the number of alternatives",
}
_REFUSED_CHAT = _REFUSED | {
    "prompt": "prompts belong to /v1/completions",
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "parallel_tool_calls": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "function_call": _NO_TOOLS,
    "web_search_options": _NO_TOOLS,
    "audio": _NO_AUDIO,
    "modalities": _NO_AUDIO,
    "prediction": "there is no speculation on a predicted output",
    "reasoning_effort": "how much a model reasons is its own affair",
    "verbosity": "how much a model says is its own affair",
    "moderation": "this server does not moderate",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What both kinds of request have in common."""

    model: str
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    priority: int
    cache_salt: str
    fail_on_lost_kv: bool | None  # None: as the server was told


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """``prompts``: at least one; each is text or a list of token ids."""

    options: Options
    prompts: tuple[str | list[int], ...]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """``messages``: role and content only, content as one string."""

    options: Options
    messages: list[dict[str, str]]


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Read the body of ``POST /v1/completions``."""
    fields.check_names(body, _COMPLETION, _REFUSED_COMPLETION)
    if fields.boolean(body, "echo"):
        raise RequestError(
            "echo is not supported: the prompt is yours already",
            "echo",
            code="unsupported_parameter",
        )
    given: dict[str, Any] = {"max_tokens": COMPLETION_TOKENS_DEFAULT}
    if body.get("max_tokens") is not None:
        given["max_tokens"] = body["max_tokens"]
    elif isinstance(body.get("min_tokens"), int):
        given["max_tokens"] = max(COMPLETION_TOKENS_DEFAULT, body["min_tokens"])
    if body.get("logprobs") is not None:
        given["logprobs"] = body["logprobs"]
    prompts = _read_prompts(body.get("prompt"))
    options = _read_options(body, given)
    if len(prompts) * options.sampling.n > CHOICES_MAX:
        raise RequestError(
            f"{len(prompts)} prompts with n = {options.sampling.n} make more than "
            f"{CHOICES_MAX} choices",
            "n",
        )
    return CompletionRequest(options, prompts)


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Read the body of ``POST /v1/chat/completions``."""
    fields.check_names(body, _CHAT, _REFUSED_CHAT)
    _check_response_format(body)
    given: dict[str, Any] = {}
    limit = _max_tokens(body)
    if limit is not None:
        given["max_tokens"] = limit
    if fields.boolean(body, "logprobs"):
        given["logprobs"] = 0 if body.get("top_logprobs") is None else body["top_logprobs"]
    elif body.get("top_logprobs") is not None:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    messages = read_messages(body.get("messages"))
    try:
        return ChatRequest(_read_options(body, given), messages)
    except InputError as error:
        raise _in_chat_words(error, body) from None


def _max_tokens(body: Mapping[str, Any]) -> Any:
    old, new = body.get("max_tokens"), body.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise RequestError(
            "max_tokens and max_completion_tokens are two names of one limit, and they differ",
            "max_tokens",
        )
    return old if new is None else new


def _in_chat_words(error: InputError, body: Mapping[str, Any]) -> InputError:
    """Name the field as this client did: SamplingParams knows one name for each."""
    said = {"logprobs": "top_logprobs"}
    if body.get("max_completion_tokens") is not None:
        said["max_tokens"] = "max_completion_tokens"
    name = said.get(error.field or "")
    if name is None or name == error.field or not str(error).startswith(f"{error.field} "):
        return error
    code = getattr(error, "code", None)
    return RequestError(name + str(error).removeprefix(error.field or ""), name, code=code)


def _check_response_format(body: Mapping[str, Any]) -> None:
    wanted = fields.mapping(body, "response_format")
    if wanted is not None and wanted != {"type": "text"}:
        raise RequestError(
            "response_format is not supported but for {'type': 'text'}: output is not "
            "constrained to a grammar",
            "response_format",
            code="unsupported_parameter",
        )


def _read_prompts(value: Any) -> tuple[str | list[int], ...]:
    if value is None:
        raise RequestError("prompt is required", "prompt", code="missing_parameter")
    one = isinstance(value, str) or (fields.is_token_list(value) and value)
    prompts = [value] if one else value
    if not isinstance(prompts, list):
        raise fields.wrong_type("prompt", "a string, an array of strings or of token ids", value)
    if not 1 <= len(prompts) <= PROMPTS_MAX:
        raise RequestError(
            f"prompt must not be empty, and hold {PROMPTS_MAX} prompts at most; got "
            f"{len(prompts)} of them",
            "prompt",
            code=None if prompts else "empty_prompt",
        )
    for prompt in prompts:
        if not isinstance(prompt, str) and not fields.is_token_list(prompt):
            raise RequestError(
                "prompt must be a string, an array of strings, an array of token ids, or an "
                "array of such arrays",
                "prompt",
                code="invalid_type",
            )
        if not prompt:
            raise RequestError("prompt must not be empty", "prompt", code="empty_prompt")
    return tuple(prompts)


def _read_options(body: Mapping[str, Any], given: dict[str, Any]) -> Options:
    """``given`` are the sampling parameters that the two routes spell differently."""
    if body.get("model") is None:
        raise RequestError("model is required", "model", code="missing_parameter")
    stream = fields.boolean(body, "stream")
    _check_without_effect(body)
    return Options(
        model=fields.string(body, "model"),
        sampling=read_sampling(body, given),
        stream=stream,
        include_usage=_include_usage(body, stream),
        priority=fields.integer(body, "priority", 0, -PRIORITY_BOUND, PRIORITY_BOUND - 1),
        cache_salt=fields.string(body, "cache_salt"),
        fail_on_lost_kv=_fail_on_lost_kv(body),
    )


def _fail_on_lost_kv(body: Mapping[str, Any]) -> bool | None:
    policy = fields.string(body, "on_lost_kv")
    if policy not in ("", "recompute", "fail"):
        raise RequestError(
            f"on_lost_kv must be recompute or fail, got {policy[:40]!r}", "on_lost_kv"
        )
    return policy == "fail" if policy else None


def _check_without_effect(body: Mapping[str, Any]) -> None:
    """Fields that the API defines as having no effect on the output; still, they must be right."""
    for name in _WITHOUT_EFFECT:
        fields.string(body, name)
    metadata = fields.mapping(body, "metadata")
    for key in metadata or ():
        fields.string(metadata or {}, key, most=512, where="metadata.")
    if fields.boolean(body, "store"):
        raise RequestError(
            "store is not supported: this server keeps no completions",
            "store",
            code="unsupported_parameter",
        )


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = fields.mapping(body, "stream_options")
    if options is None:
        return False
    if not stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")
    refused = {"include_obfuscation": "chunks are not padded"}
    if options.get("include_obfuscation") is False:
        refused, options = {}, {k: v for k, v in options.items() if k != "include_obfuscation"}
    fields.check_names(options, {"include_usage"}, refused, "stream_options.")
    return fields.boolean(options, "include_usage", where="stream_options.")


def read_sampling(body: Mapping[str, Any], given: Mapping[str, Any]) -> SamplingParams:
    """All sampling parameters of ``body`` but max_tokens and logprobs, which go by several names:
    those are in ``given``. Raises ``InputError``."""
    values = {**given, **{name: body[name] for name in _PLAIN if body.get(name) is not None}}
    for name, value in values.items():
        check = fields.check_number if name in _NUMBERS else fields.check_integer
        check(name, value)
    values["stop"] = _read_stop(body.get("stop"))
    values["ignore_eos"] = fields.boolean(body, "ignore_eos")
    values["stop_token_ids"] = _read_stop_tokens(body.get("stop_token_ids"))
    values["logit_bias"] = _read_logit_bias(fields.mapping(body, "logit_bias"))
    values["repetition"] = _read_repetition(fields.mapping(body, "repetition"))
    try:
        return SamplingParams(**values)
    except OverflowError:
        raise RequestError("a number in the request is too large") from None


def _read_stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise fields.wrong_type("stop", "a string or an array of strings", value)
    return tuple(value)


def _read_stop_tokens(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    if not fields.is_token_list(value):
        raise fields.wrong_type("stop_token_ids", "an array of integers", value)
    if len(value) > STOP_TOKENS_MAX:
        raise RequestError(
            f"stop_token_ids has {len(value)} tokens; {STOP_TOKENS_MAX} at most", "stop_token_ids"
        )
    return frozenset(value)


def _read_logit_bias(value: Mapping[str, Any] | None) -> dict[int, Any]:
    if not value:
        return {}
    if len(value) > LOGIT_BIAS_MAX:
        raise RequestError(
            f"logit_bias has {len(value)} tokens; {LOGIT_BIAS_MAX} at most", "logit_bias"
        )
    biases: dict[int, Any] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise RequestError(
                f"logit_bias has the key {key[:40]!r}, which is no token id", "logit_bias"
            )
        if int(key) in biases:
            raise RequestError(f"logit_bias names token {int(key)} twice", "logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise fields.wrong_type("logit_bias", "an object of numbers", bias)
        biases[int(key)] = bias
    return biases


def _read_repetition(value: Mapping[str, Any] | None) -> RepetitionStop | None:
    if value is None:
        return None
    known = ("max_pattern_size", "min_count")
    fields.check_names(value, known, where="repetition.")
    for name in known:
        if value.get(name) is None:
            raise RequestError(
                f"repetition.{name} is required", f"repetition.{name}", code="missing_parameter"
            )
        fields.check_integer(f"repetition.{name}", value[name])
    try:
        return RepetitionStop(**value)
    except InputError as error:
        raise RequestError(f"repetition.{error}", f"repetition.{error.field}") from None
