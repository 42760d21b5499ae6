"""Hugging Face directories, written by transformers: what is loaded, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from ebbtide.errors import InputError
from ebbtide.models.checkpoint import Checkpoint
from ebbtide.models.hf_config import model_config
from ebbtide.models.load import load_checkpoint

from . import tiny_files

SLIDING = {"use_sliding_window": True, "sliding_window": 33}
FULL_FIRST = ["full_attention"] + ["sliding_attention"] * 3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
CASES: list[tuple[str, dict[str, Any], tuple[int | None, ...]]] = [
    ("llama", {"rope_parameters": LLAMA3}, (None,) * 4),
    ("llama", {"attention_bias": True, "head_dim": 32, "tie_word_embeddings": True}, (None,) * 4),
    ("mistral", {"sliding_window": 33}, (33,) * 4),
    ("mistral", {"sliding_window": None, "head_dim": 32}, (None,) * 4),
    ("qwen2", {"tie_word_embeddings": True}, (None,) * 4),
    ("qwen2", {**SLIDING, "max_window_layers": 3}, (None, None, None, 33)),
    ("qwen3", {"head_dim": 32, "rope_parameters": YARN}, (None,) * 4),
    (
        "qwen3",
        {**SLIDING, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        (33, 33, 33, None),
    ),
    ("smollm3", {}, (None,) * 4),
    ("smollm3", {**SLIDING, "no_rope_layers": [1, 0, 1, 0]}, (None, 33, None, 33)),
    ("gemma3", {}, (33, 33, None, 33)),
    ("gemma3", {"attention_bias": True, "layer_types": FULL_FIRST}, (None, 33, 33, 33)),
]


def loaded(directory: Path) -> Checkpoint:
    return load_checkpoint(str(directory), torch.float32)


@pytest.mark.parametrize(("architecture", "changes", "windows"), CASES, ids=str)
@pytest.mark.parametrize("shard", ["5GB", "60KB"])
def test_weights_and_configuration_come_back(
    architecture: str,
    changes: dict[str, Any],
    windows: tuple[int | None, ...],
    shard: str,
    tmp_path: Path,
) -> None:
    made = tiny_files.model(architecture, **changes)
    tiny_files.write_directory(tmp_path, made, shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "60KB")
    found = loaded(tmp_path)
    expected = dict(made.state_dict())
    if made.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert found.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        gemma_norm = architecture == "gemma3" and name.endswith("norm.weight")
        assert torch.equal(found.weights[name], tensor + 1 if gemma_norm else tensor), name
    config, theirs = found.config, made.config
    attention = made.model.layers[0].self_attn
    assert config.architecture == architecture
    assert config.ropes == tiny_files.ropes_of(made)
    assert config.windows == windows == tiny_files.windows_of(made)
    assert config.rope_layers == tuple(map(bool, getattr(theirs, "no_rope_layers", [1] * 4)))
    assert config.head_dim == attention.head_dim
    assert config.qkv_bias == (attention.q_proj.bias is not None)
    assert config.output_bias == (attention.o_proj.bias is not None)
    assert config.qk_norm == hasattr(attention, "q_norm")
    assert config.tied_embeddings == theirs.tie_word_embeddings
    assert config.rms_eps == theirs.rms_norm_eps
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (4, 4, 2)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (300, 64, 96)
    assert config.max_length == 512


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_what_a_configuration_leaves_out_is_what_transformers_assumes(architecture: str) -> None:
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = {"model_type": architecture, "vocab_size": 300, **{k: tiny_files.SIZES[k] for k in kept}}
    raw["num_attention_heads"] = 8
    theirs = transformers.AutoConfig.for_model(**raw)
    full = {**theirs.to_dict(), "num_key_value_heads": theirs.num_key_value_heads}
    if (theirs.num_attention_heads % theirs.num_key_value_heads) != 0:
        raw["num_key_value_heads"] = full["num_key_value_heads"] = 4
    assert model_config(raw, Path("x")) == model_config(full, Path("x"))


def test_gemma_3_may_say_almost_nothing() -> None:
    """Published files of its larger sizes name only what differs from the 2B model's defaults."""
    raw: dict[str, Any] = {"model_type": "gemma3_text", "hidden_size": 1024}
    full = transformers.Gemma3TextConfig(hidden_size=1024).to_dict()
    config = model_config(raw, Path("x"))
    assert config == model_config(full, Path("x"))
    assert config.windows[4:7] == (4096, None, 4096)
    assert config.rope.inverse_frequencies[1] == pytest.approx(1e6 ** (-1 / 128))
    assert config.ropes[1].inverse_frequencies[1] == pytest.approx(1e4 ** (-1 / 128))


