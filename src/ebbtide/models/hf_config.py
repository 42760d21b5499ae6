"""Hugging Face's ``config.json`` as our own configuration.

A key that a file leaves out has the value that transformers gives it for that architecture; the
differences between architectures are in ``_DEFAULTS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbtide.errors import InputError
from ebbtide.models.config import ModelConfig, RopeConfig
from ebbtide.models.gemma import as_gemma3, every_nth_full
from ebbtide.models.rope import rope_config
from ebbtide.models.weights import check_sizes, require_architecture, require_layers

Json = Mapping[str, Any]

_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "no_rope_layer_interval": 4,
    "rope_theta": 10_000.0,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "use_sliding_window": True,
        "max_window_layers": 0,
        "num_key_value_heads": 8,
    },
    "qwen2": {"max_position_embeddings": 32_768, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32_768, "sliding_window": 4096, "head_dim": 128},
    "smollm3": {
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
    },
    "gemma3": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
}
_BIAS_FROM_CONFIG = ("llama", "qwen3", "smollm3", "gemma3")
_SAME = {"gemma3_text": "gemma3"}  # the language model of one that also sees images, on its own
_FULL, _SLIDING = "full_attention", "sliding_attention"


def text_part(raw: Json) -> Json:
    """``raw`` itself, or what it says of the language model of a Gemma 3 that also sees images."""
    inner = raw.get("text_config")
    if raw.get("model_type") != "gemma3" or not isinstance(inner, Mapping):
        return raw
    outer = ("model_type", "quantization_config", "tie_word_embeddings")
    return {**{name: raw[name] for name in outer if name in raw}, **inner}


def model_config(raw: Json, path: Path) -> ModelConfig:
    """``raw``: the content of ``config.json`` at ``path``. Raises ``InputError`` for what cannot run."""
    raw = text_part(raw)
    kind = raw.get("model_type")
    architecture = require_architecture(_SAME.get(str(kind), kind), path)
    keys = _Keys({**_COMMON, **_DEFAULTS[architecture], **raw}, path)
    _refuse_unsupported(keys, "gelu_pytorch_tanh" if architecture == "gemma3" else "silu")
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    layers = require_layers(keys.integer("num_hidden_layers"), path)
    head_dim = keys.integer("head_dim", hidden // heads)
    bias = architecture in _BIAS_FROM_CONFIG and keys.flag("attention_bias")
    max_length = keys.integer("max_position_embeddings")
    rope_layers = _rope_layers(keys, architecture, layers)
    windows = _windows(keys, architecture, layers, rope_layers)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rms_eps=keys.number("rms_norm_eps"),
        max_length=max_length,
        rope=_rope(keys, head_dim, max_length, _FULL, "rope_theta"),
        windows=windows,
        rope_layers=rope_layers,
        qkv_bias=bias or architecture == "qwen2",
        output_bias=bias,
        qk_norm=architecture in ("qwen3", "gemma3"),
        tied_embeddings=keys.flag("tie_word_embeddings"),
    )
    if architecture == "gemma3":
        local = _rope(keys, head_dim, max_length, _SLIDING, "rope_local_base_freq")
        config = as_gemma3(config, local, keys.number("query_pre_attn_scalar"), path)
    check_sizes(config, path)
    return config


class _Keys:
    """Typed access to the configuration's keys; ``null`` reads as absent."""

    def __init__(self, values: Json, path: Path) -> None:
        self.values, self.path = values, path

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{self.path}: {name} must be a positive integer, and is {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise InputError(f"{self.path}: {name} must be a number, and is {value!r}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise InputError(f"{self.path}: {name} must be true or false, and is {value!r}")
        return value


def _refuse_unsupported(keys: _Keys, activation: str) -> None:
    if keys.get("quantization_config"):
        quantization = keys.get("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise InputError(
            f"{keys.path}: the weights are quantised with {method!r}, which is not supported; use a "
            "GGUF file, or weights in bfloat16, float16 or float32"
        )
    name = "hidden_act" if activation == "silu" else "hidden_activation"
    if keys.get(name) != activation:
        raise InputError(
            f"{keys.path}: {name} is {keys.get(name)!r}; only {activation} is supported"
        )
    if keys.flag("mlp_bias"):
        raise InputError(f"{keys.path}: mlp_bias is true; biases in the MLP are not supported")
    for name in (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    ):
        if keys.get(name):
            raise InputError(f"{keys.path}: {name} is {keys.get(name)!r}; this is not supported")


def _rope(keys: _Keys, head_dim: int, max_length: int, kind: str, theta: str) -> RopeConfig:
    """The rotation of layers of this kind, from where older and newer files keep its base and scaling.
    ``theta``: the base's name in older ones, which scale full attention only."""
    given = keys.get("rope_parameters")
    if isinstance(given, Mapping) and ({_FULL, _SLIDING} & given.keys()):
        given = given.get(kind)
    elif kind == _SLIDING:
        given = None
    scaling = given or (keys.get("rope_scaling") if kind == _FULL else None) or {}
    if not isinstance(scaling, Mapping):
        raise InputError(f"{keys.path}: the rope parameters are {scaling!r}, not an object")
    base = scaling.get("rope_theta", keys.get(theta))
    if isinstance(base, bool) or not isinstance(base, int | float) or base <= 1:
        raise InputError(f"{keys.path}: {theta} must be a number above 1, and is {base!r}")
    return rope_config(float(base), head_dim, max_length, scaling)


def _rope_layers(keys: _Keys, architecture: str, layers: int) -> tuple[bool, ...]:
    if architecture != "smollm3":
        return (True,) * layers
    given = keys.get("no_rope_layers")  # named for the exceptions, but 1 means "rotates"
    if given is None:
        interval = keys.integer("no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    return tuple(map(bool, _per_layer(keys, "no_rope_layers", layers)))


def _windows(
    keys: _Keys, architecture: str, layers: int, rope_layers: tuple[bool, ...]
) -> tuple[int | None, ...]:
    optional = architecture != "gemma3"  # its sliding layers differ from others not only in that
    if optional and (not keys.flag("use_sliding_window") or keys.get("sliding_window") is None):
        return (None,) * layers
    window = keys.integer("sliding_window")
    if architecture == "llama":
        return (None,) * layers
    if architecture == "mistral":
        return (window,) * layers
    if keys.get("layer_types") is not None:
        kinds = _per_layer(keys, "layer_types", layers)
        if unknown := sorted(map(repr, {*map(str, kinds)} - {_FULL, _SLIDING})):
            raise InputError(f"{keys.path}: layers of type {unknown[0]} are not supported")
        return tuple(window if kind == _SLIDING else None for kind in kinds)
    if architecture == "gemma3":
        return every_nth_full(window, layers, keys.integer("sliding_window_pattern"))
    if architecture == "smollm3":
        return tuple(None if rotates else window for rotates in rope_layers)
    first = keys.get("max_window_layers")
    return tuple(window if layer >= first else None for layer in range(layers))


def _per_layer(keys: _Keys, name: str, layers: int) -> list[Any]:
    values = keys.get(name)
    if not isinstance(values, list) or len(values) < layers:
        raise InputError(f"{keys.path}: {name} must list all {layers} layers, and is {values!r}")
    return values[:layers]
