"""From the bytes of a GGML tensor to a torch tensor.

The formats that small models come in are done here, a piece at a time, straight into the wanted
dtype; all others go through ``gguf.quants.dequantize``. Both compute in float32 and round once, so
the values are the same either way.

A piece is just too small for torch to split it over threads. Tensors are read in parallel already,
and torch's threads, which spin while they wait for each other, can slow that down a hundredfold on a
machine that has other work (measured).

Formats of GGML (ggml-common.h): a block of 32 values shares a float16 scale d, and in the ``_1``
formats a float16 minimum m; value = d * q, or d * q + m. Low nibbles are values 0..15 of the block,
high nibbles 16..31.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ebbtide.errors import InputError

VALUES_PER_PIECE = 32_000  # torch works on up to 32768 values in one thread
BLOCKS_PER_PIECE = VALUES_PER_PIECE // 32


def known_types() -> list[str]:
    """Names of the tensor types that can be read."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize as reference

    found = set(_PLAIN)
    for kind in GGMLQuantizationType:
        try:
            reference(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        found.add(kind.name)
    return sorted(found)


def dequantize(
    raw: np.ndarray, kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """``raw``: the tensor's bytes (uint8). Returns a new tensor of ``shape`` and ``dtype``.

    Raises ``InputError`` where ``kind`` is not a format that can be read.
    """
    if kind in _PLAIN:
        return _cast(torch.from_numpy(raw).view(_PLAIN[kind]), dtype).view(shape)
    if kind in _BLOCKS:
        block_bytes, unpack = _BLOCKS[kind]
        return _by_pieces(torch.from_numpy(raw).view(-1, block_bytes), unpack, dtype).view(shape)
    return _with_gguf(raw, kind, shape, dtype)


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of a flat tensor."""
    cast = torch.empty(len(values), dtype=dtype)
    for start in range(0, len(values), VALUES_PER_PIECE):
        cast[start : start + VALUES_PER_PIECE] = values[start : start + VALUES_PER_PIECE]
    return cast


def _by_pieces(
    blocks: torch.Tensor,
    unpack: Callable[[torch.Tensor, torch.Tensor], None],
    dtype: torch.dtype,
) -> torch.Tensor:
    values = torch.empty(len(blocks), 32, dtype=dtype)
    scratch = torch.empty(min(len(blocks), BLOCKS_PER_PIECE), 32)
    for start in range(0, len(blocks), BLOCKS_PER_PIECE):
        piece = blocks[start : start + BLOCKS_PER_PIECE]
        into = scratch[: len(piece)]
        unpack(piece, into)
        values[start : start + len(piece)] = into
    return values


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float16).float()


def _q8_0(blocks: torch.Tensor, into: torch.Tensor) -> None:
    torch.mul(blocks[:, 2:].view(torch.int8), _halves(blocks[:, :2]), out=into)


def _q4_0(blocks: torch.Tensor, into: torch.Tensor) -> None:
    into[:, :16] = blocks[:, 2:] & 15
    into[:, 16:] = blocks[:, 2:] >> 4
    into.sub_(8).mul_(_halves(blocks[:, :2]))


def _q4_1(blocks: torch.Tensor, into: torch.Tensor) -> None:
    scales = _halves(blocks[:, :4])
    into[:, :16] = blocks[:, 4:] & 15
    into[:, 16:] = blocks[:, 4:] >> 4
    into.mul_(scales[:, :1]).add_(scales[:, 1:])


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_BLOCKS = {"Q8_0": (34, _q8_0), "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1)}


def _with_gguf(
    raw: np.ndarray, kind: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as reference
    from gguf.quants import quant_shape_to_byte_shape

    known = GGMLQuantizationType[kind]
    try:
        values = reference(raw.reshape(quant_shape_to_byte_shape(shape, known)), known)
    except NotImplementedError:
        raise InputError(
            f"tensor type {kind} cannot be read; these can: {', '.join(known_types())}"
        ) from None
    flat = torch.from_numpy(np.ascontiguousarray(values)).view(-1)
    return (flat if dtype == torch.float32 else _cast(flat, dtype)).view(shape)
