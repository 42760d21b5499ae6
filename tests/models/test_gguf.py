"""GGUF files: what is loaded, and what is refused."""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, load_gguf_checkpoint

from ebbtide.errors import InputError
from ebbtide.models.checkpoint import Checkpoint
from ebbtide.models.gguf_file import GGUFFile, TensorInfo, read_header
from ebbtide.models.gguf_model import read_config
from ebbtide.models.gguf_tokenizer import build_tokenizer
from ebbtide.models.load import DEFAULT_MODEL, find_model, load_checkpoint
from ebbtide.models.rope import rope_config

from . import tiny_files

CASES: list[tuple[str, Kind, dict[str, Any]]] = [
    ("llama", Kind.F32, {"tie_word_embeddings": True}),
    ("llama", Kind.Q8_0, {"head_dim": 32}),
    ("llama", Kind.F16, {"attention_bias": True}),
    ("qwen2", Kind.Q4_0, {}),
    ("qwen2", Kind.BF16, {"tie_word_embeddings": True}),
    ("qwen3", Kind.Q5_1, {"head_dim": 32}),
    ("smollm3", Kind.Q4_1, {"tie_word_embeddings": True}),
    ("gemma3", Kind.Q8_0, {}),
]


def loaded(path: Path) -> Checkpoint:
    return load_checkpoint(str(path), torch.float32)


@pytest.mark.parametrize(("architecture", "kind", "changes"), CASES, ids=str)
def test_weights_and_configuration_come_back(
    architecture: str, kind: Kind, changes: dict[str, Any], tmp_path: Path
) -> None:
    made = tiny_files.model(architecture, **changes)
    path = tmp_path / "model.gguf"
    expected = tiny_files.write_gguf(path, architecture, made, kind)
    found = loaded(path)
    assert found.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found.weights[name], tensor), name
    config, theirs = found.config, made.config
    assert config.architecture == architecture
    assert config.ropes == tiny_files.ropes_of(made)
    assert config.head_dim == getattr(theirs, "head_dim", None) or config.head_dim == 16
    assert config.rms_eps == pytest.approx(theirs.rms_norm_eps)
    assert config.num_kv_heads == 2
    assert config.max_length == 512
    assert config.tied_embeddings == theirs.tie_word_embeddings
    assert config.qkv_bias == (architecture == "qwen2" or bool(changes.get("attention_bias")))
    assert config.output_bias == bool(changes.get("attention_bias"))
    assert config.qk_norm == (architecture in ("qwen3", "gemma3"))
    rotates = (True, True, True, architecture != "smollm3")
    assert config.rope_layers == rotates
    assert config.windows == tiny_files.windows_of(made)
    assert found.tokenizer.decode(found.tokenizer.encode("hello world")) == "hello world"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_transformers_reads_the_same_from_the_same_file(architecture: str, tmp_path: Path) -> None:
    made = tiny_files.model(architecture)
    path = tmp_path / "model.gguf"
    tiny_files.write_gguf(path, architecture, made, Kind.Q8_0)
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=made)["tensors"]
    ours = loaded(path).weights
    assert ours.keys() == theirs.keys()
    for name in ours:
        # theirs are less 1 again, in float32, as Gemma's are in Hugging Face's files
        gemma_norm = architecture == "gemma3" and name.endswith("norm.weight")
        assert torch.equal(ours[name] - 1 if gemma_norm else ours[name], theirs[name]), name


