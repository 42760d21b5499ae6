"""Small model files, written with other people's writers: ``gguf`` and ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from tokenizers import decoders, models, pre_tokenizers

from ebbtide.models.config import RopeConfig

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>"]  # the last is an ordinary added token
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġwor ld", "l d"]
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}

# Scores divided by the head size's root, as in all files but those of 27B. Rotations that differ.
GEMMA3: dict[str, Any] = {
    **SIZES,
    "initializer_range": 0.15,  # sharp enough that a wrong KV entry changes tokens
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 33,
    "sliding_window_pattern": 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    },
}


def model(architecture: str, **changes: Any) -> transformers.PreTrainedModel:
    """A random float32 model; norms and biases are not the trivial ones of a fresh model."""
    kinds = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "smollm3": transformers.SmolLM3Config,
        "gemma3": transformers.Gemma3TextConfig,
    }
    torch.manual_seed(1)
    config = kinds[architecture](**{**(GEMMA3 if architecture == "gemma3" else SIZES), **changes})
    made = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in made.named_parameters():
        if name.endswith(("norm.weight", ".bias")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return made


def rope_of(made: transformers.PreTrainedModel) -> RopeConfig:
    rotary = made.model.rotary_emb
    return RopeConfig(tuple(rotary.inv_freq.tolist()), float(rotary.attention_scaling))


def ropes_of(made: transformers.PreTrainedModel) -> tuple[RopeConfig, ...]:
    """The rotations of full attention and, where it is another, of sliding windows."""
    if made.config.model_type != "gemma3_text":
        return (rope_of(made),)
    rotary = made.model.rotary_emb
    return tuple(
        RopeConfig(
            tuple(getattr(rotary, f"{kind}_inv_freq").tolist()),
            float(getattr(rotary, f"{kind}_attention_scaling")),
        )
        for kind in ("full_attention", "sliding_attention")
    )


def windows_of(made: transformers.PreTrainedModel) -> tuple[int | None, ...]:
    """Per layer, the window that transformers attends with."""
    if made.config.model_type == "mistral":  # all layers alike
        return (made.config.sliding_window,) * made.config.num_hidden_layers
    return tuple(getattr(x.self_attn, "sliding_window", None) for x in made.model.layers)


def byte_level_vocabulary() -> list[str]:
    joined = [merge.replace(" ", "") for merge in MERGES]
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *joined]


def write_tokenizer(directory: Path) -> None:
    vocabulary = {token: number for number, token in enumerate(byte_level_vocabulary())}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(directory)


def write_directory(
    directory: Path, made: transformers.PreTrainedModel, shard: str = "5GB"
) -> Path:
    """``shard``: the largest size of one file, as transformers spells it."""
    made.save_pretrained(directory, max_shard_size=shard)
    write_tokenizer(directory)
    return directory


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """What the GGUF converter does to queries and keys of Llama."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    architecture: str,
    made: transformers.PreTrainedModel,
    kind: Kind = Kind.F32,
    **metadata: Any,
) -> dict[str, torch.Tensor]:
    """Write ``made`` with matrices of type ``kind``. Returns what loading should give, in float32."""
    config = made.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    if architecture == "gemma3":
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config.sliding_window)
        kinds_of_layers = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_array("gemma3.attention.sliding_window_pattern", kinds_of_layers)
        ropes = ropes["full_attention"]
        writer.add_rope_scaling_type(gguf.RopeScalingType(ropes["rope_type"]))
        writer.add_rope_scaling_factor(ropes["factor"])
    elif architecture == "llama" and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(ropes["rope_theta"])
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(key.replace("__", "."), value)
    add_byte_level_tokenizer(writer)
    kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    expected = {}
    for name, parameter in made.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.numpy()
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + np.float32(1)
        stored = kind if values.ndim == 2 else Kind.F32
        expected[name] = torch.from_numpy(
            gguf.dequantize(gguf.quantize(values, stored), stored)
        ).reshape(values.shape)
        if architecture in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = _interleaved(values, heads)
        stem, _, suffix = name.rpartition(".")
        raw = gguf.quantize(values, stored)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", raw, raw_dtype=stored)
    _finish(writer)
    return expected


def add_byte_level_tokenizer(writer: gguf.GGUFWriter, pre: str = "gpt-2") -> None:
    vocabulary = byte_level_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3, 3, 4] + [1] * (len(vocabulary) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)


def sentence_piece_tokenizer() -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and types, shaped like Llama 2's: special, bytes, pieces by rank, characters."""
    ranked = ["▁t", "he", "▁the", "in", "▁a", "er", "▁▁", "▁in", "on", "▁he", "hello", "ll", "llo"]
    ranked += [
        "hel",
        "el",
        "ello",
        "▁hello",
        "世界",
        "é",
        "▁wor",
        "or",
        "ld",
        "▁world",
        "wor",
        "▁w",
    ]
    characters = sorted(set("▁abcdefghijklmnopqrstuvwxyz.,!世界") | {c for p in ranked for c in p})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    body = list(dict.fromkeys([*ranked, *characters]))
    scores = [0.0] * len(pieces) + [-float(rank) for rank in range(len(body))]
    return pieces + body, scores, types + [1] * len(body)


def add_sentence_piece_tokenizer(writer: gguf.GGUFWriter) -> None:
    pieces, scores, types = sentence_piece_tokenizer()
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def write_vocabulary(path: Path, kind: str = "llama") -> Path:
    """A GGUF file with a tokenizer and no weights."""
    writer = gguf.GGUFWriter(path, "llama")
    (add_sentence_piece_tokenizer if kind == "llama" else add_byte_level_tokenizer)(writer)
    _finish(writer)
    return path


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
