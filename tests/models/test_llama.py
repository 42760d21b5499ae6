"""The model's parts: attention over ragged batches, packed products, the KV memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from ebbtide.models import attention
from ebbtide.models.attention import QUERY_TILE_CPU, attend_once
from ebbtide.models.gemma import every_nth_full
from ebbtide.models.kernels import TorchNorm
from ebbtide.models.kv import KVMemory, layout_for
from ebbtide.models.linear import GatedLinear, Linear, can_pack
from ebbtide.models.llama import LlamaModel

from .harness import Driver, config_of, tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mixed():
    """Three sliding layers (window 33) and a full one."""
    return tiny("qwen3-mixed")


def random_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(model, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def step_logits(driver: Driver, rows) -> torch.Tensor:
    with torch.inference_mode():
        return driver.model.forward(driver.model.plan(rows, {}), driver.kv)


@pytest.mark.parametrize("chunks", [[700], [1, 699], [129, 64, 300, 207], [350, 350]])
def test_long_prefills_in_any_chunks(mixed, chunks):
    """Many tiles of queries, and windows far behind the end."""
    tokens = random_tokens(700)
    driver = Driver(config_of(mixed), mixed.state_dict(), block_size=8, num_blocks=1024)
    request = driver.add(tokens)
    for chunk in chunks:
        logits = step_logits(driver, [driver.row(request, chunk)])
    torch.testing.assert_close(logits[0], logits_of(mixed, tokens), atol=1e-3, rtol=1e-3)


def test_decodes_of_very_different_lengths_share_a_step(mixed, monkeypatch):
    """Cut into several attention calls by waste and by bytes, in an order that is not the plan's."""
    monkeypatch.setattr(attention, "BUCKET_WASTE_BLOCKS", 3)
    monkeypatch.setattr(attention, "BUCKET_BYTES", 1 << 15)
    driver = Driver(config_of(mixed), mixed.state_dict(), block_size=8, num_blocks=1024)
    lengths = [3, 260, 40, 41, 39, 1, 130, 258, 8, 9, 16, 17]
    prompts = [random_tokens(n + 1, seed=n) for n in lengths]
    requests = [driver.add(prompt) for prompt in prompts]
    step_logits(driver, [driver.row(r, n) for r, n in zip(requests, lengths, strict=True)])
    rows = [driver.row(request, 1) for request in requests]
    batch = driver.model.plan(rows, {})
    assert all(len(group.buckets) > 3 for group in batch.groups[3:])
    logits = step_logits(driver, rows)
    expected = torch.stack([logits_of(mixed, prompt) for prompt in prompts])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


def test_a_window_reads_only_its_window(mixed):
    """The work of a late chunk in a sliding group does not grow with what lies behind it."""
    driver = Driver(config_of(mixed), mixed.state_dict(), block_size=8, num_blocks=1024)
    request = driver.add(random_tokens(600))
    driver.row(request, 500)
    batch = driver.model.plan([driver.row(request, 100)], {})
    for spec, group in zip(driver.layout.groups, batch.groups, strict=True):
        (prefill,) = group.prefills
        keys = 600 if spec.window is None else 100 + spec.window - 1
        assert keys <= len(prefill.index[0]) * 8 < keys + 16
        for tile in prefill.tiles:
            if spec.window is not None:
                assert tile.high - tile.low <= QUERY_TILE_CPU + spec.window - 1


def test_the_masks_of_a_step_are_views_of_one_of_a_tile_and_its_keys(mixed):
    """Memory for a prompt fed at once does not grow with the square of its length."""
    driver = Driver(config_of(mixed), mixed.state_dict(), block_size=8, num_blocks=2048)
    requests = [driver.add(random_tokens(n, seed=n)) for n in (700, 1100, 90)]
    rows = [driver.row(request, request.prompt) for request in requests]
    batch = driver.model.plan(rows, {})
    for group in batch.groups:
        tiles = [tile for prefill in group.prefills for tile in prefill.tiles]
        assert len(tiles) == 3 + 5 + 1
        for tile in tiles:
            assert tile.mask.shape == (1, tile.last - tile.first, tile.high - tile.low)
        storages = {t.mask.untyped_storage().data_ptr(): t.mask.untyped_storage() for t in tiles}
        assert len(storages) == 1
        (storage,) = storages.values()
        assert storage.nbytes() <= QUERY_TILE_CPU * 1100 * driver.layout.dtype.itemsize


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_an_attention_call_is_softmax_of_products(queries, masked):
    generator = torch.Generator().manual_seed(2)
    rows, heads, kv_heads, dim, positions = 6, 6, 2, 16, 29
    query = torch.randn(rows, queries, heads, dim, generator=generator)
    keys, values = torch.randn(2, rows, kv_heads, positions, dim, generator=generator)
    mask = None
    if masked:
        hidden = torch.rand(rows, queries, positions, generator=generator) < 0.4
        mask = torch.where(hidden, -torch.inf, 0.0)
        mask[..., -1] = 0
    found = attend_once(query, keys, values, mask)
    assert found.shape == query.shape
    repeated = [x.repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values)]
    scores = query.transpose(1, 2) @ repeated[0].transpose(2, 3) * dim**-0.5
    if mask is not None:
        scores += mask[:, None]
    slow = (scores.softmax(-1) @ repeated[1]).transpose(1, 2)
    torch.testing.assert_close(found, slow, atol=1e-5, rtol=1e-5)


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    return functional.silu(x) if activation == "silu" else functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_products_with_fixed_weights(dtype, rows, activation):
    """Packed where the machine does, or not: the same numbers, within the type's rounding."""
    generator = torch.Generator().manual_seed(4)
    weight, up = torch.randn(2, 48, 32, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    x = torch.randn(rows, 32, generator=generator).to(dtype)
    residual = torch.randn(rows, 48, generator=generator).to(dtype)
    wide = functional.linear(x.float(), weight.float(), bias.float())
    gate = activated(wide - bias.float(), activation)
    gated = gate * functional.linear(x.float(), up.float())
    near = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
    linear = Linear(weight, bias)
    torch.testing.assert_close(linear(x).float(), wide, **near)
    torch.testing.assert_close(linear.add(x, residual).float(), wide + residual.float(), **near)
    product = GatedLinear((weight, up), activation=activation)
    torch.testing.assert_close(product(x).float(), gated, **near)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 4])
