"""A GGUF file as configuration and weights: its names and layouts turned into Hugging Face's.

The converter that writes GGUF files reorders the rows of queries and keys of the ``llama`` and
``smollm3`` architectures, so that the two halves a rotation pairs lie side by side
(x0, x32, x1, x33, ...). ``_halves_apart`` undoes it; other architectures keep Hugging Face's order.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from ebbtide.errors import InputError
from ebbtide.models.config import ModelConfig, RopeConfig
from ebbtide.models.dequantize import dequantize
from ebbtide.models.gemma import as_gemma3, every_nth_full
from ebbtide.models.gguf_file import GGUFFile, TensorInfo
from ebbtide.models.packed import Quantized, can_stay_packed
from ebbtide.models.rope import rope_config, with_factors
from ebbtide.models.weights import (
    check_names,
    check_shape,
    check_sizes,
    is_norm,
    require_architecture,
    require_layers,
    weight_shapes,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3", "gemma3")
INTERLEAVED = ("llama", "smollm3")
NO_ROPE_INTERVAL = 4  # SmolLM3 rotates in all layers but every fourth; the file does not say so
GEMMA3_PERIOD = 6  # of Gemma 3's layers, every sixth sees everything, where the file does not say
GEMMA3_27B_LAYERS = (
    62  # the one size that divides scores by another number than its head size's root
)
ROPE_FACTORS = "rope_freqs.weight"
EMBEDDING = "model.embed_tokens.weight"
MAX_READERS = 4

_TOP = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def read_config(file: GGUFFile) -> ModelConfig:
    """The configuration that the file's metadata and tensor names describe."""
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise InputError(
            f"{file.path} is one of {file.metadata['split.count']} parts; join them first "
            "(llama-gguf-split --merge)"
        )
    architecture = require_architecture(
        file.metadata.get("general.architecture"), file.path, ARCHITECTURES
    )
    keys = _Keys(file, architecture)
    if keys.integer("expert_count", 0):
        raise InputError(f"{file.path} is a mixture of experts; only dense models are supported")
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    layers = require_layers(keys.integer("block_count"), file.path)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise InputError(f"{file.path} lacks token_embd.weight, the embedding of its tokens")
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(name, head_dim) != head_dim:
            raise InputError(
                f"{file.path}: {architecture}.{name} is {keys.integer(name)} and heads have "
                f"{head_dim} values; only models where the two are equal are supported"
            )
    config = ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        max_length=keys.integer("context_length"),
        rope=_rope(file, keys, head_dim),
        windows=_windows(keys, layers),
        rope_layers=tuple(
            architecture != "smollm3" or (layer + 1) % NO_ROPE_INTERVAL != 0
            for layer in range(layers)
        ),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tied_embeddings="output.weight" not in file.tensors,
    )
    if architecture == "gemma3":
        config = _gemma3(config, keys)
    check_sizes(config, file.path)
    return config


