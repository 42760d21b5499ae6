"""The Llama family, inference only: one forward pass over a ragged batch with paged KV.

Llama, Mistral (sliding windows), Qwen2 (biased projections), Qwen3 (normalised queries and keys),
SmolLM (layers without rotation) and Gemma 3 (a window and a rotation of its own in most layers, norms
on both sides of each half, GeGLU, scaled embeddings; arXiv 2503.19786, section 2) differ in what
``ModelConfig`` says, not in code.

The architecture is that of Touvron et al. 2023 (LLaMA): RMSNorm (Zhang and Sennrich 2019) before
each half, rotary positions (Su et al. 2021) in the half-split order, grouped-query attention
(Ainslie et al. 2023), SwiGLU (Shazeer 2020).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ebbtide.core.plan import Row
from ebbtide.models.batch import Batch, plan_batch
from ebbtide.models.config import ModelConfig
from ebbtide.models.kernels import Kernels, Norm, Rotation, TorchKernels
from ebbtide.models.kv import KVLayout, KVMemory
from ebbtide.models.linear import GatedLinear, Linear
from ebbtide.models.packed import PackedProduct, Quantized

# A small model's weights are kept twice on a CPU that computes in bfloat16, unless they can be packed or the
# kernels have another way with few rows: the second time in the form that is fastest for these with PyTorch
# alone, whose activations are then float32 (see ``Linear``).
SMALL_MODEL_WEIGHTS = 1 << 29
SMALL_STEP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, and where its KV lives: its group, and its slot in the group's blocks."""

    group: int
    slot: int
    rope: int | None  # of the model's rotations; None: none
    input_norm: Norm
    qkv: Linear
    qk_norm: Norm | None  # of every query head, then every key head
    output: Linear
    output_norm: Norm | None  # of what is added to the residual stream
    mlp_norm: Norm
    gate_up: GatedLinear
    down: Linear
    down_norm: Norm | None

    def add_attention(self, attended: Tensor, x: Tensor) -> Tensor:
        """x with this layer's attention added. attended: [tokens, heads * head_dim]."""
        if self.output_norm is None:
            return self.output.add(attended, x)
        return self.output_norm(self.output(attended)).add_(x)

    def add_mlp(self, x: Tensor) -> Tensor:
        """x with this layer's MLP added."""
        inner = self.gate_up(self.mlp_norm(x))
        if self.down_norm is None:
            return self.down.add(inner, x)
        return self.down_norm(self.down(inner)).add_(x)