def test_gemma_3_of_the_older_spelling() -> None:
    """A base for each kind of layer, a scaling for full attention, a number for the pattern."""
    old = {
        **tiny_files.SIZES,
        "model_type": "gemma3_text",
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 33,
        "sliding_window_pattern": 3,
    }
    made = tiny_files.model("gemma3")
    config = model_config(old, Path("x"))
    assert config == model_config(made.config.to_dict(), Path("x"))
    assert config.ropes == tiny_files.ropes_of(made)


@pytest.mark.parametrize("prefixes", [("model.language_model.", "model."), ("language_model.", "")])
def test_the_language_model_of_a_gemma_3_that_sees_images(
    prefixes: tuple[str, str], tmp_path: Path
) -> None:
    """Its other half is left out, whichever way the file names the two."""
    made = tiny_files.model("gemma3")
    tiny_files.write_directory(tmp_path, made)
    alone = loaded(tmp_path)
    inner, outer = prefixes
    weights = load_file(tmp_path / "model.safetensors")
    named = {
        inner + (name.removeprefix("model.") if outer else name): tensor
        for name, tensor in weights.items()
    }
    named[f"{outer}vision_tower.patches.weight"] = torch.zeros(3, 3)
    named[f"{outer}multi_modal_projector.norm.weight"] = torch.zeros(3)
    save_file(named, tmp_path / "model.safetensors")
    inner_config = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": inner_config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "eos_token_id": [1, 106]}))
    (tmp_path / "generation_config.json").unlink()
    found = loaded(tmp_path)
    assert found.config == alone.config
    assert found.weights.keys() == alone.weights.keys()
    assert all(torch.equal(found.weights[name], alone.weights[name]) for name in alone.weights)
    assert found.tokenizer.eos_ids == {1, 106}
    quantised = {**whole, "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(InputError, match="quantised with 'awq'"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'; only gelu_pytorch_tanh"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0"),
        ({"sliding_window": None}, "sliding_window must be a positive integer, and is None"),
        ({"layer_types": ["chunked_attention"] * 4}, "layers of type 'chunked_attention'"),
    ],
)
def test_what_gemma_3_cannot_do_is_refused(changes: dict[str, Any], words: str) -> None:
    raw = {**tiny_files.model("gemma3").config.to_dict(), **changes}
    with pytest.raises(InputError, match=words):
        model_config(raw, Path("x"))


def test_older_files_keep_rope_parameters_elsewhere() -> None:
    new = {**tiny_files.SIZES, "model_type": "llama", "rope_parameters": LLAMA3}
    scaling = {k: v for k, v in LLAMA3.items() if k not in ("rope_theta", "rope_type")}
    old = {
        **tiny_files.SIZES,
        "model_type": "llama",
        "rope_theta": 500_000.0,
        "rope_scaling": {**scaling, "type": "llama3"},
    }
    assert model_config(old, Path("x")) == model_config(new, Path("x"))


def test_the_tokenizer_and_its_template_work_as_in_transformers(tmp_path: Path) -> None:
    made = tiny_files.model("llama")
    tiny_files.write_directory(tmp_path, made)
    ours = loaded(tmp_path).tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hello world <think>"}]
    for text in ["hello world", "<|im_start|>a<think>b<|im_end|>", ""]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), False) == theirs.decode(theirs.encode(text))
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.encode_chat(messages) == expected
    assert ours.encode_chat(messages).count(ours.bos_id) == 3  # the template's own, once a turn
    assert (ours.bos_id, ours.eos_ids) == (0, {1})


