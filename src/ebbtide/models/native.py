"""The kernels in ``c``, for steps on a CPU: products with packed weights of 4 and 8 bits; in bfloat16 also
what is between the products, in one pass each, and attention that reads KV blocks where they are."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from ebbtide.core.plan import Row
from ebbtide.models.attention import places_of
from ebbtide.models.compiled import NoNativeKernels, load
from ebbtide.models.config import Activation, ModelConfig
from ebbtide.models.gates import gate
from ebbtide.models.kernels import Norm, Rotation, TorchKernels
from ebbtide.models.kv import KVLayout, KVMemory
from ebbtide.models.packed import (
    GROUP,
    PackedProduct,
    Quantized,
    packs_alike,
)

# Rows up to which packed weights are faster than the same in float32. ms for the layers of a 135M model, 2
# threads, Q4_0 and float32: with AVX2 alone 13 and 34 for 8 rows, 36 and 44 for 32, 51 and 50 for 48; with
# AVX-512 9 and 34, 23 and 43, 33 and 50.
FLOAT32_ROWS_MAX = 48
BF16, CPU = torch.bfloat16, torch.device("cpu")
EVERYTHING = 1 << 40  # a window that hides nothing


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row of several tokens, from ``first`` of the token axis on. table: its blocks that can be seen;
    keys: positions in these up to its last token."""

    first: int
    queries: int
    keys: int
    table: Tensor


@dataclass(frozen=True, slots=True)
class NativeGroup:
    """A step in one KV group. write, tables, decodes: as ``rotate_and_write`` and ``attend_decode`` say;
    prompts: its other rows."""

    write: Tensor
    tables: Tensor
    decodes: Tensor
    num_decodes: int
    num_parts: int
    window: int
    prompts: tuple[PromptRow, ...]


