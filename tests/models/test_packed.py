"""Weights that stay in 4 bits, next to the same weights dequantised."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from ebbtide.core.plan import Row, Table
from ebbtide.engine.build import build_model, choose_kernels
from ebbtide.engine.config import EngineConfig
from ebbtide.errors import InputError
from ebbtide.models.checkpoint import Checkpoint, Form
from ebbtide.models.kv import KVMemory, layout_for
from ebbtide.models.linear import GatedLinear, Linear
from ebbtide.models.load import DEFAULT_MODEL, load_checkpoint
from ebbtide.models.packed import (
    BITS,
    KINDS,
    KINDS_4_BITS,
    TOKENS_MAX,
    TOKENS_MAX_ALONE,
    TorchPacked,
    can_stay_packed,
    packs_4_bits,
)

from . import tiny_files
from .harness import GREEDY, Driver, error, quantized
from .test_native import needs_native

CPU = torch.device("cpu")
TOKENS = (1, TOKENS_MAX, TOKENS_MAX + 1, TOKENS_MAX_ALONE + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_those_of_the_file(kind: str) -> None:
    weight = quantized(kind, 16, 96, 1)
    integers, scales, zeros = weight.unpack()
    scale, zero = (each.repeat_interleave(32, dim=1) for each in (scales, zeros))
    base = 8 if BITS[kind] == 4 else 0
    assert base == 0 or integers.unique().tolist() == list(range(16))
    torch.testing.assert_close(
        (integers.float() - base) * scale + zero, weight.dequantize(torch.float32)
    )


@pytest.mark.parametrize("kind", KINDS_4_BITS)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_products_are_as_exact_as_with_weights_in_bfloat16(
    kind: str, alone: bool, tokens: int
) -> None:
    """Of one projection and of several, one below the other, with a bias; to all numbers of tokens."""
    parts = [quantized(kind, rows, 64, rows) for rows in (48, 16, 96)]
    exact = torch.cat([part.dequantize(torch.float32) for part in parts])
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, 64, generator=generator).bfloat16()
    bias = torch.randn(160, generator=generator).bfloat16()
    residual = torch.randn(tokens, 160, generator=generator).bfloat16()
    wide = exact.bfloat16()
    plain = Linear(wide, bias)
    packed = Linear(None if alone else wide, bias, packed=TorchPacked(parts, alone))
    reference = x.double() @ exact.double().T + bias.double()
    assert error(packed(x), reference) < 1.3 * error(plain(x), reference) + 1e-3
    with_residual = reference + residual.double()
    assert error(packed.add(x, residual), with_residual) < 6e-3


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_gated_products_are_those_of_the_dequantised_weights(alone: bool, tokens: int) -> None:
    gate, up = quantized("Q4_1", 32, 64, 1), quantized("Q4_1", 32, 64, 2)
    wide = None if alone else tuple(part.dequantize(torch.bfloat16) for part in (gate, up))
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    exact = [x.double() @ part.dequantize(torch.float32).double().T for part in (gate, up)]
    expected = torch.nn.functional.silu(exact[0]) * exact[1]
    found = GatedLinear(wide, packed=TorchPacked([gate, up], alone))(x)
    assert error(found, expected) < 0.012


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("F32", (32, 64)), ("Q4_0", (8, 64)), ("Q4_0", (32,)), ("Q6_K", (32, 256))],
)
def test_what_has_no_product_does_not_stay_packed(kind: str, shape: tuple[int, ...]) -> None:
    assert can_stay_packed("Q4_0", (32, 64))
    assert not can_stay_packed(kind, shape)


def test_formats_that_pytorch_multiplies_together() -> None:
    assert packs_4_bits(["Q4_0", "Q4_1"])
    assert not packs_4_bits(["Q4_0", "Q8_0"])


@pytest.mark.parametrize("form", Form)
def test_a_file_is_read_in_the_form_asked_for(form: Form, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    expected = tiny_files.write_gguf(
        path, "llama", tiny_files.model("llama", tie_word_embeddings=True), Kind.Q4_1
    )
    found = load_checkpoint(str(path), torch.bfloat16, form=form)
    names = set(found.quantized)
    projections = {name for name in expected if name.endswith("_proj.weight")}
    if form is Form.WIDE:
        assert not names
    else:
        assert projections <= names
        for name in names:
            dequantised = found.quantized[name].dequantize(torch.float32)
            assert torch.equal(dequantised, expected[name].float()), name
    missing = names - {"model.embed_tokens.weight"}
    assert found.weights.keys() == expected.keys() - missing
    assert found.identity == load_checkpoint(str(path), torch.float32).identity


def first_logits(
    checkpoint: Checkpoint, prompt: list[int], dtype: torch.dtype, kernels: str = "torch"
) -> torch.Tensor:
    """The logits after a prompt; its last token is fed in a step of its own."""
    layout = layout_for(checkpoint.config, 16, dtype)
    kv = KVMemory(layout, 8 * len(layout.groups), "cpu")
    config = EngineConfig(kernels=kernels)
    model = build_model(config, checkpoint, layout, CPU, dtype)
    tables = tuple(Table(0, list(range(8))) for _ in layout.groups)
    with torch.inference_mode():
        for start, end in ((0, len(prompt) - 1), (len(prompt) - 1, len(prompt))):
            row = Row("r", prompt, len(prompt), start, end, tables, GREEDY, 0)
            logits = model.forward(model.plan([row], {}), kv)
    return logits[0].float()


def test_the_default_model_says_the_same_in_every_form() -> None:
    """Its logits, within what bfloat16 leaves."""
    prompt = list(range(1000, 1060))
    exact = first_logits(
        load_checkpoint(DEFAULT_MODEL, torch.float32), prompt, torch.float32
    ).double()
    errors = {}
    for form, kernels in itertools.product(Form, ("torch", "auto")):
        checkpoint = load_checkpoint(DEFAULT_MODEL, torch.bfloat16, form=form)
        logits = first_logits(checkpoint, prompt, torch.bfloat16, kernels)
        errors[form, kernels] = error(logits, exact)
    assert max(errors.values()) < 0.03


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_model_with_packed_weights_is_as_exact_with_either_kernels(
    architecture: str, form: Form, kind: Kind, tmp_path: Path
) -> None:
    """With biases and without; the head in 8 bits stays packed where that suffices."""
    made = tiny_files.model(architecture, head_dim=64, hidden_size=256, vocab_size=320)
    path = tmp_path / "model.gguf"
    tiny_files.write_gguf(path, architecture, made, kind)
    checkpoint = load_checkpoint(str(path), torch.bfloat16, form=form)
    prompt = list(range(60))
    exact = first_logits(load_checkpoint(str(path), torch.float32), prompt, torch.float32).double()
    of_torch, of_auto = (
        error(first_logits(checkpoint, prompt, torch.bfloat16, kernels), exact)
        for kernels in ("torch", "auto")
    )
    assert of_torch < 0.01
    assert of_auto < 0.01


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
@pytest.mark.parametrize("form", [Form.PACKED, Form.BOTH])
def test_in_float32_packed_weights_change_no_more_than_rounding(
    form: Form, kind: Kind, tmp_path: Path
) -> None:
    made = tiny_files.model("qwen2", head_dim=64, hidden_size=256, vocab_size=320)
    path = tmp_path / "model.gguf"
    tiny_files.write_gguf(path, "qwen2", made, kind)
    wide = load_checkpoint(str(path), torch.float32)
    packed = load_checkpoint(str(path), torch.float32, form=form)
    prompt = list(range(60))
    exact = first_logits(wide, prompt, torch.float32).double()
    kernels = choose_kernels(
        "auto", wide.config, layout_for(wide.config, 16, torch.float32), CPU, torch.float32
    )
    if form is Form.PACKED and not kernels.packs(KINDS_4_BITS):
        pytest.skip("no compiled kernels here")
    assert error(first_logits(packed, prompt, torch.float32, "auto"), exact) < 2e-6


def test_without_a_product_for_them_packed_weights_are_refused(tmp_path: Path) -> None:
    made = tiny_files.model("llama")
    path = tmp_path / "model.gguf"
    tiny_files.write_gguf(path, "llama", made, Kind.Q4_0)
    checkpoint = load_checkpoint(str(path), torch.float32, form=Form.PACKED)
    layout = layout_for(checkpoint.config, 16, torch.float32)
    config = EngineConfig(weights="packed", kernels="torch")
    with pytest.raises(InputError, match="nothing here multiplies with them in this dtype"):
        build_model(config, checkpoint, layout, CPU, torch.float32)


@needs_native
@pytest.mark.usefixtures("kinds_of_processor")
@pytest.mark.parametrize("block_size", [16, 24])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_with_compiled_kernels_a_step_has_no_part_in_what_a_token_becomes(
    architecture: str, block_size: int, tmp_path: Path
) -> None:
    """In bfloat16, bit for bit: fed at once, in chunks, alone, among others, with windows that slide."""
    window = {"sliding_window": 70} if architecture == "gemma3" else {}
    made = tiny_files.model(architecture, head_dim=64, hidden_size=256, vocab_size=320, **window)
    path = tmp_path / "model.gguf"
    tiny_files.write_gguf(path, architecture, made, Kind.Q4_1)
    checkpoint = load_checkpoint(str(path), torch.bfloat16, form=Form.PACKED)
    layout = layout_for(checkpoint.config, block_size, torch.bfloat16)
    model = build_model(EngineConfig(), checkpoint, layout, CPU, torch.bfloat16)
    prompt = [7 * i % 320 for i in range(400)]

    def logits_of(lengths: Sequence[int], others: Sequence[int] = ()) -> dict[int, torch.Tensor]:
        """Those after each chunk of the prompt; beside it, prompts of these lengths are fed."""
        driver = Driver(checkpoint.config, {}, block_size, 400, torch.bfloat16, model=model)
        request, found = driver.add(prompt), {}
        for length in lengths:
            rows = [driver.row(driver.add(prompt[5:]), other) for other in others]
            rows.insert(len(others) // 2, driver.row(request, length))
            rows = [row._replace(sampling=GREEDY) for row in rows]
            logits = model.forward(model.plan(rows, {}), driver.kv)
            found[request.fed] = logits[len(others) // 2]
        driver.close()
        return found

    with torch.inference_mode():
        expected = logits_of([1] * 400)
        for lengths, others in (
            ([400], ()),
            ([399, 1], ()),
            ([7, 64, 1, 1, 200, 33, 94], (1, 30, 1)),
            ([256, 144], (1,) * 17),
        ):
            for position, logits in logits_of(lengths, others).items():
                assert torch.equal(logits, expected[position]), (lengths, position)
