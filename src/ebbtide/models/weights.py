"""Which weights a configuration needs, under which names and in which shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from ebbtide.errors import InputError
from ebbtide.models.config import ModelConfig

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3")
MAX_NAMED = 3
MAX_LAYERS = 1024


def require_architecture(name: object, path: Path, known: tuple[str, ...] = ARCHITECTURES) -> str:
    """``name`` where it can be run; else ``InputError`` with the list of those that can."""
    if name in known:
        return str(name)
    raise InputError(
        f"{path} holds a model of architecture {name!r}; supported are: {', '.join(known)}"
    )


def require_layers(count: int, path: Path) -> int:
    """``count`` where it can be a number of layers."""
    if not 1 <= count <= MAX_LAYERS:
        raise InputError(f"{path} has {count} layers; from 1 to {MAX_LAYERS} are supported")
    return count


def check_sizes(config: ModelConfig, path: Path) -> None:
    """Refuse sizes with which no forward pass is possible."""
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "max_length": config.max_length,
    }
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{path}: {name} is {size}; it must be at least 1")
    if config.num_heads % config.num_kv_heads:
        raise InputError(
            f"{path}: {config.num_heads} query heads cannot share {config.num_kv_heads} key heads "
            "evenly"
        )
    frequencies = [f for rope in config.ropes for f in rope.inverse_frequencies]
    if not all(map(math.isfinite, frequencies)):
        raise InputError(f"{path}: its rope parameters give frequencies that are not finite")


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape, of every weight the forward pass reads."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        layer["self_attn.q_proj.bias"] = (queries,)
        layer["self_attn.k_proj.bias"] = (keys,)
        layer["self_attn.v_proj.bias"] = (keys,)
    if config.output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = (config.head_dim,)
        layer["self_attn.k_norm.weight"] = (config.head_dim,)
    if config.post_norms:
        layer["pre_feedforward_layernorm.weight"] = (hidden,)
        layer["post_feedforward_layernorm.weight"] = (hidden,)
    for number in range(config.num_layers):
        for name, shape in layer.items():
            shapes[f"model.layers.{number}.{name}"] = shape
    return shapes


def check_names(expected: Mapping[str, object], found: set[str], path: Path) -> None:
    """Refuse a file that lacks a weight, or has one that the forward pass would silently ignore."""
    if missing := sorted(expected.keys() - found):
        raise InputError(
            f"{path} lacks {len(missing)} of the {len(expected)} weights its configuration needs: "
            f"{_some(missing)}; the file or its configuration is not complete"
        )
    if extra := sorted(found - expected.keys()):
        raise InputError(
            f"{path} has {len(extra)} weights that its architecture does not use: {_some(extra)}; "
            "running it without them would give wrong answers"
        )


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], path: Path) -> None:
    """Refuse a weight whose shape is not the one that the configuration implies."""
    if shape != expected:
        raise InputError(
            f"{path}: {name} has shape {list(shape)}, and its configuration needs {list(expected)}"
        )


def is_norm(name: str) -> bool:
    """Whether a weight, by its Hugging Face name, is a norm's: these stay in float32."""
    return name.endswith("norm.weight")


def as_floating(name: str, tensor: torch.Tensor, dtype: torch.dtype, path: Path) -> torch.Tensor:
    """A copy in ``dtype``; refuses integers and 8-bit floats, whose scales we would not know."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise InputError(
            f"{path}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}; weights must "
            "be float16, bfloat16, float32 or float64"
        )
    return tensor.to(dtype, copy=True)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    rest = len(names) - MAX_NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown
