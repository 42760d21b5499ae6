"""Weights that stay as small as their file has them: 4-bit or 8-bit integers in groups of 32.

A group has a scale d, and in Q4_1 a minimum m: value = d * (q - 8), or d * q + m; in Q8_0, d * q. PyTorch's
product with 4 bits takes value = scale * (q - 8) + zero, both in bfloat16, so the integers stay what they are
and scale and zero are rounded like any weight in bfloat16. It has none for Q8_0.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ebbtide.models.config import Activation
from ebbtide.models.dequantize import dequantize
from ebbtide.models.gates import gate

GROUP = 32
KINDS_4_BITS = ("Q4_0", "Q4_1")
KINDS = (*KINDS_4_BITS, "Q8_0")
ROW_MULTIPLE = 16  # of output rows, that all products want

# Tokens per step up to which PyTorch's product is faster than the same in bfloat16, where there are both. ms
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
        """Integers [out, in], of 4 bits as uint8, 0..15, of 8 bits as int8; then scales and zeros
        [out, in / 32], float32."""
        rows, columns = self.shape
        blocks = torch.from_numpy(self.raw).view(rows, columns // GROUP, -1)
        size = 32 if self.kind == "Q8_0" else 16
        halves = blocks[..., :-size].contiguous().view(torch.float16).float()
        scales = halves[..., 0]
        zeros = halves[..., 1] + 8 * scales if self.kind == "Q4_1" else torch.zeros_like(scales)
        integers = blocks[..., -size:]
        if self.kind == "Q8_0":
            return integers.reshape(rows, columns).view(torch.int8), scales, zeros
        integers = torch.cat([integers & 15, integers >> 4], dim=-1)
        return integers.view(rows, columns), scales, zeros


def packs_4_bits(kinds: Collection[str]) -> bool:
    """Whether PyTorch has a product for weights of these formats, one below the other."""
    return set(kinds) <= set(KINDS_4_BITS) and hasattr(
        torch.ops.aten, "_weight_int4pack_mm_for_cpu"
    )


def can_stay_packed(kind: str, shape: Sequence[int]) -> bool:
    """Whether there may be a product for a weight of this format and shape."""
    return (
        kind in KINDS and len(shape) == 2 and shape[0] % ROW_MULTIPLE == 0 and shape[1] % GROUP == 0
    )


class PackedProduct(Protocol):
    """The product with weights [out, in] that stay packed, for x [tokens, in] in bfloat16."""

    def pays_for(self, x: Tensor) -> bool:
        """Whether this is what x is to be multiplied with: it has few rows, or there is nothing else."""
        ...

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """``x @ weight.T + added``."""
        ...

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """``activation(x @ gate.T) * (x @ up.T)``, where the weights are gate, then up."""
        ...


class TorchPacked:
    """``PackedProduct``, of PyTorch's, in 0.625 bytes per weight.

    alone: it serves x of any number of rows. Many are multiplied with dequantised weights, each time anew,
    from the file's bytes, which are kept for that: 1.25 bytes per weight in all.
    """

    def __init__(self, parts: Sequence[Quantized], alone: bool = False) -> None:
        integers, scales, zeros = map(torch.cat, zip(*(p.unpack() for p in parts), strict=True))
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers.int(), 1)
        self._scales = torch.stack([scales.T, zeros.T], dim=-1).to(torch.bfloat16)
        self._parts = tuple(parts) if alone else ()

    def pays_for(self, x: Tensor) -> bool:
        return bool(self._parts) or len(x) <= TOKENS_MAX

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        if self._parts and len(x) > TOKENS_MAX_ALONE:
            wide = torch.cat([part.dequantize(torch.bfloat16) for part in self._parts])
            product = functional.linear(x, wide)
        else:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x, self._weight, GROUP, self._scales
            )
        return product if added is None else product.add_(added)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        return gate(self(x), activation)
