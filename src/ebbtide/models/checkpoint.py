"""A model as read from disk: configuration, weights, tokenizer, defaults. Whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ebbtide.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from ebbtide.models.packed import Quantized
    from ebbtide.models.tokenizer import Tokenizer


class Form(Enum):
    """In which form weights are used: dequantised, as the file has them where products can use that, or
    both, for each step what is faster."""

    WIDE = "wide"
    PACKED = "packed"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """weights: Hugging Face names (``model.layers.0.self_attn.q_proj.weight``), rows of queries and
    keys in the half-split rotary order. Those of norms are what the norm multiplies by (Gemma stores
    that less 1), and are always in float32. generation: the model's own sampling defaults, keyed like
    ``SamplingParams``. identity: 32 bytes, a digest of the stored weights and the configuration: the
    same in every process and on every machine, whatever dtype the weights were loaded in. form: how to use
    them. quantized: but for ``Form.WIDE``, those that can be used as the file has them. They are not in
    ``weights``, but for the embedding, whose rows are looked up.
    """

    name: str
    config: ModelConfig
    weights: Mapping[str, torch.Tensor]
    tokenizer: Tokenizer
    generation: Mapping[str, Any]
    identity: bytes
    quantized: Mapping[str, Quantized] = field(default_factory=dict)
    form: Form = Form.WIDE
