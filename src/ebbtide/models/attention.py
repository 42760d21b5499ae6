"""PyTorch's attention over a ragged batch of a step's rows, with paged KV.

The rows are in the order of ``models.batch``. Decode rows of similar length share a call::

    tokens  |d0|d1|d2|d3|.. prefill 0 ..|.. prefill 1 ..|
            |bucket |bkt|

``plan_group`` turns rows into the tensors of one KV group. ``attend`` then needs, per layer, one write of
the new keys and values and, per bucket and per prefill row, one gather of blocks and one attention call.
The rows of a bucket are padded to the longest; the heads that share a key head become the query axis, so
that a key is read once. A prefill row attends over its own blocks in tiles of queries, each over the keys
it can see: memory grows with the tile, and a window costs its window.

Nothing that was not written for a row reaches its result, not even as 0 * NaN: a block that a row
begins and does not fill is cleared first, and padding repeats a block of the row's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ebbtide.core.groups import KVGroup
from ebbtide.core.plan import Row
from ebbtide.models.kv import KVLayout, KVMemory

QUERY_TILE_CPU = 256  # queries per attention call: bounds the mask, and skips keys that none sees
QUERY_TILE = 1024
BUCKET_WASTE_BLOCKS = 32  # padding that costs about as much as one more attention call
BUCKET_BYTES = (
    16 << 20
)  # gathered per attention call at most: what stays in a CPU's last-level cache


@dataclass(frozen=True, slots=True)
class Bucket:
    """Decode rows [first, last) of the token axis that share an attention call.

    index: [slots, rows * blocks], rows of ``KVMemory.runs``.
    mask: [rows, 1, positions], added to the scores; None for a single row, which reads
    positions [low, high) of what it gathered.
    """

    first: int
    last: int
    index: tuple[Tensor, ...]
    mask: Tensor | None
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries [first, last) of the token axis over keys [low, high) of what the row gathered."""

    first: int
    last: int
    low: int
    high: int
    mask: Tensor  # [1, queries, keys], added to the scores


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prefill row. index: [slots, blocks], rows of ``KVMemory.runs``."""

    index: tuple[Tensor, ...]
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """What a step reads and writes in one KV group. write: [slots, tokens], rows of ``positions``."""

    write: tuple[Tensor, ...]
    buckets: tuple[Bucket, ...]
    prefills: tuple[Prefill, ...]


def plan_group(
    rows: list[Row], num_decodes: int, group: int, layout: KVLayout, device: torch.device
) -> GroupBatch:
    """rows: decode rows, longest first, then the others."""
    size, slots = layout.block_size, layout.layers_per_group
    write = places_of(rows, num_decodes, group, layout) + np.arange(slots)[:, None] * size
    return GroupBatch(
        torch.from_numpy(write).to(device).unbind(),
        tuple(_plan_buckets(rows[:num_decodes], group, layout, device)),
        plan_prefills(rows, num_decodes, group, layout, device),
    )


def places_of(
    rows: list[Row], num_decodes: int, group: int, layout: KVLayout
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[tokens]: where each token's key and value go, as rows of ``KVMemory.positions``, in slot 0."""
    size, slots = layout.block_size, layout.layers_per_group
    blocks: list[int] = []  # of every token
    offsets: list[int] = []
    for row in rows[:num_decodes]:
        first, ids = row.tables[group]
        block, offset = divmod(row.start, size)
        blocks.append(ids[block - first])
        offsets.append(offset)
    at = np.array(blocks, dtype=np.int64) * (slots * size) + np.array(offsets, dtype=np.int64)
    parts = [at]
    for row in rows[num_decodes:]:
        first, ids = row.tables[group]
        begin = row.start // size
        own = np.array(ids[begin - first : (row.end - 1) // size + 1 - first], dtype=np.int64)
        block, offset = np.divmod(np.arange(row.start, row.end), size)
        parts.append(own[block - begin] * (slots * size) + offset)
    return np.concatenate(parts)


def plan_prefills(
    rows: list[Row], num_decodes: int, group: int, layout: KVLayout, device: torch.device
) -> tuple[Prefill, ...]:
    """Those of the rows after the decode rows."""
    causal = _causal_mask(rows[num_decodes:], layout.groups[group], layout.dtype, device)
    token = num_decodes
    prefills = []
    for row in rows[num_decodes:]:
        prefills.append(_plan_prefill(row, token, group, layout, causal, device))
        token += row.end - row.start
    return tuple(prefills)


def _plan_buckets(
    rows: list[Row], group: int, layout: KVLayout, device: torch.device
) -> list[Bucket]:
    """Cut the decode rows, longest first, where padding would cost more than another call."""
    size = layout.block_size
    spec = layout.groups[group]
    blocks_max = max(1, BUCKET_BYTES * layout.layers_per_group // layout.block_bytes)
    buckets: list[Bucket] = []
    seen: list[tuple[list[int], int, int]] = []  # visible blocks; visible positions [low, high)
    longest = waste = 0
    for i, row in enumerate(rows):
        low = spec.first_visible(row.start)
        begin, last = low // size, row.start // size
        first, ids = row.tables[group]
        own = ids[begin - first : last + 1 - first]
        waste += longest - len(own)
        if seen and (
            waste > BUCKET_WASTE_BLOCKS
            or len(own) > longest
            or longest * (len(seen) + 1) > blocks_max
        ):
            buckets.append(_bucket(i - len(seen), seen, longest, layout, device))
            seen, longest, waste = [], len(own), 0
        longest = max(longest, len(own))
        seen.append((own, low - begin * size, row.end - begin * size))
    if seen:
        buckets.append(_bucket(len(rows) - len(seen), seen, longest, layout, device))
    return buckets


def _bucket(
    first: int,
    seen: list[tuple[list[int], int, int]],
    longest: int,
    layout: KVLayout,
    device: torch.device,
) -> Bucket:
    ids: list[int] = []
    for own, _, _ in seen:
        ids += own
        ids += own[-1:] * (longest - len(own))
    mask = None
    if len(seen) > 1:
        place = np.arange(longest * layout.block_size)
        low = np.array([low for _, low, _ in seen])[:, None]
        high = np.array([high for _, _, high in seen])[:, None]
        hidden = np.where((place >= low) & (place < high), np.float32(0), np.float32(-np.inf))
        mask = torch.from_numpy(hidden).to(device, layout.dtype)[:, None]
    _, low_0, high_0 = seen[0]
    return Bucket(first, first + len(seen), _slots(ids, layout, device), mask, low_0, high_0)


def _slots(ids: list[int], layout: KVLayout, device: torch.device) -> tuple[Tensor, ...]:
    """Rows of ``KVMemory.runs`` of these blocks, for each slot of the group."""
    slots = layout.layers_per_group
    index = np.array(ids, dtype=np.int64) * slots + np.arange(slots)[:, None]
    return torch.from_numpy(index).to(device).unbind()


def _spans(row: Row, spec: KVGroup, device: torch.device) -> list[tuple[int, int, int]]:
    """A prefill row's tiles: queries [low, high), and the first key that any of them sees."""
    tile = QUERY_TILE_CPU if device.type == "cpu" else QUERY_TILE
    return [
        (low, min(low + tile, row.end), spec.first_visible(low))
        for low in range(row.start, row.end, tile)
    ]


def _causal_mask(
    rows: list[Row], spec: KVGroup, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[queries, keys], large enough for each tile of these rows: 0 where the query sees the key, else
    -inf. The last key is the last query, so a tile's mask is this one's lower right corner."""
    spans = [span for row in rows for span in _spans(row, spec, device)]
    queries = max((high - low for low, high, _ in spans), default=0)
    keys = max((high - visible for _, high, visible in spans), default=0)
    distance = (
        torch.arange(queries, device=device)[:, None]
        - torch.arange(keys, device=device)
        + (keys - queries)
    )
    hidden = distance < 0
    if spec.window is not None:
        hidden |= distance >= spec.window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _plan_prefill(
    row: Row, token: int, group: int, layout: KVLayout, causal: Tensor, device: torch.device
) -> Prefill:
    size = layout.block_size
    spec = layout.groups[group]
    first, ids = row.tables[group]
    begin = spec.first_visible(row.start) // size
    index = _slots(ids[begin - first : (row.end - 1) // size + 1 - first], layout, device)
    base = begin * size  # position of the first key gathered
    at = token - row.start
    queries, keys = causal.shape
    tiles = []
    for low, high, visible in _spans(row, spec, device):
        mask = causal[None, queries - (high - low) :, keys - (high - visible) :]
        tiles.append(Tile(at + low, at + high, visible - base, high - base, mask))
    return Prefill(index, tuple(tiles))


def attend(qkv: Tensor, group: GroupBatch, slot: int, kv: KVMemory, out: Tensor) -> None:
    """One layer's attention. Writes the step's keys and values, then reads what each row sees.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], rotated. out: [tokens, heads * head_dim]. Where
    these are wider than the KV, they are rounded to it. Tokens behind those of the group's rows are left out.
    """
    qkv = qkv.to(kv.layout.dtype)
    kv_heads, dim = kv.layout.kv_heads, kv.layout.head_dim
    width = out.shape[1]
    write = group.write[slot]
    kv.positions.index_copy_(0, write, qkv[: len(write), width:])
    queries = qkv[:, :width].view(len(qkv), 1, -1, dim)
    results = out.view(len(qkv), 1, -1, dim)
    for bucket in group.buckets:
        rows = bucket.last - bucket.first
        seen = kv.runs.index_select(0, bucket.index[slot]).view(rows, -1, 2, kv_heads, dim)
        if bucket.mask is None:
            seen = seen[:, bucket.low : bucket.high]
        keys, values = seen.permute(2, 0, 3, 1, 4).unbind()
        of = slice(bucket.first, bucket.last)
        results[of] = attend_once(queries[of], keys, values, bucket.mask)
    attend_prefills(qkv, group.prefills, slot, kv, out)


def attend_prefills(
    qkv: Tensor, prefills: Sequence[Prefill], slot: int, kv: KVMemory, out: Tensor
) -> None:
    """The part of ``attend`` that reads what prefill rows see."""
    kv_heads, dim = kv.layout.kv_heads, kv.layout.head_dim
    queries = qkv[:, : out.shape[1]].view(len(qkv), 1, -1, dim)
    results = out.view(len(qkv), 1, -1, dim)
    for prefill in prefills:
        seen = kv.runs.index_select(0, prefill.index[slot]).view(1, -1, 2, kv_heads, dim)
        seen = seen.permute(2, 0, 3, 1, 4)
        for tile in prefill.tiles:
            keys, values = seen[:, :, :, tile.low : tile.high].unbind()
            of = slice(tile.first, tile.last)
            query = queries[of].transpose(0, 1)
            results[of] = attend_once(query, keys, values, tile.mask).transpose(0, 1)


def attend_once(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """One attention call, of PyTorch's fused kernel.

    query: [rows, queries, heads, dim]. keys, values: [rows, kv_heads, positions, dim]. mask:
    [rows or 1, queries, positions], added to the scores; None: everything is seen. Returns
    [rows, queries, heads, dim].
    """
    rows, queries, heads, dim = query.shape
    kv_heads = keys.shape[1]
    if mask is not None:
        mask = mask.unsqueeze(1)
    if queries == 1:  # the heads that share a key head become the query axis: a key is read once
        query = query.view(rows, kv_heads, -1, dim)
        result = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return result.view(rows, 1, heads, dim)
    query = query.transpose(1, 2)
    result = scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, enable_gqa=heads != kv_heads
    )
    return result.transpose(1, 2)
