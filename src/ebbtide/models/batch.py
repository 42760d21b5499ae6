"""A step as tensors, worked out once for all layers.

The step's tokens lie on one axis, decode rows (one token each) first, longest first, then the
prefill rows, each a run::

    tokens  |d0|d1|d2|d3|.. prefill 0 ..|.. prefill 1 ..|

What attention needs to know of it, in each KV group, is its kernels' affair. In bfloat16, many tokens are
followed by some that are nobody's, up to a multiple of PAD: oneDNN generates code for each number of rows
that it meets, which took 25 ms for each new length of a prompt (135M model), and computes in tiles of 16
anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ebbtide.core.plan import Row
from ebbtide.models.kernels import Kernels
from ebbtide.models.kv import KVLayout

PAD = 16
PAD_FROM = 32  # tokens; as many rows or fewer are met again soon


@dataclass(frozen=True, slots=True)
class Batch:
    """A step, as tensors.

    tokens, positions: [tokens], more than the rows have where they are padded. last: [rows that sample]
    places on the token axis, in the plan's order. started: blocks that a row begins and does not fill.
    """

    tokens: Tensor
    positions: Tensor
    last: Tensor
    groups: tuple[object, ...]
    started: tuple[int, ...]


def plan_batch(
    rows: Sequence[Row],
    sampled: dict[int, int],
    layout: KVLayout,
    device: torch.device,
    kernels: Kernels,
) -> Batch:
    """Work out a step's tensors.

    sampled: row number -> token that the preceding step sampled, for rows with ``end > known``.
    """
    decodes = sorted((i for i, row in enumerate(rows) if row.end - row.start == 1),
                     key=lambda i: -rows[i].end)  # fmt: skip
    prefills = [i for i, row in enumerate(rows) if row.end - row.start > 1]
    order = decodes + prefills
    tokens: list[int] = []
    ends: dict[int, int] = {}
    for i in order:
        row = rows[i]
        tokens += row.tokens[row.start : min(row.end, row.known)]
        if row.end > row.known:
            tokens.append(sampled[i])
        ends[i] = len(tokens) - 1
    padding = -len(tokens) % PAD if len(tokens) > PAD_FROM and layout.dtype == torch.bfloat16 else 0
    tokens += [0] * padding
    spans = [np.arange(rows[i].start, rows[i].end) for i in order]
    positions = np.concatenate([*spans, np.zeros(padding, dtype=np.int64)])
    last = [ends[i] for i, row in enumerate(rows) if row.sampling is not None]
    started: list[int] = []
    groups = []
    for group in range(len(layout.groups)):
        ordered = [rows[i] for i in order]
        groups.append(kernels.plan_group(ordered, len(decodes), group))
        started += _started(rows, group, layout.block_size)
    return Batch(
        torch.tensor(tokens, device=device),
        torch.from_numpy(positions).to(device),
        torch.tensor(last, dtype=torch.int64, device=device),
        tuple(groups),
        tuple(started),
    )


def _started(rows: Sequence[Row], group: int, block_size: int) -> list[int]:
    """Blocks whose first position is written in this step, but not their last."""
    blocks = []
    for row in rows:
        block, filled = divmod(row.end, block_size)
        if filled and block * block_size >= row.start:
            first, ids = row.tables[group]
            blocks.append(ids[block - first])
    return blocks
