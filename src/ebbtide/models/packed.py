"""Weights that stay as small as their file has them: 4-bit integers in groups of 32.

A group has a scale d, and in Q4_1 a minimum m: value = d * (q - 8), or d * q + m. PyTorch's product with
such weights takes value = scale * (q - 8) + zero, both in bfloat16, so the integers stay what they are and
scale and zero are rounded like any weight in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ebbtide.models.dequantize import dequantize

GROUP = 32
KINDS = ("Q4_0", "Q4_1")
BYTES = 0.5 + 4 / GROUP  # of a weight, with its share of scale and zero
ROW_MULTIPLE = 16  # of output rows, that PyTorch's product wants

# Tokens per step up to which 4-bit weights are faster than the same in bfloat16, where there are both. ms
# per step of a 135M model, 4 bits and bfloat16, 2 threads: with AMX 9.2 and 19.5 for 1 token, 21.2 and 24.0
# for 8, 27.2 and 26.8 for 10; without it, 22.4 and 31.4 for 8, 39 and 45 for 16.
# (The products alone would meet at 6 with AMX; but what lies between them is slower beside bfloat16 weights.)
TOKENS_MAX = 8 if torch.cpu._is_amx_tile_supported() else 16
# The same where the alternative is to dequantise them in every step.
TOKENS_MAX_ALONE = 32


class Quantized(NamedTuple):
    """A weight [out, in] as a GGUF file has it. raw: uint8, its bytes; kind: GGML's name of its format."""

    raw: np.ndarray
    kind: str
    shape: tuple[int, int]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return dequantize(self.raw, self.kind, self.shape, dtype)

    def unpack(self) -> tuple[Tensor, Tensor, Tensor]:
        """Integers 0..15 [out, in], uint8, then scales and zeros [out, in / 32], float32."""
        rows, columns = self.shape
        blocks = torch.from_numpy(self.raw).view(rows, columns // GROUP, -1)
        halves = blocks[..., :-16].contiguous().view(torch.float16).float()
        scales = halves[..., 0]
        zeros = halves[..., 1] + 8 * scales if self.kind == "Q4_1" else torch.zeros_like(scales)
        nibbles = blocks[..., -16:]
        integers = torch.cat([nibbles & 15, nibbles >> 4], dim=-1)
        return integers.view(rows, columns), scales, zeros


def can_stay_packed(kind: str, shape: Sequence[int]) -> bool:
    """Whether PyTorch has a product for a weight of this format and shape."""
    return (
        kind in KINDS
        and len(shape) == 2
        and shape[0] % ROW_MULTIPLE == 0
        and shape[1] % GROUP == 0
        and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    )


class Packed:
    """One or more weights [out, in], one below the other, in 0.625 bytes per weight.

    alone: there is no other form of them. Then larger steps dequantise them each time, from the file's bytes,
    which are kept for that: 1.25 bytes per weight in all.
    """

    def __init__(self, parts: Sequence[Quantized], alone: bool = False) -> None:
        integers, scales, zeros = map(torch.cat, zip(*(p.unpack() for p in parts), strict=True))
        self._tokens_max = TOKENS_MAX_ALONE if alone else TOKENS_MAX
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers.int(), 1)
        self._scales = torch.stack([scales.T, zeros.T], dim=-1).to(torch.bfloat16)
        self._parts = tuple(parts) if alone else ()

    def pays_for(self, x: Tensor) -> bool:
        """Whether x [tokens, in] has so few rows that this is the fastest form."""
        return len(x) <= self._tokens_max

    def __call__(self, x: Tensor) -> Tensor:
        """``x @ weight.T`` for x [tokens, in] in bfloat16."""
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._weight, GROUP, self._scales)

    def dequantize(self) -> Tensor:
        """The weight in bfloat16, where it is the only form."""
        return torch.cat([part.dequantize(torch.bfloat16) for part in self._parts])
