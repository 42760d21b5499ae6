"""A step as tensors: what is fed beside the rows' own tokens."""

from __future__ import annotations

import pytest
import torch

from ebbtide.engine.build import choose_kernels
from ebbtide.models import batch
from ebbtide.models.llama import LlamaModel

from .harness import Driver, weights_of
from .test_native import CPU, config_of, transformers_model


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_padding_is_nobodys(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes no logits but by rounding, and writes no KV."""
    made = transformers_model("llama")
    config, weights = config_of(made), weights_of(made)
    found, written = [], []
    for pad in (1, 16):
        monkeypatch.setattr(batch, "PAD", pad)
        driver = Driver(config, weights, dtype=torch.bfloat16, num_blocks=16)
        chosen = choose_kernels(kernels, config, driver.layout, CPU, torch.bfloat16)
        driver.model = LlamaModel(config, weights, driver.layout, kernels=chosen)
        driver.kv.blocks.fill_(torch.nan)
        rows = [driver.row(driver.add(range(n)), n) for n in (1, 50)]
        step = driver.model.plan(rows, {})
        assert len(step.tokens) == (51 if pad == 1 else 64)
        with torch.inference_mode():
            found.append(driver.model.forward(step, driver.kv).float())
        written.append(~driver.kv.blocks.isnan())
        driver.close()
    torch.testing.assert_close(found[0], found[1], atol=0.03, rtol=0.03)
    assert torch.equal(*written)


def test_few_tokens_and_float32_are_not_padded() -> None:
    made = transformers_model("llama")
    for dtype, count in ((torch.bfloat16, 31), (torch.bfloat16, 32), (torch.float32, 50)):
        driver = Driver(config_of(made), weights_of(made), dtype=dtype, num_blocks=16)
        assert (
            len(driver.model.plan([driver.row(driver.add(range(count)), count)], {}).tokens)
            == count
        )
        driver.close()
