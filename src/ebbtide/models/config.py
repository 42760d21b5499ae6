"""What a model is, as plain values: filled from a GGUF file or from a Hugging Face ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. ``inverse_frequencies`` (head_dim / 2 values) has any scaling already in it;
    ``attention_scale`` multiplies cos and sin (YaRN; 1.0 elsewhere)."""

    inverse_frequencies: tuple[float, ...]
    attention_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer of the Llama family. The defaults are what all but Gemma 3 do.

    windows: per layer, the sliding window in positions, or None for full attention.
    rope_layers: per layer, whether it rotates queries and keys (SmolLM3 skips some).
    window_rope: the rotation in layers that have a window, where it is another than ``rope``.
    post_norms: attention and MLP are normalised before they are added, as well as before they start.
    embedding_scale: what embeddings are multiplied by, rounded to the model's dtype.
    query_scale: what queries are multiplied by, beside 1 / sqrt(head_dim); needs ``qk_norm``.
    """

    architecture: str  # "llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3"
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
    window_rope: RopeConfig | None = None
    post_norms: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    query_scale: float = 1.0

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different rotations of this model, ``rope`` first."""
        return (self.rope,) if self.window_rope is None else (self.rope, self.window_rope)

    def rope_of(self, layer: int) -> int | None:
        """Which of ``ropes`` this layer rotates with; None: it does not."""
        if not self.rope_layers[layer]:
            return None
        return int(self.window_rope is not None and self.windows[layer] is not None)
