"""Every tensor format, against the ``gguf`` package's own dequantisation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from ebbtide.errors import InputError
from ebbtide.models import dequantize as ours

QUANTISED = [name for name in ours.known_types() if name not in ("F32", "F16", "F64", "BF16")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", QUANTISED)
def test_any_bytes_mean_what_gguf_says(name: str, dtype: torch.dtype) -> None:
    kind = Kind[name]
    values, size = GGML_QUANT_SIZES[kind]
    rows, blocks = 3, 5
    raw = np.random.default_rng(1).integers(0, 256, (rows, blocks * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(raw, kind)).to(dtype)
        found = ours.dequantize(raw.reshape(-1), name, (rows, blocks * values), dtype)
    assert found.dtype == dtype
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_tensors_longer_than_one_piece_keep_every_value(name: str) -> None:
    rows = ours.BLOCKS_PER_PIECE // 2 + 3  # of three blocks each: a piece ends within a row
    values = np.random.default_rng(2).standard_normal((rows, 96)).astype(np.float32)
    raw = gguf.quantize(values, Kind[name])
    expected = torch.from_numpy(gguf.dequantize(raw, Kind[name]))
    found = ours.dequantize(raw.reshape(-1), name, values.shape, torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "stored"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)],
)
def test_plain_formats_are_only_cast_and_never_share_memory(name: str, stored: torch.dtype) -> None:
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(3)).to(stored)
    raw = values.clone().view(torch.uint8).reshape(-1).numpy()
    found = ours.dequantize(raw, name, (4, 6), torch.float32)
    raw[:] = 0
    assert torch.equal(found, values.float())


def test_a_format_that_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"Q8_1 cannot be read; these can: BF16, F16.* Q4_0"):
        ours.dequantize(np.zeros(40, np.uint8), "Q8_1", (32,), torch.float32)
