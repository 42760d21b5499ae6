"""From settings to kernels."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from ebbtide.engine.build import choose_kernels
from ebbtide.errors import InputError
from ebbtide.models import compiled
from ebbtide.models.config import ModelConfig, RopeConfig
from ebbtide.models.kernels import TorchKernels
from ebbtide.models.kv import layout_for
from ebbtide.models.native import NativeFloat32Kernels, NativeKernels

CPU, BF16 = torch.device("cpu"), torch.bfloat16
CONFIG = ModelConfig(
    architecture="llama", vocab_size=300, hidden_size=96, intermediate_size=96, num_layers=1,
    num_heads=2, num_kv_heads=1, head_dim=64, rms_eps=1e-5, max_length=512,
    rope=RopeConfig((1.0,) * 32), windows=(None,), rope_layers=(True,), qkv_bias=False,
    output_bias=False, qk_norm=False, tied_embeddings=True,
)  # fmt: skip


def choose(name: str, config: ModelConfig = CONFIG, dtype: torch.dtype = BF16) -> object:
    return choose_kernels(name, config, layout_for(config, 16, dtype), CPU, dtype)


def test_compiled_kernels_are_for_weights_as_wide_as_the_kv(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layout = layout_for(CONFIG, 16, BF16)
    with caplog.at_level(logging.WARNING):
        kernels = choose_kernels("auto", CONFIG, layout, CPU, torch.float32)
        assert type(kernels) is type(choose("torch")) is TorchKernels
    assert not caplog.records
    with pytest.raises(InputError, match="kernels=native is for a CPU, and weights of the same"):
        choose_kernels("native", CONFIG, layout, CPU, torch.float32)


def test_auto_says_once_why_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "_processor", lambda: "flags")
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose("auto"), TorchKernels)
    (record,) = caplog.records
    assert "CC names no-such-compiler, which is not found" in record.getMessage()
    with pytest.raises(InputError, match="kernels=native, but CC names no-such-compiler"):
        choose("native")


def test_a_model_of_other_sizes_is_told() -> None:
    config = replace(CONFIG, head_dim=32, rope=RopeConfig((1.0,) * 16))
    with pytest.raises(InputError, match="multiple of 64"):
        choose("native", config)
    assert isinstance(choose("auto", config), TorchKernels)


def test_auto_takes_them_where_it_can() -> None:
    try:
        compiled.load()
    except compiled.NoNativeKernels as why:
        pytest.skip(f"no compiled kernels here: {why}")
    assert isinstance(choose("auto", dtype=torch.float32), NativeFloat32Kernels)
    if torch.cpu._is_avx512_bf16_supported():
        assert isinstance(choose("auto"), NativeKernels)