def test_the_default_models_weights_are_those_that_transformers_computes() -> None:
    path = find_model(DEFAULT_MODEL).path
    ours = load_checkpoint(DEFAULT_MODEL, torch.bfloat16)
    assert ours.name == DEFAULT_MODEL
    config = transformers.LlamaConfig(
        hidden_size=576, num_attention_heads=9, rope_parameters={"rope_theta": 100_000.0}
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    assert list(ours.config.rope.inverse_frequencies) == rotary.inv_freq.tolist()
    assert (ours.config.num_layers, ours.config.num_kv_heads, ours.config.head_dim) == (30, 3, 64)
    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    back = {f"{names.get_name(name[: -len('.weight')])}.weight": name for name in ours.weights}
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert back.keys() == tensors.keys()
    chosen = ["token_embd.weight", "output_norm.weight"]
    chosen += [name for name in tensors if name.startswith(("blk.0.", "blk.29."))]
    for name in chosen:
        values = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        expected = torch.from_numpy(np.copy(processor.process(values, name).weights))
        assert torch.equal(ours.weights[back[name]], expected.bfloat16()), name


def test_k_quants_are_read(tmp_path: Path) -> None:
    """``gguf`` cannot write them: the bytes are made up."""
    made = tiny_files.model("llama", hidden_size=256, num_hidden_layers=1)
    path = tmp_path / "model.gguf"
    rows, size = 96, gguf.GGML_QUANT_SIZES[Kind.Q4_K][1]
    raw = np.random.default_rng(4).integers(0, 60, (rows, size), dtype=np.uint8)
    original = gguf.quantize

    def crafted(values: np.ndarray, kind: Kind) -> np.ndarray:
        return raw if kind is Kind.Q4_K else original(values, kind)

    writer_add = gguf.GGUFWriter.add_tensor
    with pytest.MonkeyPatch.context() as patch:

        def add(self: gguf.GGUFWriter, name: str, values: np.ndarray, raw_dtype: Kind) -> None:
            if name == "blk.0.ffn_gate.weight":
                values, raw_dtype = crafted(values, Kind.Q4_K), Kind.Q4_K
            writer_add(self, name, values, raw_dtype=raw_dtype)

        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        tiny_files.write_gguf(path, "llama", made)
    found = loaded(path).weights["model.layers.0.mlp.gate_proj.weight"]
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(raw, Kind.Q4_K)))


def test_rope_scaling_and_sampling_defaults_are_read(tmp_path: Path) -> None:
    made = tiny_files.model(
        "llama",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    )
    path = tmp_path / "model.gguf"
    metadata = {
        "llama__rope__scaling__type": "yarn",
        "llama__rope__scaling__factor": 4.0,
        "general__sampling__temp": 0.5,
        "general__sampling__top_p": 0.0,  # no request could ask for that
    }
    tiny_files.write_gguf(path, "llama", made, **metadata)
    found = loaded(path)
    assert found.config.rope == tiny_files.rope_of(made)
    assert found.generation == {"temperature": 0.5}


def test_llama_3_keeps_its_scaling_in_a_tensor(tmp_path: Path) -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    made = tiny_files.model("llama", rope_parameters=parameters)
    expected = tiny_files.rope_of(made).inverse_frequencies
    plain = rope_config(500_000.0, 16, 512).inverse_frequencies
    factors = np.float32(plain) / np.float32(expected)
    finish = tiny_files._finish

    def written(values: np.ndarray) -> Checkpoint:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_tensor("rope_freqs.weight", values)
            finish(writer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny_files, "_finish", add)
            tiny_files.write_gguf(tmp_path / "model.gguf", "llama", made)
        return loaded(tmp_path / "model.gguf")

    found = [written(factors), written(factors * np.float32(1.01))]
    assert found[0].config.rope.inverse_frequencies == pytest.approx(expected, rel=1e-6)
    assert "rope_freqs.weight" not in found[0].weights
    assert found[0].identity != found[1].identity