class LlamaModel:
    """Weights of one model on one device, in the dtype of ``layout`` or a wider one.

    weights: Hugging Face names, any dtype; a name that is missing raises ``KeyError``. Rows of the
    query and key projections are in the half-split rotary order. quantized: weights as the file has
    them. Projections all of whose parts are there stay packed; for steps of few tokens only where they are
    also_wide and the kernels want both forms. dtype: of the other weights (None: the layout's). kernels:
    made for this model and layout (None: PyTorch's).
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        layout: KVLayout,
        device: torch.device | str = "cpu",
        quantized: Mapping[str, Quantized] | None = None,
        dtype: torch.dtype | None = None,
        kernels: Kernels | None = None,
        also_wide: bool = True,
    ) -> None:
        assert config.qk_norm or config.query_scale == 1, "nothing would scale the queries"
        self.config = config
        self.layout = layout
        self.device = torch.device(device)
        self.dtype = dtype or layout.dtype
        self.kernels = kernels or TorchKernels(layout, self.device)
        self._weights = weights
        self._quantized = quantized or {}
        self._also_wide = also_wide
        shapes = {name: each.shape for name, each in (*weights.items(), *self._quantized.items())}
        total = sum(math.prod(shape) for shape in shapes.values())
        self._keeps_half = (
            total <= SMALL_MODEL_WEIGHTS
            and self.kernels.takes_float32
            and not any(self.kernels.packs({each.kind}) for each in self._quantized.values())
        )
        self._embedding = self._get("model.embed_tokens.weight")
        self._layers = [self._build_layer(i) for i in range(config.num_layers)]
        self._norm = self._get_norm("model.norm.weight")
        head = "model.embed_tokens" if config.tied_embeddings else "lm_head"
        self._head = self._linear(head)
        scale = torch.tensor(config.embedding_scale, dtype=self.dtype, device=self.device)
        self._embedding_scale = None if config.embedding_scale == 1 else scale
        self._frequencies = [
            torch.tensor(rope.inverse_frequencies, dtype=torch.float32, device=self.device)
            for rope in config.ropes
        ]
        products = [p for x in self._layers for p in (x.qkv, x.output, x.gate_up, x.down)]
        takes_float32 = all(product.takes_float32 for product in [*products, self._head])
        self._float32_tokens_max = SMALL_STEP_TOKENS if takes_float32 else 0
        del self._weights, self._quantized

    def _pack(self, *names: str) -> PackedProduct | None:
        """These weights, one below the other, packed where all of them can be."""
        return (
            self.kernels.pack(self._parts(*names), self._only_packed(*names))
            if self._packs(*names)
            else None
        )

    def _parts(self, *names: str) -> list[Quantized]:
        return [self._quantized[name] for name in names if name in self._quantized]

    def _packs(self, *names: str) -> bool:
        parts = self._parts(*names)
        return len(parts) == len(names) and self.kernels.packs({part.kind for part in parts})

    def _only_packed(self, *names: str) -> bool:
        return self._packs(*names) and (
            self.kernels.packs_alone
            or not (self._also_wide or any(name in self._weights for name in names))
        )

    def _linear(self, *names: str, bias: bool = False) -> Linear:
        """The product with these projections, one below the other."""
        weights = [f"{name}.weight" for name in names]
        biases = self._get(*(f"{name}.bias" for name in names)) if bias else None
        wide = None if self._only_packed(*weights) else self._get(*weights)
        return Linear(wide, biases, self._keeps_half, self._pack(*weights))

    def _get(self, *names: str) -> Tensor:
        """These weights, one below the other, as they are used."""
        parts = [
            self._weights[name].to(self.device, self.dtype)
            if name in self._weights
            else self._quantized[name].dequantize(self.dtype)
            for name in names
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _get_norm(self, name: str) -> Norm:
        return self.kernels.norm(self._weights[name].to(self.device), self.config.rms_eps)

    def _get_qk_norm(self, attention: str) -> Norm:
        """Of every query head, then every key head. A factor on queries, too, is its weights' part:
        what follows is linear."""
        config = self.config
        query, key = (
            self._weights[f"{attention}{name}_norm.weight"].to(self.device, torch.float32)
            for name in "qk"
        )
        query = query * config.query_scale
        heads = [query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)]
        return self.kernels.norm(torch.cat(heads), config.rms_eps)

    def _build_layer(self, number: int) -> _Layer:
        config = self.config
        prefix = f"model.layers.{number}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        gate, up = f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"
        group, slot = self.layout.places[number]
        post = config.post_norms
        after = f"{prefix}post_attention_layernorm.weight"  # of the attention; else: before the MLP
        return _Layer(
            group=group,
            slot=slot,
            rope=config.rope_of(number),
            input_norm=self._get_norm(f"{prefix}input_layernorm.weight"),
            qkv=self._linear(*(f"{attention}{x}_proj" for x in "qkv"), bias=config.qkv_bias),
            qk_norm=self._get_qk_norm(attention) if config.qk_norm else None,
            output=self._linear(f"{attention}o_proj", bias=config.output_bias),
            output_norm=self._get_norm(after) if post else None,
            mlp_norm=self._get_norm(f"{prefix}pre_feedforward_layernorm.weight" if post else after),
            gate_up=GatedLinear(
                None if self._only_packed(gate, up) else (self._get(gate), self._get(up)),
                self._keeps_half,
                config.activation,
                self._pack(gate, up),
            ),
            down=self._linear(f"{mlp}down_proj"),
            down_norm=(
                self._get_norm(f"{prefix}post_feedforward_layernorm.weight") if post else None
            ),
        )

    def plan(self, rows: Sequence[Row], sampled: dict[int, int]) -> Batch:
        """A step's tensors. sampled: row number -> token that the preceding step sampled, for rows that
        feed one more than is known."""
        return plan_batch(rows, sampled, self.layout, self.device, self.kernels)

    def forward(self, batch: Batch, kv: KVMemory) -> Tensor:
        """Run a step: KV of all its tokens is written. Returns logits [rows that sample, vocab]."""
        kv.clear(batch.started)
        x = embedding(batch.tokens, self._embedding)
        if self._embedding_scale is not None:
            x.mul_(self._embedding_scale)
        if len(x) <= self._float32_tokens_max:
            x = x.to(torch.float32)
        rotations = self._rotations(batch.positions, x.dtype)
        attended = x.new_zeros(len(x), self.config.num_heads * self.config.head_dim)
        for layer in self._layers:
            qkv = layer.qkv(layer.input_norm(x))
            if layer.qk_norm is not None:
                dim = self.config.head_dim
                both = qkv[:, : -self.config.num_kv_heads * dim].view(len(qkv), -1, dim)
                layer.qk_norm.apply_(both)
            rotation = None if layer.rope is None else rotations[layer.rope]
            plan = batch.groups[layer.group]
            self.kernels.attend(qkv, rotation, plan, layer.slot, kv, attended)
            if layer is self._layers[-1]:  # all KV is written: only what is sampled from goes on
                x, attended = x.index_select(0, batch.last), attended.index_select(0, batch.last)
                if len(x) == 0:
                    return x.new_empty(0, self.config.vocab_size)
            x = layer.add_mlp(layer.add_attention(attended, x))
        return self._head(self._norm(x))

    def _rotations(self, positions: Tensor, dtype: torch.dtype) -> list[Rotation]:
        """For each of the model's rotations, cos and sin of every token's angles."""
        wide = positions.to(torch.float32)
        return [
            self.kernels.rotation(torch.outer(wide, frequencies), rope.attention_scale, dtype)
            for rope, frequencies in zip(self.config.ropes, self._frequencies, strict=True)
        ]
