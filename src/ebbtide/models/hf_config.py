"""Hugging Face's ``config.json`` as our own configuration.

A key that a file leaves out has the value that transformers gives it for that architecture; the
differences between architectures are in ``_DEFAULTS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbtide.errors import InputError
from ebbtide.models.config import ModelConfig
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
}
_BIAS_FROM_CONFIG = ("llama", "qwen3", "smollm3")


def model_config(raw: Json, path: Path) -> ModelConfig:
    """``raw``: the content of ``config.json`` at ``path``. Raises ``InputError`` for what cannot run."""
    architecture = require_architecture(raw.get("model_type"), path)
    keys = _Keys({**_COMMON, **_DEFAULTS[architecture], **raw}, path)
    _refuse_unsupported(keys)
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    layers = require_layers(keys.integer("num_hidden_layers"), path)
    head_dim = keys.integer("head_dim", hidden // heads)
    bias = architecture in _BIAS_FROM_CONFIG and keys.flag("attention_bias")
    max_length = keys.integer("max_position_embeddings")
    rope_layers = _rope_layers(keys, architecture, layers)
    base, scaling = _rope_parameters(keys)
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
        rope=rope_config(base, head_dim, max_length, scaling),
        windows=_windows(keys, architecture, layers, rope_layers),
        rope_layers=rope_layers,
        qkv_bias=bias or architecture == "qwen2",
        output_bias=bias,
        qk_norm=architecture == "qwen3",
        tied_embeddings=keys.flag("tie_word_embeddings"),
    )
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


def _refuse_unsupported(keys: _Keys) -> None:
    if keys.get("quantization_config"):
        quantization = keys.get("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise InputError(
            f"{keys.path}: the weights are quantised with {method!r}, which is not supported; use a "
            "GGUF file, or weights in bfloat16, float16 or float32"
        )
    if keys.get("hidden_act") != "silu":
        raise InputError(
            f"{keys.path}: hidden_act is {keys.get('hidden_act')!r}; only silu is supported"
        )
    if keys.flag("mlp_bias"):
        raise InputError(f"{keys.path}: mlp_bias is true; biases in the MLP are not supported")


def _rope_parameters(keys: _Keys) -> tuple[float, Json]:
    """theta and the scaling, from where older and newer files keep them."""
    scaling = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise InputError(f"{keys.path}: the rope parameters are {scaling!r}, not an object")
    base = scaling.get("rope_theta", keys.get("rope_theta"))
    base = 10_000.0 if base is None else base
    if isinstance(base, bool) or not isinstance(base, int | float) or base <= 1:
        raise InputError(f"{keys.path}: rope_theta must be a number above 1, and is {base!r}")
    return float(base), scaling


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
    if not keys.flag("use_sliding_window") or keys.get("sliding_window") is None:
        return (None,) * layers
    window = keys.integer("sliding_window")
    if architecture == "llama":
        return (None,) * layers
    if architecture == "mistral":
        return (window,) * layers
    if keys.get("layer_types") is not None:
        kinds = _per_layer(keys, "layer_types", layers)
        if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
            raise InputError(f"{keys.path}: layers of type {unknown[0]!r} are not supported")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if architecture == "smollm3":
        return tuple(None if rotates else window for rotates in rope_layers)
    first = keys.get("max_window_layers")
    return tuple(window if layer >= first else None for layer in range(layers))


def _per_layer(keys: _Keys, name: str, layers: int) -> list[Any]:
    values = keys.get(name)
    if not isinstance(values, list) or len(values) < layers:
        raise InputError(f"{keys.path}: {name} must list all {layers} layers, and is {values!r}")
    return values[:layers]