class _Keys:
    """Typed access to ``<architecture>.<name>``."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.path = file.path
        self.metadata = file.metadata
        self.architecture = architecture

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise self.unusable(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise self.unusable(name, value)
        return float(value)

    def get(self, name: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}")

    def _value(self, name: str, default: float | None) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is None:
            raise InputError(
                f"{self.path} lacks {self.architecture}.{name} in its metadata; convert it again"
            )
        return default

    def unusable(
        self, name: str, value: object, needed: str = "one number for all layers"
    ) -> InputError:
        return InputError(
            f"{self.path}: {self.architecture}.{name} is {value!r}; {needed} is needed"
        )


def _windows(keys: _Keys, layers: int) -> tuple[int | None, ...]:
    window = keys.integer("attention.sliding_window", 0)
    if window and keys.architecture == "gemma3":
        pattern = keys.get("attention.sliding_window_pattern")
        if not isinstance(pattern, list):
            period = keys.integer("attention.sliding_window_pattern", GEMMA3_PERIOD)
            return every_nth_full(window, layers, max(period, 1))
        if len(pattern) != layers or not all(isinstance(slides, bool) for slides in pattern):
            raise keys.unusable("attention.sliding_window_pattern", pattern, "one flag per layer")
        return tuple(window if slides else None for slides in pattern)
    if window and keys.architecture != "llama":
        raise InputError(
            f"{keys.path} has a sliding window of {window} positions and does not say in which "
            f"layers; use the Hugging Face directory of this {keys.architecture} model"
        )
    return (window or None,) * layers


def _gemma3(config: ModelConfig, keys: _Keys) -> ModelConfig:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if keys.number(name, 0.0):
            raise InputError(f"{keys.path}: gemma3.{name} is set; this is not supported")
    base = keys.number("rope.freq_base_swa", 10_000.0)
    head_dim = config.head_dim
    large = config.num_layers == GEMMA3_27B_LAYERS
    scalar = config.hidden_size / max(config.num_heads, 1) if large else float(head_dim)
    return as_gemma3(config, rope_config(base, head_dim, config.max_length), scalar, keys.path)


def _rope(file: GGUFFile, keys: _Keys, head_dim: int) -> RopeConfig:
    method = keys.get("rope.scaling.type") or "none"
    scaling = {
        "rope_type": "default" if method == "none" else method,
        "factor": keys.number("rope.scaling.factor", 1.0),
        "original_max_position_embeddings": keys.integer(
            "rope.scaling.original_context_length", keys.integer("context_length")
        ),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
    }
    base = keys.number("rope.freq_base", 10_000.0)
    rope = rope_config(base, head_dim, keys.integer("context_length"), scaling)
    extra_scale = keys.number("rope.scaling.attn_factor", 1.0)
    if extra_scale != 1.0:
        rope = RopeConfig(rope.inverse_frequencies, rope.attention_scale * extra_scale)
    if ROPE_FACTORS in file.tensors:
        info = file.tensors[ROPE_FACTORS]
        check_shape(ROPE_FACTORS, info.shape, (head_dim // 2,), file.path)
        with file.open() as descriptor:
            raw = file.read(descriptor, info)
        rope = with_factors(rope, dequantize(raw, info.type, info.shape, torch.float32))
    return rope


def read_weights(
    file: GGUFFile,
    config: ModelConfig,
    dtype: torch.dtype,
    packed: bool,
    progress: Callable[[float], None],
) -> tuple[dict[str, torch.Tensor], dict[str, Quantized], bytes]:
    """The weights under Hugging Face names, and the identity (32 bytes).

    Weights are in ``dtype`` (norms in float32); packed: or as the file has them, where their format can be
    used so. The embedding is both. Each tensor is read once: the bytes that are hashed are the bytes that
    become the weight.
    """
    expected = weight_shapes(config)
    modules = _GEMMA3_LAYER if config.architecture == "gemma3" else _LAYER
    infos = {_hugging_face_name(name, modules): info for name, info in file.tensors.items()}
    infos.pop(ROPE_FACTORS, None)
    check_names(expected, set(infos), file.path)
    for name, info in infos.items():
        check_shape(info.name, info.shape, expected[name], file.path)
    digest = hashlib.blake2b(file.header, digest_size=32)
    total = sum(info.size for info in infos.values()) or 1
    done = 0
    weights: dict[str, torch.Tensor] = {}
    quantized: dict[str, Quantized] = {}
    readers = min(MAX_READERS, os.cpu_count() or 1)
    with file.open() as descriptor, ThreadPoolExecutor(readers) as pool:
        read = partial(_read_weight, file, descriptor, config=config, dtype=dtype, packed=packed)
        jobs = [pool.submit(read, info, name) for name, info in infos.items()]
        try:
            for (name, info), job in zip(infos.items(), jobs, strict=True):
                wide, as_stored, tensor_digest = job.result()
                if wide is not None:
                    weights[name] = wide
                if as_stored is not None:
                    quantized[name] = as_stored
                digest.update(tensor_digest)
                done += info.size
                progress(done / total)
        finally:
            pool.shutdown(cancel_futures=True)
        if ROPE_FACTORS in file.tensors:
            digest.update(file.read(descriptor, file.tensors[ROPE_FACTORS]).data)
    return weights, quantized, digest.digest()


def _read_weight(
    file: GGUFFile,
    descriptor: int,
    info: TensorInfo,
    name: str,
    config: ModelConfig,
    dtype: torch.dtype,
    packed: bool,
) -> tuple[torch.Tensor | None, Quantized | None, bytes]:
    raw = file.read(descriptor, info)
    digest = hashlib.blake2b(raw.data, digest_size=32).digest()
    if config.architecture in INTERLEAVED and (".attn_q." in info.name or ".attn_k." in info.name):
        raw = _halves_apart(raw, info.shape[0], config.head_dim)
    as_stored = None
    if packed and can_stay_packed(info.type, info.shape):
        as_stored = Quantized(raw, info.type, (info.shape[0], info.shape[1]))
        if name != EMBEDDING:
            return None, as_stored, digest
    kept = torch.float32 if is_norm(name) else dtype
    return dequantize(raw, info.type, info.shape, kept), as_stored, digest


def _halves_apart(raw: np.ndarray, rows: int, head_dim: int) -> np.ndarray:
    """Rows of each head from (x0, x32, x1, x33, ...) to (x0, x1, ..., x32, x33, ...). Done on the
    stored bytes: every format packs each row for itself. A bias is one value per row."""
    pairs = raw.reshape(rows // head_dim, head_dim // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)


def _hugging_face_name(name: str, modules: Mapping[str, str]) -> str:
    """Names that are not known stay as they are, and are refused with the unused weights."""
    if name in _TOP:
        return _TOP[name]
    prefix, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    module, _, kind = part.partition(".")
    if prefix == "blk" and module in modules and kind in ("weight", "bias"):
        return f"model.layers.{layer}.{modules[module]}.{kind}"
    return name