def test_small_batches_in_float32(rows, activation):
    """Weights kept in float16 beside bfloat16 give the more exact of two results."""
    generator = torch.Generator().manual_seed(4)
    weight, up = torch.randn(2, 48, 32, generator=generator).to(torch.bfloat16)
    bias = torch.randn(48, generator=generator).to(torch.bfloat16)
    x = torch.randn(rows, 32, generator=generator)
    linear, gated = Linear(weight, bias, True), GatedLinear((weight, up), True, activation)
    if not linear.takes_float32:
        pytest.skip("no such product on this machine")
    wide = functional.linear(x, weight.float(), bias.float())
    torch.testing.assert_close(linear(x), wide, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(linear.add(x, wide), wide + wide, atol=1e-4, rtol=1e-4)
    gate = activated(wide - bias.float(), activation)
    expected = gate * functional.linear(x, up.float())
    torch.testing.assert_close(gated(x), expected, atol=1e-4, rtol=1e-4)


def test_weights_that_float16_does_not_hold_stay_bfloat16(mixed):
    weight = torch.full((8, 8), 1e5, dtype=torch.bfloat16)
    assert not Linear(weight, small_batches=True).takes_float32
    weights = {name: value * 1e5 for name, value in mixed.state_dict().items()}
    driver = Driver(config_of(mixed), weights, dtype=torch.bfloat16)
    driver.run([driver.add([1, 2, 3])], 512, 3)
    driver.close()


def test_only_bfloat16_weights_on_a_cpu_are_packed():
    assert not can_pack(torch.zeros(8, 8))
    assert not can_pack(torch.zeros(8, 8, dtype=torch.bfloat16, device="meta"))


def test_rms_norm():
    x, weight = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(6)).unbind()
    expected = functional.rms_norm(x, (48,), weight[0], 1e-5)
    before = x.clone()
    torch.testing.assert_close(TorchNorm(weight[0], 1e-5)(x), expected)
    assert torch.equal(x, before)


def test_populating_writes_every_block(mixed):
    kv = KVMemory(layout_for(config_of(mixed), 8, torch.float32), 5, "cpu")
    kv.blocks.fill_(torch.nan)
    kv.populate()
    assert not kv.blocks.any()


def test_groups_of_one_size_and_one_pattern(mixed):
    layout = layout_for(config_of(mixed), 16, torch.float32)
    assert [group.window for group in layout.groups] == [33, 33, 33, None]
    assert layout.layers == ((0,), (1,), (2,), (3,))
    assert layout.places == {0: (0, 0), 1: (1, 0), 2: (2, 0), 3: (3, 0)}
    assert layout.block_bytes == 1 * 16 * 2 * 2 * 24 * 4


@pytest.mark.parametrize(
    ("layers", "full", "groups", "size"),
    [(18, 3, 1 + 5, 3), (26, 4, 1 + 6, 4), (34, 5, 1 + 6, 5), (48, 8, 1 + 5, 8), (6, 1, 1 + 5, 1)],
)
def test_groups_of_gemma_3(mixed, layers, full, groups, size):
    """The published sizes: where the sliding layers do not divide, the last group is padded."""
    windows = every_nth_full(512, layers, 6)
    config = replace(config_of(mixed), num_layers=layers, windows=windows)
    layout = layout_for(config, 16, torch.float32)
    assert len(layout.groups) == groups
    assert layout.layers_per_group == size
    patterns = dict(zip(layout.layers, layout.groups, strict=True))
    for held, group in patterns.items():
        assert {windows[layer] for layer in held} == {group.window}
    assert sorted(layer for held in patterns for layer in held) == list(range(layers))
    assert sum(len(h) for h, group in patterns.items() if group.window is None) == full


def test_a_block_moves_as_one_range_of_bytes(mixed):
    layout = layout_for(config_of(mixed), 16, torch.bfloat16)
    kv = KVMemory(layout, 4, "cpu")
    content = np.random.default_rng(1).integers(0, 255, layout.block_bytes, dtype=np.uint8)
    kv.load(2, content)
    back = np.empty_like(content)
    kv.store(2, back)
    assert (back == content).all()
    assert not kv.blocks[[0, 1, 3]].any()
    kv.clear([2])
    assert not kv.blocks.any()


def test_a_missing_weight_is_named(mixed):
    config = config_of(mixed)
    weights = dict(mixed.state_dict())
    del weights["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(KeyError, match=r"model.layers.2.mlp.up_proj.weight"):
        LlamaModel(config, weights, layout_for(config, 16, torch.float32))