def test_what_goes_around_a_text_is_what_the_post_processor_says(tmp_path: Path) -> None:
    tiny_files.write_directory(tmp_path, tiny_files.model("llama"))
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ends = [("<|im_start|>", 0), ("<|im_end|>", 1)]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=ends
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "add_bos_token": False}))
    ours = loaded(tmp_path).tokenizer
    assert ours.encode("hello") == [0, *ours.encode("hello", add_special=False), 1]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("hello") == theirs.encode("hello")
    assert ours.encode_chat([]) == [0, *ours.encode("<|im_start|>assistant\n", False)]


def test_generation_defaults_and_every_end_token_are_read(tmp_path: Path) -> None:
    tiny_files.write_directory(tmp_path, tiny_files.model("llama"))
    given = {"eos_token_id": [1, 7], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    found = loaded(tmp_path)
    assert found.generation == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert found.tokenizer.eos_ids == {1, 7}
    (tmp_path / "generation_config.json").write_text('{"do_sample": false}')
    assert loaded(tmp_path).generation == {"temperature": 0.0}


def test_older_templates_are_found_in_the_tokenizers_settings(tmp_path: Path) -> None:
    tiny_files.write_directory(tmp_path, tiny_files.model("llama"))
    (tmp_path / "chat_template.jinja").unlink()
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    assert not loaded(tmp_path).tokenizer.has_chat_template
    file.write_text(json.dumps({**settings, "chat_template": "one"}))
    assert loaded(tmp_path).tokenizer.render_chat([]) == "one"
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    file.write_text(json.dumps({**settings, "chat_template": named}))
    assert loaded(tmp_path).tokenizer.render_chat([], tools=[{}]) == "b"


def test_the_identity_depends_on_every_weight_and_not_on_the_files(tmp_path: Path) -> None:
    made = tiny_files.model("qwen3", num_hidden_layers=1)
    one, many = tmp_path / "one", tmp_path / "many"
    tiny_files.write_directory(one, made)
    tiny_files.write_directory(many, made, "60KB")
    identity = loaded(one).identity
    assert len(identity) == 32
    assert loaded(many).identity == identity
    weights = load_file(one / "model.safetensors")
    for name in weights:
        changed = {**weights, name: weights[name] * 1.001}
        save_file(changed, one / "model.safetensors")
        assert loaded(one).identity != identity, name
    swapped = {**weights, "model.norm.weight": weights["model.layers.0.input_layernorm.weight"]}
    swapped["model.layers.0.input_layernorm.weight"] = weights["model.norm.weight"].clone()
    save_file({name: tensor.clone() for name, tensor in swapped.items()}, one / "model.safetensors")
    assert loaded(one).identity != identity


def test_a_loaded_model_does_not_change_with_its_file(tmp_path: Path) -> None:
    tiny_files.write_directory(tmp_path, tiny_files.model("llama", num_hidden_layers=1))
    found = loaded(tmp_path)
    before = {name: tensor.clone() for name, tensor in found.weights.items()}
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        handle.write(b"\0" * (file.stat().st_size // 4))
    assert all(torch.equal(before[name], found.weights[name]) for name in before)


def test_an_output_matrix_of_its_own_counts_though_the_file_says_tied(tmp_path: Path) -> None:
    """transformers unties the two as well."""
    tiny_files.write_directory(tmp_path, tiny_files.model("llama"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert not loaded(tmp_path).config.tied_embeddings
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    found = loaded(tmp_path)
    assert found.config.tied_embeddings
    assert "lm_head.weight" not in found.weights


Change = Callable[[Path], object]


def set_key(**changes: Any) -> Change:
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def set_weights(**changes: torch.Tensor | None) -> Change:
    def change(directory: Path) -> None:
        weights = load_file(directory / "model.safetensors")
        named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
        kept = {name: t for name, t in {**weights, **named}.items() if t is not None}
        save_file(kept, directory / "model.safetensors")

    return change


def cut(name: str, length: int) -> Change:
    return lambda d: (d / name).write_bytes((d / name).read_bytes()[:length])


def write(name: str, text: str) -> Change:
    return lambda directory: (directory / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_key(model_type="gemma2"), "'gemma2'; supported are: llama, mistral, qwen2"),
        (set_key(quantization_config={"quant_method": "awq"}), "quantised with 'awq'"),
        (set_key(hidden_act="gelu"), "hidden_act is 'gelu'; only silu"),
        (set_key(mlp_bias=True), "biases in the MLP"),
        (set_key(num_hidden_layers=0), "must be a positive integer, and is 0"),
        (set_key(num_key_value_heads=3), "4 query heads cannot share 3 key heads"),
        (set_key(num_hidden_layers=2), "lacks 9 of the 21 weights .* model.layers.1.input_lay"),
        (set_key(intermediate_size=97), r"has shape \[64, 96\].* needs \[64, 97\]"),
        (set_key(rope_parameters={"rope_type": "longrope"}), "'longrope' is not supported"),
        (set_weights(model__norm__weight=None), "lacks 1 of the 12 weights .*model.norm.weight"),
        (set_weights(extra=torch.zeros(2)), "1 weights that its architecture does not use: extra"),
        (
            set_weights(model__norm__weight=torch.zeros(64, dtype=torch.int32)),
            "model.norm.weight is stored as int32",
        ),
        (
            set_weights(model__norm__weight=torch.zeros(64).to(torch.float8_e4m3fn)),
            "model.norm.weight is stored as float8_e4m3fn",
        ),
        (cut("model.safetensors", 4), "truncated or damaged \\(4 bytes\\)"),
        (cut("model.safetensors", 2000), "truncated or damaged \\(2000 bytes\\)"),
        (cut("model.safetensors", 100_000), "truncated or damaged \\(100000 bytes\\)"),
        (cut("config.json", 30), "config.json is not JSON"),
        (write("config.json", "[]"), "holds a list, not an object"),
        (cut("tokenizer.json", 30), "tokenizer.json cannot be read"),
        (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer.json in .*; save it with"),
        (lambda d: (d / "model.safetensors").unlink(), "there is no model.safetensors in"),
        (
            lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
            "can run code when loaded and are not read",
        ),
        (
            write("model.safetensors.index.json", '{"weight_map": {"x": "gone.safetensors"}}'),
            "there is no gone.safetensors in",
        ),
        (
            write("model.safetensors.index.json", '{"weight_map": {"x": "model.safetensors"}}'),
            "lacks x, which model.safetensors.index.json says",
        ),
        (write("model.safetensors.index.json", "{}"), "has no weight_map"),
    ],
)
def test_what_cannot_run_is_refused(change: Change, words: str, tmp_path: Path) -> None:
    tiny_files.write_directory(tmp_path, tiny_files.model("llama", num_hidden_layers=1))
    change(tmp_path)
    with pytest.raises(InputError, match=words) as caught:
        loaded(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_index_cannot_point_outside_its_directory(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    tiny_files.write_directory(inside, tiny_files.model("llama", num_hidden_layers=1))
    (inside / "model.safetensors").rename(tmp_path / "model.safetensors")
    places = {"x": "../model.safetensors"}
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(InputError, match=r"there is no model.safetensors in .*inside"):
        loaded(inside)


JUNK = [None, -1, 0, 2**70, 1.5, float("nan"), "text", True, [], [1, 2], {}, {"a": 1}]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "smollm3", "gemma3"])
def test_a_value_of_the_wrong_kind_is_never_more_than_refused(architecture: str) -> None:
    config = tiny_files.model(architecture).config.to_dict() | {
        **SLIDING,
        "rope_scaling": None,
        "rope_theta": 10_000.0,
        "no_rope_layers": None,
    }
    for key in config:
        for junk in JUNK:
            with suppress(InputError):
                model_config({**config, key: junk}, Path("x"))
    for key in {**YARN, "beta_fast": 1, "attention_factor": 1, "mscale": 1, "truncate": 1}:
        for junk in JUNK:
            with suppress(InputError):
                model_config({**config, "rope_parameters": {**YARN, key: junk}}, Path("x"))
