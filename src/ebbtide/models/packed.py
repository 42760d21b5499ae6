"""Weights that stay as small as their file has them: 4-bit or 8-bit integers in groups of 32.

A group has a scale and a zero, and a value is scale * (q - 8) + zero for 4 bits, scale * q + zero for 8. All
of GGML's formats (ggml-common.h) with groups of 32 can be told so; integers of 5 bits become 8. PyTorch's
product, for 4 bits, takes scale and zero in bfloat16, so the integers stay what they are and these are
rounded like any weight in bfloat16.
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
# What PyTorch multiplies with, and what is enough without another form beside it.
KINDS_4_BITS = ("Q4_0", "Q4_1")
BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 8, "Q5_1": 8, "Q5_K": 8, "Q8_0": 8}
KINDS = tuple(BITS)
ROW_MULTIPLE = 16  # of output rows, that all products want

# Tokens per step up to which PyTorch's product is faster than the same in bfloat16, both without native
# kernels. ms per step of a 135M model, 4 bits and bfloat16, 2 threads: with AMX 9.2 and 19.5 for 1 token,
# 21.2 and 24.0 for 8, 27.2 and 26.8 for 10; without it, 22.4 and 31.4 for 8, 39 and 45 for 16. (The products
# alone would meet at 6 with AMX; but what lies between them is slower beside bfloat16 weights.)
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
        per_block = 256 if self.kind.endswith("_K") else GROUP
        blocks = torch.from_numpy(self.raw).view(rows * columns // per_block, -1)
        unpack = _unpack_256 if self.kind.endswith("_K") else _unpack_32
        integers, scales, zeros = unpack(blocks, self.kind)
        if BITS[self.kind] == 8:
            integers = integers.view(torch.int8)
        return integers.reshape(rows, columns), scales.view(rows, -1), zeros.view(rows, -1)


def _halves(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks.contiguous().view(torch.float16).float().unbind(1)


def _nibbles(packed: Tensor) -> Tensor:
    """[.., n] -> [.., 2, n]: the low halves of all bytes, then the high ones."""
    return torch.stack([packed & 15, packed >> 4], dim=-2)


def _unpack_32(blocks: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of one group: scale; minimum where the format is a _1; fifth bits, 32 of them; low bits."""
    if kind == "Q8_0":
        (scales,) = _halves(blocks[:, :2])
        return blocks[:, 2:], scales, torch.zeros_like(scales)
    head = 4 if kind.endswith("_1") else 2
    scales, *minimum = _halves(blocks[:, :head])
    zeros = minimum[0] if minimum else torch.zeros_like(scales)
    integers = _nibbles(blocks[:, -16:]).flatten(1)
    if BITS[kind] == 4:
        return integers, scales, zeros + 8 * scales if minimum else zeros
    fifth = (blocks[:, head : head + 4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    integers |= fifth.flatten(1) << 4
    if not minimum:
        integers -= 16  # below 0 it wraps, as int8 wants it
    return integers, scales, zeros


def _unpack_256(blocks: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of eight groups: scale and minimum of all; of each, 6 bits to multiply these with; fifth bits,
    those of one place in all groups in one byte; low bits of two groups in 32 bytes."""
    scale, minimum = _halves(blocks[:, :4])
    low, middle, high = blocks[:, 4:16].split(4, dim=1)
    factors = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], dim=1)
    of_minimum = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], dim=1)
    scales, zeros = scale[:, None] * factors, -minimum[:, None] * of_minimum
    integers = _nibbles(blocks[:, -128:].unflatten(1, (4, 32))).flatten(1, 2)
    if BITS[kind] == 4:
        return integers, scales, zeros + 8 * scales
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    return integers | ((blocks[:, None, 16:48] >> places) & 1) << 4, scales, zeros


def packs_4_bits(kinds: Collection[str]) -> bool:
    """Whether PyTorch has a product for weights of these formats, one below the other."""
    return set(kinds) <= set(KINDS_4_BITS) and hasattr(
        torch.ops.aten, "_weight_int4pack_mm_for_cpu"
    )


def packs_alike(kinds: Collection[str]) -> bool:
    """Whether weights of these formats have integers of one size, which compiled products multiply with."""
    return {BITS.get(kind) for kind in kinds} in ({4}, {8})


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
