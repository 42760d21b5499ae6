"""The independent implementation that ours is compared with: transformers, with the same weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ebbtide.models.checkpoint import Checkpoint
from ebbtide.models.config import ModelConfig, RopeConfig


def transformers_model(checkpoint: Checkpoint, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The checkpoint as a transformers model. Exits for architectures other than Llama and Gemma 3."""
    config = checkpoint.config
    weights = dict(checkpoint.weights)
    if config.architecture == "llama":
        model = transformers.LlamaForCausalLM(_llama(config))
    elif config.architecture == "gemma3":
        model = transformers.Gemma3ForCausalLM(_gemma3(config))
        for name in weights:
            if name.endswith("norm.weight"):
                weights[name] = weights[name] - 1  # its own norms add it again
    else:
        raise SystemExit(f"this script knows llama and gemma3, not {config.architecture}")
    model = model.to(dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model.eval()


def _common(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.tied_embeddings,
    }


def _llama(config: ModelConfig) -> transformers.LlamaConfig:
    if any(window is not None for window in config.windows):
        raise SystemExit("this script knows no Llama with sliding windows")
    return transformers.LlamaConfig(**_common(config), rope_parameters=_unscaled(config.rope))


def _gemma3(config: ModelConfig) -> transformers.Gemma3TextConfig:
    windows = {window for window in config.windows if window is not None}
    assert len(windows) == 1
    assert config.window_rope is not None
    return transformers.Gemma3TextConfig(
        **_common(config),
        sliding_window=windows.pop(),
        layer_types=[
            "full_attention" if window is None else "sliding_attention" for window in config.windows
        ],
        query_pre_attn_scalar=round(config.head_dim / config.query_scale**2),
        rope_parameters={
            "full_attention": _unscaled(config.rope),
            "sliding_attention": _unscaled(config.window_rope),
        },
    )


def _unscaled(rope: RopeConfig) -> dict[str, Any]:
    frequencies = rope.inverse_frequencies
    if frequencies[0] != 1 or rope.attention_scale != 1:
        raise SystemExit("this script knows no scaled rotary embeddings")
    theta = frequencies[1] ** -len(frequencies)
    return {"rope_type": "default", "rope_theta": theta}
