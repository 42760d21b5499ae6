"""The paged KV memory on the device, and how it is laid out.

A block is one contiguous byte range that holds ``block_size`` positions for all layers of one
group::

    kv[block] = [layers_per_group, block_size, 2 (key, value), kv_heads, head_dim]

A position's key and value lie side by side, so that writing a position is one copy per layer, and
a block's share of one layer is one run of bytes, so that gathering a block is one copy per layer.
All groups hold equally many layers, so a block id names one block in the whole engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ebbtide.core.groups import KVGroup
from ebbtide.models.config import ModelConfig


@dataclass(frozen=True)
class KVLayout:
    """How KV bytes are laid out. ``layers[g]`` are the model's layers that group ``g`` serves."""

    groups: tuple[KVGroup, ...]
    layers: tuple[tuple[int, ...], ...]
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @cached_property
    def layers_per_group(self) -> int:
        return max(len(layers) for layers in self.layers)

    @cached_property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers_per_group, self.block_size, 2, self.kv_heads, self.head_dim)

    @cached_property
    def block_bytes(self) -> int:
        size = self.dtype.itemsize
        for extent in self.block_shape:
            size *= extent
        return size

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Of each layer of the model: its group, and its slot within the group's blocks."""
        return {
            layer: (group, slot)
            for group, layers in enumerate(self.layers)
            for slot, layer in enumerate(layers)
        }

    def describe(self) -> str:
        """Everything that gives the bytes of a block their meaning, for the namespace."""
        windows = [group.window for group in self.groups]
        return f"v2 {self.dtype} {self.block_shape} groups={windows} layers={self.layers}"


def layout_for(config: ModelConfig, block_size: int, dtype: torch.dtype) -> KVLayout:
    """Split the layers into groups of one attention pattern and of equal size.

    The group size is the number of layers of the rarest pattern, so that a model with 3 full and
    15 sliding layers becomes 1 + 5 groups of 3; where it does not divide, the last group of a
    pattern is padded with layers that nobody writes.
    """
    patterns: dict[int | None, list[int]] = {}
    for layer, window in enumerate(config.windows):
        patterns.setdefault(window, []).append(layer)
    size = min(len(layers) for layers in patterns.values())
    groups: list[KVGroup] = []
    split: list[tuple[int, ...]] = []
    for window, layers in patterns.items():
        for at in range(0, len(layers), size):
            groups.append(KVGroup(window))
            split.append(tuple(layers[at : at + size]))
    return KVLayout(
        tuple(groups), tuple(split), config.num_kv_heads, config.head_dim, block_size, dtype
    )


class KVMemory:
    """``num_blocks`` blocks on ``device``. Also moves a block's bytes from and to host memory.

    ``positions`` and ``runs`` are views of the same bytes: one row per position of a layer
    ([2 * kv_heads * head_dim] values), and one row per layer of a block (block_size such rows).
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str) -> None:
        self.layout = layout
        self.blocks = torch.zeros(
            (num_blocks, *layout.block_shape), dtype=layout.dtype, device=device
        )
        per_group, block_size = layout.layers_per_group, layout.block_size
        self.positions = self.blocks.view(num_blocks * per_group * block_size, -1)
        self.runs = self.blocks.view(num_blocks * per_group, -1)
        self._bytes = self.blocks.view(num_blocks, -1).view(torch.uint8)
        # On a CPU, numpy copies: PyTorch would start OpenMP threads in whoever moves a block.
        self._host = self._bytes.numpy() if self.blocks.device.type == "cpu" else None

    def populate(self) -> None:
        """Take all blocks from the system, which on a CPU gives them when they are first written."""
        if self._host is not None:
            self._host.fill(0)

    def load(self, block: int, source: Any) -> None:
        """Fill a block from ``source``: a uint8 array of ``block_bytes`` in host memory."""
        if self._host is None:
            self._bytes[block].copy_(torch.from_numpy(source))
        else:
            np.copyto(self._host[block], source)

    def store(self, block: int, target: Any) -> None:
        """Copy a block into ``target``: a writable uint8 array of ``block_bytes`` in host memory."""
        if self._host is None:
            torch.from_numpy(target).copy_(self._bytes[block])
        else:
            np.copyto(target, self._host[block])

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros."""
        if blocks:
            index = torch.tensor(blocks, device=self.blocks.device)
            self.blocks.index_fill_(0, index, 0)
