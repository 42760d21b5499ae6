"""Compiled kernels beside PyTorch's, and how they come to be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor

from ebbtide.core.plan import Row, Table
from ebbtide.models import native
from ebbtide.models.compiled import NoNativeKernels
from ebbtide.models.gates import gate
from ebbtide.models.kernels import TorchKernels, TorchNorm
from ebbtide.models.kv import KVLayout, KVMemory, layout_for
from ebbtide.models.llama import LlamaModel
from ebbtide.models.native import FLOAT32_ROWS_MAX, NativeFloat32Kernels, NativeKernels
from ebbtide.models.packed import KINDS

from .harness import (
    GEMMA3,
    GREEDY,
    SIZES,
    Driver,
    config_of,
    error,
    quantized,
    rope_of,
    tiny,
    weights_of,
)

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def config_with(heads: int = 6, kv_heads: int = 2, dim: int = 64, window: int | None = None):
    """Of a model whose heads compiled kernels take."""
    rope = rope_of({"rope_theta": 1e4}, dim)
    config = config_of(tiny("llama"))
    return replace(
        config, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rope=rope,
        windows=(window,) * config.num_layers,
    )  # fmt: skip


def kernels_of(config, block_size: int = 16) -> tuple[NativeKernels, KVLayout]:
    layout = layout_for(config, block_size, BF16)
    return NativeKernels(config, layout), layout


def why_not() -> str:
    try:
        kernels_of(config_with())
    except NoNativeKernels as error:
        return str(error)
    return ""


needs_native = pytest.mark.skipif(bool(why := why_not()), reason=f"no compiled kernels here: {why}")


on_any_processor = pytest.mark.usefixtures("kinds_of_processor")


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def assert_rounds_to(found: Tensor, expected: Tensor, ulps: float = 2) -> None:
    """Equal but for the rounding to bfloat16, of 1/256."""
    torch.testing.assert_close(
        found.float(), expected.float(), atol=ulps / 256 / 8, rtol=ulps / 256
    )


@needs_native
@pytest.mark.parametrize("tokens", [1, 3, 700])
def test_norm(tokens):
    kernels, _ = kernels_of(config_with())
    x, weight = draw(tokens, 576), draw(576, seed=2).float()
    before = x.clone()
    assert_rounds_to(kernels.norm(weight, 1e-5)(x), TorchNorm(weight, 1e-5)(x))
    assert torch.equal(x, before)


@needs_native
def test_norm_of_heads_in_place_leaves_what_is_beside_them():
    kernels, _ = kernels_of(config_with())
    qkv, weight = draw(5, 10 * 64), draw(8, 64, seed=2).float()
    both = qkv[:, : 8 * 64].view(5, 8, 64)
    expected, beside = TorchNorm(weight, 1e-6)(both), qkv[:, 8 * 64 :].clone()
    kernels.norm(weight, 1e-6).apply_(both)
    assert_rounds_to(both, expected)
    assert torch.equal(qkv[:, 8 * 64 :], beside)


@needs_native
@pytest.mark.parametrize("tokens", [1, 40])
def test_rotation(tokens):
    """Of the queries, as attention sees them, and of the keys that are written."""
    config = config_with()
    step = Step(config, 16, [(0, 1)] * tokens)
    other = Step(config, 16, [(0, 1)] * tokens)
    angles = (
        torch.rand(tokens, config.head_dim // 2, generator=torch.Generator().manual_seed(4)) * 6
    )
    found, expected = step.qkv.clone(), step.qkv.clone()
    out = torch.empty(tokens, config.num_heads * config.head_dim, dtype=BF16)
    for kernels, qkv, each in (
        (step.kernels, found, step),
        (TorchKernels(other.layout, CPU), expected, other),
    ):
        plan = kernels.plan_group(each.rows, tokens, 0)
        kernels.attend(qkv, kernels.rotation(angles, 1.25, torch.float32), plan, 1, each.kv, out)
    assert_rounds_to(found, expected)
    seen = ~torch.isnan(other.kv.positions)
    assert_rounds_to(step.kv.positions[seen], other.kv.positions[seen])


class Step:
    """Rows of a step with random KV behind them, in blocks at random places; what none sees is NaN."""

    def __init__(self, config, block_size: int, rows: list[tuple[int, int]]) -> None:
        """rows: positions known before, positions fed; decode rows first."""
        self.config = config
        self.kernels, self.layout = kernels_of(config, block_size)
        self.group = self.layout.groups[0]
        counts = [-(-(past + fed) // block_size) for past, fed in rows]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5)).tolist()
        self.kv = KVMemory(self.layout, len(order), "cpu")
        self.kv.blocks.fill_(torch.nan)
        self.rows = []
        for number, ((past, fed), count) in enumerate(zip(rows, counts, strict=True)):
            gone = self.group.first_visible(past) // block_size
            table = Table(gone, order[gone:count])
            order = order[count:]
            end = past + fed
            self.rows.append(Row(str(number), [0] * end, end, past, end, (table,), GREEDY, 0))
            seen = self.kv.blocks[table.blocks][:, 1]  # of slot 1
            flat = seen.reshape(len(table.blocks) * block_size, -1)
            low, high = (x - gone * block_size for x in (self.group.first_visible(past), past))
            flat[low:high] = draw(high - low, flat.shape[1], seed=number)
            self.kv.blocks[table.blocks, 1] = flat.view_as(seen)
        tokens = sum(fed for _, fed in rows)
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = draw(tokens, width, seed=99)
        self.decodes = sum(fed == 1 for _, fed in rows)

    def run(self) -> Tensor:
        """Checks what is written to the KV; returns what is read from it."""
        plan = self.kernels.plan_group(self.rows, self.decodes, 0)
        out = torch.full((len(self.qkv), self.config.num_heads * self.config.head_dim), torch.nan)
        out = out.to(BF16)
        written = self.kv.positions.clone()
        size, slots = self.layout.block_size, self.layout.layers_per_group
        token = 0
        for row in self.rows:
            (table,) = row.tables
            for position in range(row.start, row.end):
                block = table.blocks[position // size - table.first]
                place = (block * slots + 1) * size + position % size
                written[place] = self.qkv[token, out.shape[1] :]
                token += 1
        self.kernels.attend(self.qkv.clone(), None, plan, 1, self.kv, out)
        assert torch.equal(self.kv.positions.view(torch.int16), written.view(torch.int16))
        return out

    def expected(self) -> Tensor:
        """From the KV as it was left, in float64."""
        config, dim = self.config, self.config.head_dim
        out, token = [], 0
        for row in self.rows:
            (table,) = row.tables
            seen = self.kv.blocks[table.blocks, 1].reshape(-1, 2, config.num_kv_heads, dim).double()
            fed = row.end - row.start
            query = self.qkv[token : token + fed, : config.num_heads * dim].double()
            query = query.view(fed, config.num_heads, dim)
            token += fed
            for i in range(fed):
                position = row.start + i
                base = table.first * self.layout.block_size
                own = seen[self.group.first_visible(position) - base : position + 1 - base]
                keys, values = (
                    x.repeat_interleave(config.num_heads // config.num_kv_heads, 1)
                    for x in own.unbind(1)
                )
                scores = torch.einsum("hd,khd->hk", query[i], keys) / math.sqrt(dim)
                out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values).flatten())
        return torch.stack(out)


@needs_native
def test_pytorchs_default_dtype_changes_nothing():
    rows = [(300, 1), (64, 1), (290, 130)]
    expected = Step(config_with(), 16, rows).run()
    torch.set_default_dtype(BF16)
    try:
        assert torch.equal(Step(config_with(), 16, rows).run(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


SHAPES = [(6, 2, 64), (9, 3, 64), (14, 2, 64), (4, 4, 128), (4, 1, 256), (5, 1, 192)]


@needs_native
@on_any_processor
@pytest.mark.parametrize("window", [None, 33, 200])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_attention(heads, kv_heads, dim, window):
    rows = [
        (300, 1),
        (299, 1),
        (64, 1),
        (63, 1),
        (15, 1),
        (0, 1),
        (0, 2),
        (290, 130),
        (31, 33),
        (7, 5),
    ]
    step = Step(config_with(heads, kv_heads, dim, window), 16, rows)
    found = step.run()
    torch.testing.assert_close(found.double(), step.expected(), atol=0.02, rtol=0.02)


@needs_native
@on_any_processor
@pytest.mark.parametrize("block_size", [1, 7, 16, 100])
def test_attention_over_blocks_of_any_size(block_size):
    step = Step(config_with(window=70), block_size, [(300, 1), (64, 1), (0, 1), (130, 150)])
    found = step.run()
    torch.testing.assert_close(found.double(), step.expected(), atol=0.02, rtol=0.02)


@needs_native
@on_any_processor
@pytest.mark.parametrize("threads", [2, 3])
def test_a_decode_row_is_the_same_whatever_is_beside_it_and_whoever_computes(threads):
    step = Step(config_with(), 16, [(300, 1), (290, 1), (64, 1), (0, 1), (50, 40)])
    found = step.run()
    others = list(step.rows)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(step.run(), found)
        queries = step.qkv
        for place in range(4):
            step.rows, step.qkv, step.decodes = (
                [others[place]],
                queries[place : place + 1].clone(),
                1,
            )
            assert torch.equal(step.run()[0], found[place])
    finally:
        torch.set_num_threads(before)


@needs_native
def test_a_system_that_refuses_amx_is_told(monkeypatch):
    library = native.load()

    class Refusing:
        has_amx = staticmethod(lambda: -1)

        def __getattr__(self, name):
            return getattr(library, name)

    monkeypatch.setattr(native, "load", Refusing)
    with pytest.raises(NoNativeKernels, match="does not let this process use AMX"):
        kernels_of(config_with())


@needs_native
@on_any_processor
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33, 300])
@pytest.mark.parametrize("width", [32, 96, 704])
def test_products_with_packed_weights(kind, tokens, width):
    """Of several weights, one below the other: as exact as the rounding of these, and of the result, to
    bfloat16; and for a token the same whatever is beside it."""
    parts = [quantized(kind, rows, width, rows) for rows in (48, 16, 96)]
    width = parts[0].shape[1]
    x, residual = draw(tokens, width), draw(tokens, 160, seed=2)
    product = kernels_of(config_with())[0].pack(parts, alone=False)
    weights = torch.cat([p.dequantize(torch.float32) for p in parts])
    exact, rounded = (x.double() @ w.double().T for w in (weights, weights.to(BF16)))
    found = product(x)
    assert error(found, exact) < 1.25 * error(rounded.to(BF16), exact)
    exact, rounded = (each + residual.double() for each in (exact, rounded))
    assert error(product(x, residual), exact) < 1.25 * error(rounded.to(BF16), exact)
    for place in {0, tokens // 2, tokens - 1}:
        assert torch.equal(product(x[place : place + 1])[0], found[place])
    assert torch.equal(product(x[: tokens // 2 + 1]), found[: tokens // 2 + 1])
    assert product.pays_for(x)


@needs_native
@on_any_processor
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("tokens", [1, 20, 50])
def test_gated_products_with_packed_weights(kind, activation, tokens):
    parts = [quantized(kind, 48, 96, seed) for seed in (1, 2)]
    x = draw(tokens, parts[0].shape[1])
    exact, rounded = (
        gate(torch.cat([x.double() @ p.dequantize(dtype).double().T for p in parts], 1), activation)
        for dtype in (torch.float32, BF16)
    )
    product = kernels_of(config_with())[0].pack(parts, alone=True)
    found = product.gated(x, activation)
    assert error(found, exact) < 1.25 * error(rounded.to(BF16), exact)
    assert torch.equal(product.gated(x[-1:], activation)[0], found[-1])


@pytest.fixture(scope="module", params=["-march=native", "-mno-avx512f"])
def float32_kernels(request, tmp_path_factory) -> NativeFloat32Kernels:
    """As they are built here, and where there is AVX2 alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("CC", f"gcc {request.param}")
        try:
            layout = layout_for(config_with(), 16, torch.float32)
            return NativeFloat32Kernels(layout, CPU)
        except NoNativeKernels as error:
            pytest.skip(f"no compiled kernels here: {error}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 7, 48, 49, 64, 65])
@pytest.mark.parametrize("width", [32, 96, 448])
def test_products_in_float32_with_packed_weights(float32_kernels, kind, tokens, width):
    """As exact as with the same weights dequantised, and the same for a row whatever is beside it."""
    parts = [quantized(kind, rows, width, rows) for rows in (48, 16, 96)]
    width = parts[0].shape[1]
    x, residual = draw(tokens, width).float(), draw(tokens, 160, seed=2).float()
    product = float32_kernels.pack(parts, alone=False)
    exact = x.double() @ torch.cat([p.dequantize(torch.float32) for p in parts]).double().T
    assert error(product(x), exact) < 1e-6
    assert error(product(x, residual), exact + residual.double()) < 1e-6
    gated = float32_kernels.pack([*parts, *parts], alone=True).gated(x, "silu")
    assert error(gated, gate(torch.cat([exact, exact], dim=1), "silu")) < 1e-6
    assert torch.equal(product(x)[-1:], product(x[-1:].clone()))
    assert product.pays_for(x) == (tokens <= FLOAT32_ROWS_MAX)
    assert float32_kernels.pack(parts, alone=True).pays_for(x)


def transformers_model(architecture: str) -> transformers.PreTrainedModel:
    """A random one of the family, with heads of 64."""
    wide = SIZES | {"head_dim": 64, "initializer_range": 0.05}
    builders = {
        "llama": lambda: transformers.LlamaConfig(**wide),
        "qwen2": lambda: transformers.Qwen2Config(**wide | {"num_attention_heads": 6, "hidden_size": 384}),
        "qwen3-mixed": lambda: transformers.Qwen3Config(
            **wide, use_sliding_window=True, sliding_window=33,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
        ),
        "smollm3": lambda: transformers.SmolLM3Config(
            **wide | {"hidden_size": 384}, no_rope_layers=[1, 1, 1, 0]
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(**wide | GEMMA3 | {"head_dim": 64}),
    }  # fmt: skip
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(builders[architecture]()).eval()


@needs_native
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3-mixed", "smollm3", "gemma3"])
def test_a_model_is_as_close_to_float32_with_either_kernels(architecture):
    """In several chunks and decode steps, with all that the families have of their own."""
    model = transformers_model(architecture)
    config, weights = config_of(model), weights_of(model)
    found = []
    for is_native, dtype in ((False, torch.float32), (False, BF16), (True, BF16)):
        driver = Driver(config, weights, dtype=dtype, num_blocks=1024)
        if is_native:
            kernels = NativeKernels(config, driver.layout)
            driver.model = LlamaModel(config, weights, driver.layout, kernels=kernels)
        tokens = [[7 * i % 300 for i in range(n)] for n in (210, 40, 1)]
        requests = [driver.add(t) for t in tokens]
        logits = []
        with torch.inference_mode():
            for lengths in ((100, 30), (100, 9), (9, 1, 1), (1,)):
                rows = [driver.row(r, n) for r, n in zip(requests, lengths, strict=False)]
                logits.append(driver.model.forward(driver.model.plan(rows, {}), driver.kv))
        found.append(torch.cat(logits).float())
        driver.close()
    exact, *others = found
    of_torch, of_native = ((logits - exact).abs() for logits in others)
    assert of_torch.mean() < 0.02 * exact.std()
    assert of_native.mean() < 1.25 * of_torch.mean()
    assert of_native.max() < 1.5 * of_torch.max()