def test_the_identity_is_the_same_for_the_same_file_and_moves_with_any_bit(tmp_path: Path) -> None:
    made = tiny_files.model("llama", num_hidden_layers=1)
    path = tmp_path / "model.gguf"
    tiny_files.write_gguf(path, "llama", made, Kind.Q8_0)
    first = loaded(path).identity
    assert len(first) == 32
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    assert loaded(copy).identity == load_checkpoint(str(copy), torch.bfloat16).identity == first
    for info in read_header(path).tensors.values():
        data = bytearray(path.read_bytes())
        data[info.offset + info.size // 2] ^= 1
        copy.write_bytes(data)
        assert loaded(copy).identity != first, info.name


def test_every_truncation_is_refused_in_one_sentence(tmp_path: Path) -> None:
    made = tiny_files.model("llama", num_hidden_layers=1)
    path = tmp_path / "model.gguf"
    tiny_files.write_gguf(path, "llama", made)
    whole = path.read_bytes()
    header = len(read_header(path).header)
    lengths = [*range(64), *random.Random(5).sample(range(64, header), 100)]
    for length in [*lengths, header, header + 1000, len(whole) - 100]:
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"truncated|not a GGUF file") as caught:
            loaded(path)
        assert "\n" not in str(caught.value)


def test_damage_in_the_header_is_refused_or_harmless(tmp_path: Path) -> None:
    made = tiny_files.model("llama", num_hidden_layers=1, vocab_size=280)
    path = tmp_path / "model.gguf"
    tiny_files.write_gguf(path, "llama", made)
    whole = path.read_bytes()
    header = len(read_header(path).header)
    source = random.Random(6)
    refused = 0
    for _ in range(250):
        data = bytearray(whole)
        data[source.randrange(header)] ^= 1 << source.randrange(8)
        path.write_bytes(data)
        try:
            loaded(path)
        except InputError:
            refused += 1
    assert refused > 50


JUNK = [None, -1, 2**40, 1.5, float("nan"), "text", True, [], [1, 2], ["a"], [["a"]], ["", ""]]


@pytest.mark.parametrize(("architecture", "kind"), [("llama", "gpt2"), ("gemma3", "llama")])
def test_a_value_of_the_wrong_kind_is_never_more_than_refused(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    tiny_files.write_gguf(path, architecture, tiny_files.model(architecture, num_hidden_layers=1))
    file = read_header(path)
    words = read_header(tiny_files.write_vocabulary(tmp_path / "words.gguf", kind)).metadata
    optional = dict.fromkeys(
        [
            f"{architecture}.rope.scaling.type",
            "tokenizer.ggml.eot_token_id",
            "tokenizer.chat_template",
        ]
    )
    metadata = {**file.metadata, **optional, **words, "general.architecture": architecture}
    for key in metadata:
        for junk in JUNK:
            changed = replace(file, metadata={**metadata, key: junk})
            with suppress(InputError):
                read_config(changed)
            with suppress(InputError):
                build_tokenizer(changed.metadata, path).encode("hello")


def patched(path: Path, made: transformers.PreTrainedModel | None = None, **changes: Any) -> Path:
    """The file's metadata overruled: written again by the writer. made: a tiny Llama by default."""
    made = made or tiny_files.model("llama", num_hidden_layers=1)
    with pytest.MonkeyPatch.context() as patch:
        finish = tiny_files._finish

        def change(writer: gguf.GGUFWriter) -> None:
            for key, value in changes.items():
                writer.kv_data[0].pop(key.replace("__", "."), None)
                if value is not None:
                    add = {str: writer.add_string, bool: writer.add_bool, list: writer.add_array}
                    add.get(type(value), writer.add_uint32)(key.replace("__", "."), value)
            finish(writer)

        patch.setattr(tiny_files, "_finish", change)
        tiny_files.write_gguf(path, made.config.model_type.removesuffix("_text"), made)
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general__architecture": "gemma2"}, "'gemma2'; supported are: llama, qwen2, qwen3, smo"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__block_count": None}, "lacks llama.block_count"),
        ({"llama__block_count": "one"}, "llama.block_count is 'one'"),
        ({"llama__block_count": 2}, "lacks 9 of the 21 weights .* model.layers.1.input_layernorm"),
        ({"llama__feed_forward_length": 97}, r"shape \[96, 64\], and its .* needs \[97, 64\]"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count is 8 and heads have 16"),
        ({"llama__rope__scaling__type": "longrope"}, "'longrope' is not supported"),
        ({"split__count": 3}, "one of 3 parts; join them"),
        ({"general__alignment": 24}, "alignment is 24"),
    ],
)
def test_what_cannot_run_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        loaded(patched(tmp_path / "model.gguf", **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gemma3__final_logit_softcapping": 30}, "gemma3.final_logit_softcapping is set"),
        ({"gemma3__attn_logit_softcapping": 50}, "gemma3.attn_logit_softcapping is set"),
        ({"gemma3__attention__sliding_window_pattern": [True] * 3}, "one flag per layer is needed"),
        ({"gemma3__rope__freq_base_swa": "one"}, "gemma3.rope.freq_base_swa is 'one'"),
    ],
)
def test_what_gemma_3_cannot_do_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    made = tiny_files.model("gemma3", num_hidden_layers=1)
    with pytest.raises(InputError, match=words):
        loaded(patched(tmp_path / "model.gguf", made, **changes))


