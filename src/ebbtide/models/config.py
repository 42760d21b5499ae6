"""What a model is, as plain values: filled from a GGUF file or from a Hugging Face ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. ``inverse_frequencies`` (head_dim / 2 values) has any scaling already in it;
    ``attention_scale`` multiplies cos and sin (YaRN; 1.0 elsewhere)."""

    inverse_frequencies: tuple[float, ...]
    attention_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer of the Llama family.

    windows: per layer, the sliding window in positions, or None for full attention.
    rope_layers: per layer, whether it rotates queries and keys (SmolLM3 skips some).
    """

    architecture: str  # "llama", "mistral", "qwen2", "qwen3", "smollm3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_length: int  # positions the model was trained for
    rope: RopeConfig
    windows: tuple[int | None, ...]
    rope_layers: tuple[bool, ...]
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    qk_norm: bool
    tied_embeddings: bool