class NativeKernels:
    """``Kernels`` for activations and KV in bfloat16.

    Raises NoNativeKernels where this machine or the model's shape does not allow it.
    """

    takes_float32 = False
    packs_alone = True

    def __init__(self, config: ModelConfig, layout: KVLayout) -> None:
        if layout.head_dim % 64 or config.hidden_size % 16:
            raise NoNativeKernels(
                "they need heads of a multiple of 64 and a width of a multiple of 16; this model has "
                f"{layout.head_dim} and {config.hidden_size}"
            )
        assert layout.dtype == BF16
        self._layout = layout
        self._library = _declare(load())
        if not self._library.has_bf16():
            raise NoNativeKernels("this processor has no avx512_bf16")
        if self._library.has_amx() < 0:
            raise NoNativeKernels("the system does not let this process use AMX")
        self._part = self._library.part_size()
        sizes = (
            config.num_heads,
            layout.kv_heads,
            layout.head_dim,
            layout.block_size,
            layout.layers_per_group,
        )
        self._sizes = torch.tensor(sizes, device=CPU)
        self._part_values = config.num_heads * (layout.head_dim + 2)
        self._position_values = 2 * layout.kv_heads * layout.head_dim
        self._parts = Scratch(torch.float32)
        self._squares, self._x = Scratch(BF16), Scratch(BF16)

    def norm(self, weight: Tensor, eps: float) -> Norm:
        return NativeNorm(self._library, weight, eps)

    def rotation(self, angles: Tensor, scale: float, dtype: torch.dtype) -> Rotation:
        """Both [tokens, head_dim / 2], float32."""
        return Rotation(angles.cos() * scale, angles.sin() * scale)

    def packs(self, kinds: Collection[str]) -> bool:
        return packs_alike(kinds)

    def pack(self, parts: Sequence[Quantized], alone: bool) -> PackedProduct:
        return NativePacked(self._library, parts, self._x)

    def plan_group(self, rows: list[Row], num_decodes: int, group: int) -> NativeGroup:
        layout = self._layout
        spec = layout.groups[group]
        blocks: list[int] = []
        decodes: list[int] = []
        parts = 0
        for row in rows[:num_decodes]:
            origin, ids = self._seen(row, group)
            low, high = spec.first_visible(row.start) - origin, row.end - origin
            decodes += [len(blocks), low, high, parts]
            parts += -(-high // self._part) - low // self._part
            blocks += ids
        decodes += [len(blocks), 0, 0, parts]
        prompts = []
        token = num_decodes
        for row in rows[num_decodes:]:
            origin, ids = self._seen(row, group)
            queries = row.end - row.start
            table = torch.tensor(ids, device=CPU)
            prompts.append(PromptRow(token, queries, row.end - origin, table))
            token += queries
        return NativeGroup(
            torch.from_numpy(places_of(rows, num_decodes, group, layout)),
            torch.tensor(blocks, dtype=torch.int64, device=CPU),
            torch.tensor(decodes, device=CPU),
            num_decodes,
            parts,
            spec.window or EVERYTHING,
            tuple(prompts),
        )

    def _seen(self, row: Row, group: int) -> tuple[int, list[int]]:
        """The blocks from which a row reads or to which it writes, and the position where they begin: a
        part begins there, too. Before those that there are, some that are not read."""
        size, (first, ids) = self._layout.block_size, row.tables[group]
        begin = self._layout.groups[group].first_visible(row.start) // size
        origin = begin - begin % (math.lcm(size, self._part) // size)
        seen = ids[begin - first : (row.end - 1) // size + 1 - first]
        return origin * size, [0] * (begin - origin) + seen

    def attend(
        self,
        qkv: Tensor,
        rotation: Rotation | None,
        plan: object,
        slot: int,
        kv: KVMemory,
        out: Tensor,
    ) -> None:
        assert isinstance(plan, NativeGroup)
        assert _is_plain(qkv)
        assert _is_plain(out)
        library, sizes, memory = self._library, self._sizes.data_ptr(), kv.blocks.data_ptr()
        cos, sin = (t.data_ptr() for t in rotation) if rotation else (None, None)
        queries, results = qkv.data_ptr(), out.data_ptr()
        library.rotate_and_write(
            queries, memory, sizes, plan.write.data_ptr(), cos, sin, len(plan.write), slot
        )
        if plan.num_decodes:
            parts = self._parts.of(plan.num_parts * self._part_values)
            library.attend_decode(
                results, queries, memory, parts, sizes,
                plan.tables.data_ptr(), plan.decodes.data_ptr(), plan.num_decodes, slot,
            )  # fmt: skip
        for prompt in plan.prompts:
            keys = -(-prompt.keys // 32) * 32
            squares = self._squares.of(keys * self._position_values)
            library.attend_prefill(
                results + prompt.first * out.stride(0) * out.itemsize,
                queries + prompt.first * qkv.stride(0) * qkv.itemsize,
                memory, squares, sizes, prompt.table.data_ptr(),
                prompt.queries, prompt.keys, plan.window, slot,
            )  # fmt: skip


class NativeNorm:
    """``Norm``."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, eps: float) -> None:
        self._weight = weight.to(torch.float32).contiguous()
        self._apply, self._eps = library.rms_norm, eps
        self._heads = weight.shape[0] if weight.dim() == 2 else 1
        self._width = weight.shape[-1]

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        self._run(out, x.contiguous())
        return out

    def apply_(self, x: Tensor) -> None:
        self._run(x, x)

    def _run(self, out: Tensor, x: Tensor) -> None:
        assert x.dtype == BF16
        self._apply(
            out.data_ptr(), x.data_ptr(), self._weight.data_ptr(),
            len(x), self._heads, self._width, x.stride(0), self._eps,
        )  # fmt: skip


class NativeFloat32Kernels(TorchKernels):
    """``TorchKernels``, with products in float32 with packed weights. Raises NoNativeKernels."""

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        super().__init__(layout, device)
        self._library = _declare(load())

    def packs(self, kinds: Collection[str]) -> bool:
        return packs_alike(kinds)

    def pack(self, parts: Sequence[Quantized], alone: bool) -> PackedProduct:
        return NativeFloat32Packed(self._library, parts, alone)


class Order(Enum):
    """Of a group's weights of 16 outputs: output by output, input by input, or by pairs of inputs."""

    OUTPUTS = auto()
    INPUTS = auto()
    PAIRS = auto()


class Tiles:
    """Packed weights in blocks of 16 outputs, ordered as ``products.c`` (outputs), ``products_avx512.c``
    (pairs) and ``products_float32.c`` (inputs) say.

    dtype: of scales and zeros.
    """

    def __init__(self, parts: Sequence[Quantized], order: Order, dtype: torch.dtype) -> None:
        integers, scales, zeros = map(torch.cat, zip(*(p.unpack() for p in parts), strict=True))
        self.outputs, width = integers.shape
        self.groups = width // GROUP
        self.bits = 8 if integers.dtype == torch.int8 else 4
        shape = self.outputs // 16, self.groups
        tiles = integers.view(shape[0], 16, self.groups, GROUP).transpose(1, 2)
        if order is Order.PAIRS:
            tiles = tiles.unflatten(3, (GROUP // 2, 2)).transpose(2, 3)
        elif order is Order.INPUTS:
            tiles = tiles.transpose(2, 3)
        if self.bits == 4 and order is Order.INPUTS:
            low, high = tiles.reshape(*shape, 2, 8 * GROUP).unbind(2)
            tiles = low | high << 4
        elif self.bits == 4:
            first, second, third, fourth = tiles.reshape(*shape, 4, 4, GROUP).unbind(3)
            tiles = torch.stack([first | second << 4, third | fourth << 4], dim=-1)
        self.weights = tiles.reshape(*shape, -1)
        self.scales, own_zeros = (
            each.view(shape[0], 16, self.groups).transpose(1, 2).to(dtype).contiguous()
            for each in (scales, zeros)
        )
        self.zeros = own_zeros if zeros.any() else None

    def addresses(self) -> tuple[int, int, int | None]:
        zeros = None if self.zeros is None else self.zeros.data_ptr()
        return self.weights.data_ptr(), self.scales.data_ptr(), zeros


class NativePacked:
    """``PackedProduct``, in 0.56 or 0.63 bytes per weight of 4 bits (without zeros, or with them), 1.06 or
    1.13 of 8."""

    def __init__(self, library: ctypes.CDLL, parts: Sequence[Quantized], scratch: Scratch) -> None:
        self._multiply = library.multiply_packed
        order = Order.OUTPUTS if library.has_amx() else Order.PAIRS
        self._tiles, self._scratch = Tiles(parts, order, torch.float16), scratch
        self._addresses = self._tiles.addresses()

    def pays_for(self, x: Tensor) -> bool:
        return True

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        return self._run(x, self._tiles.outputs, added, 0)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        return self._run(x, self._tiles.outputs // 2, None, 2 if activation == "gelu_tanh" else 1)

    def _run(self, x: Tensor, outputs: int, added: Tensor | None, gated: int) -> Tensor:
        assert x.dtype == BF16
        assert added is None or _is_plain(added)
        of, tokens, x = self._tiles, len(x), x.contiguous()
        out = x.new_empty(tokens, outputs)
        scratch = self._scratch.of(-(-tokens // 16) * 16 * of.groups * (GROUP + 2))
        self._multiply(
            out.data_ptr(), x.data_ptr(), None if added is None else added.data_ptr(),
            scratch, *self._addresses, tokens, of.groups, outputs, of.bits, gated,
        )  # fmt: skip
        return out


class NativeFloat32Packed:
    """``PackedProduct`` for x in float32, in 0.63 or 0.75 bytes per weight of 4 bits (without zeros,
    or with them), 1.13 or 1.25 of 8."""

    def __init__(self, library: ctypes.CDLL, parts: Sequence[Quantized], alone: bool) -> None:
        self._multiply = library.multiply_packed_float32
        self._tiles = Tiles(parts, Order.INPUTS, torch.float32)
        self._alone = alone

    def pays_for(self, x: Tensor) -> bool:
        return self._alone or len(x) <= FLOAT32_ROWS_MAX

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        assert x.dtype == torch.float32
        tiles, x = self._tiles, x.contiguous()
        out = x.new_empty(len(x), tiles.outputs)
        self._multiply(
            out.data_ptr(), x.data_ptr(), *tiles.addresses(),
            len(x), tiles.groups, tiles.outputs, tiles.bits,
        )  # fmt: skip
        return out if added is None else out.add_(added)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        return gate(self(x), activation)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == BF16 and tensor.is_contiguous()


class Scratch:
    """Memory for what is needed during a call only."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._values = torch.empty(0, dtype=dtype, device=CPU)

    def of(self, size: int) -> int:
        """The address of ``size`` values at least."""
        if len(self._values) < size:
            self._values = self._values.new_empty(size)
        return self._values.data_ptr()


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    at, count = ctypes.c_void_p, ctypes.c_int64
    arguments = {
        "multiply_packed_float32": [at] * 5 + [count] * 3 + [ctypes.c_int],
        "rms_norm": [at] * 3 + [count] * 4 + [ctypes.c_float],
        "rotate_and_write": [at] * 6 + [count] * 2,
        "attend_decode": [at] * 7 + [count] * 2,
        "attend_prefill": [at] * 6 + [count] * 4,
        "multiply_packed": [at] * 7 + [count] * 3 + [ctypes.c_int] * 2,
    }
    for name, types in arguments.items():
        if hasattr(library, name):  # else this processor cannot have it
            function = getattr(library, name)
            function.argtypes, function.restype = types, None
    return library