def test_a_sliding_window_in_a_llama_file_holds_for_all_layers(tmp_path: Path) -> None:
    path = patched(tmp_path / "model.gguf", llama__attention__sliding_window=33)
    assert loaded(path).config.windows == (33,)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (33, 33, None, 33, 33, None, 33)),
        ({"gemma3__attention__sliding_window_pattern": None}, (33,) * 5 + (None, 33)),
        ({"gemma3__attention__sliding_window_pattern": 2}, (33, None) * 3 + (33,)),
        ({"gemma3__attention__sliding_window": None}, (None,) * 7),
    ],
)
def test_which_layers_of_gemma_3_slide(
    changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    made = tiny_files.model("gemma3", num_hidden_layers=7, sliding_window_pattern=3)
    config = loaded(patched(tmp_path / "model.gguf", made, **changes)).config
    assert config.windows == windows


@pytest.mark.parametrize(("layers", "scalar"), [(7, 32), (62, 64 / 4)])
def test_what_the_largest_gemma_3_divides_scores_by(layers: int, scalar: float) -> None:
    """No file says it: 27B is known by its number of layers, as other readers of GGUF do."""
    made = transformers.Gemma3TextConfig(**tiny_files.GEMMA3 | {"num_hidden_layers": layers})
    embedding = TensorInfo("token_embd.weight", "F32", (300, made.hidden_size), 0, 0)
    metadata = {
        "general.architecture": "gemma3",
        "gemma3.block_count": layers,
        "gemma3.context_length": 512,
        "gemma3.embedding_length": made.hidden_size,
        "gemma3.feed_forward_length": 96,
        "gemma3.attention.head_count": made.num_attention_heads,
        "gemma3.attention.head_count_kv": 2,
        "gemma3.attention.key_length": 32,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    }
    file = GGUFFile(Path("x"), metadata, {embedding.name: embedding}, b"")
    assert read_config(file).query_scale == pytest.approx((32 / scalar) ** 0.5)


def test_weights_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    made = tiny_files.model("qwen2", num_hidden_layers=1)
    path = tmp_path / "model.gguf"
    tiny_files.write_gguf(path, "qwen2", made)
    data = path.read_bytes().replace(b"blk.0.attn_q.bias", b"blk.0.attn_q.bark")
    path.write_bytes(data)
    with pytest.raises(InputError, match="has 3 weights that its architecture does not use"):
        loaded(path)


@pytest.mark.parametrize(
    ("version", "words"),
    [(1, "has GGUF version 1; versions 2 and 3"), (3 << 24, "big-endian machine")],
)
def test_other_versions_are_refused(version: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(InputError, match=words):
        loaded(path)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(InputError, match=r"not a GGUF file: it begins with b'PK"):
        loaded(path)
