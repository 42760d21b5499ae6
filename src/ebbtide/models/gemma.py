"""What makes a configuration of the Llama family one of Gemma 3 (arXiv 2503.19786, section 2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ebbtide.errors import InputError
from ebbtide.models.config import ModelConfig, RopeConfig


def as_gemma3(
    config: ModelConfig, window_rope: RopeConfig, query_scalar: float, path: Path
) -> ModelConfig:
    """``config`` with what all Gemma 3 models do. query_scalar: scores are divided by its root."""
    if query_scalar <= 0:
        raise InputError(f"{path}: query_pre_attn_scalar must be above 0, and is {query_scalar}")
    return replace(
        config,
        window_rope=window_rope,
        post_norms=True,
        activation="gelu_tanh",
        embedding_scale=config.hidden_size**0.5,
        query_scale=(config.head_dim / query_scalar) ** 0.5,
    )


def every_nth_full(window: int, layers: int, period: int) -> tuple[int | None, ...]:
    """The windows of layers of which the last of every ``period`` sees everything."""
    return tuple(window if (layer + 1) % period else None for layer in range(layers))
