"""Reading a GGUF file: its metadata, and where its tensors lie. Knows nothing of any model.

Layout of the file (GGUF specification, version 3; little-endian)::

    "GGUF" | u32 version | u64 tensors | u64 keys | keys and values | tensor infos | padding | data

The header is read through a mapping that is dropped afterwards; tensor data is read with ordinary
reads, so that a file which shrinks under us is an error and not a bus fault. Every length that the
file claims is checked against the file's size before it is believed.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ebbtide.errors import InputError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NESTING = 4

_SCALARS = {
    0: ("<B", np.uint8),
    1: ("<b", np.int8),
    2: ("<H", np.uint16),
    3: ("<h", np.int16),
    4: ("<I", np.uint32),
    5: ("<i", np.int32),
    6: ("<f", np.float32),
    7: ("<?", np.bool_),
    10: ("<Q", np.uint64),
    11: ("<q", np.int64),
    12: ("<d", np.float64),
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in the file. ``shape`` is in row-major order (the file has it reversed); ``offset``
    and ``size`` are in bytes, from the start of the file; ``type`` is GGML's name of the format."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of a GGUF file. ``header`` is its bytes, for the identity."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    header: bytes

    @contextmanager
    def open(self) -> Iterator[int]:
        """A file descriptor for ``read``."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, descriptor: int, info: TensorInfo) -> np.ndarray:
        """The tensor's bytes as they are in the file. Safe to call from several threads."""
        buffer = np.empty(info.size, dtype=np.uint8)
        view = buffer.data
        at = 0
        while at < info.size:
            count = os.preadv(descriptor, [view[at:]], info.offset + at)
            if count == 0:
                raise InputError(
                    f"{self.path} ended at byte {info.offset + at} while {info.name} was read: the "
                    "file changed; load it again when nothing writes to it"
                )
            at += count
        return buffer


def read_header(path: Path) -> GGUFFile:
    """Parse the header of ``path``. Raises ``InputError`` where it is not a sound GGUF file."""
    size = _file_size(path)
    if size < len(MAGIC):
        raise InputError(f"{path} is not a GGUF file: it has {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, path)
        try:
            return _parse(cursor, size)
        except _Truncated as error:
            raise InputError(
                f"{path} is truncated or damaged: {error}, and the file has {size} bytes; "
                "download or convert it again"
            ) from None
        except (UnicodeDecodeError, OverflowError) as error:
            raise InputError(
                f"{path} is damaged near byte {cursor.at}: {error}; download or convert it again"
            ) from None


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


class _Truncated(Exception):
    """The header claims bytes that the file does not have."""


class _Cursor:
    """A position in the header; every read is checked against the file's end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def claim(self, count: int) -> int:
        """Step over ``count`` bytes; returns where they begin."""
        start = self.at
        if count > len(self.data) - start:
            raise _Truncated(f"byte {start} announces {count} more bytes")
        self.at = start + count
        return start

    def scalar(self, kind: int) -> Any:
        layout = _SCALARS[kind][0]
        start = self.claim(struct.calcsize(layout))
        return struct.unpack_from(layout, self.data, start)[0]

    def string(self) -> str:
        length = self.scalar(10)
        start = self.claim(length)
        return self.data[start : start + length].decode("utf-8")

    def strings(self, count: int) -> list[str]:
        """``count`` strings in a row; vocabularies have hundreds of thousands."""
        unpack, data, end = struct.Struct("<Q").unpack_from, self.data, len(self.data)
        if count * 8 > end - self.at:
            raise _Truncated(f"byte {self.at} announces {count} strings")
        found = []
        at = self.at
        for _ in range(count):
            if at + 8 > end:
                raise _Truncated(f"byte {at} announces a string")
            (length,) = unpack(data, at)
            at += 8
            if length > end - at:
                raise _Truncated(f"byte {at} announces a string of {length} bytes")
            found.append(data[at : at + length].decode("utf-8"))
            at += length
        self.at = at
        return found

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(kind)
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth == MAX_NESTING:
            raise InputError(
                f"{self.path} is damaged: value type {kind} at byte {self.at} is unknown"
            )
        inner, count = self.scalar(4), self.scalar(10)
        if inner == _STRING:
            return self.strings(count)
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner][1]).newbyteorder("<")
            start = self.claim(count * dtype.itemsize)
            return np.frombuffer(self.data[start : self.at], dtype).tolist()
        return [self.value(inner, depth + 1) for _ in range(count)]


def _parse(cursor: _Cursor, size: int) -> GGUFFile:
    path = cursor.path
    magic = cursor.data[: len(MAGIC)]
    if magic != MAGIC:
        raise InputError(f"{path} is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    cursor.claim(len(MAGIC))
    version = cursor.scalar(4)
    if version not in VERSIONS:
        readable = " and ".join(map(str, VERSIONS))
        endian = ", or written for a big-endian machine" if version & 0xFFFF == 0 else ""
        raise InputError(
            f"{path} has GGUF version {version}{endian}; versions {readable} can be read: "
            "convert the model again with a current converter"
        )
    tensor_count, key_count = cursor.scalar(10), cursor.scalar(10)
    metadata = {}
    for _ in range(key_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar(4))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise InputError(f"{path} is damaged: its alignment is {alignment!r}, not a power of two")
    raw = [_tensor_info(cursor) for _ in range(tensor_count)]
    data_start = math.ceil(cursor.at / alignment) * alignment
    tensors = {}
    for name, kind, shape, offset in raw:
        info = _locate(path, name, kind, shape, data_start + offset)
        if info.offset + info.size > size:
            raise InputError(
                f"{path} is truncated: {name} ends at byte {info.offset + info.size}, and the file "
                f"has {size} bytes; download it again"
            )
        if name in tensors:
            raise InputError(f"{path} is damaged: it has {name} twice")
        tensors[name] = info
    return GGUFFile(path, metadata, tensors, cursor.data[: cursor.at])


def _tensor_info(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.string()
    dimensions = cursor.scalar(4)
    if dimensions > MAX_DIMENSIONS:
        raise InputError(f"{cursor.path} is damaged: {name} has {dimensions} dimensions")
    shape = tuple(cursor.scalar(10) for _ in range(dimensions))
    return name, cursor.scalar(4), shape[::-1], cursor.scalar(10)


def _locate(path: Path, name: str, kind: int, shape: tuple[int, ...], offset: int) -> TensorInfo:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        raise InputError(
            f"{path}: {name} has tensor type {kind}, which the installed gguf package does not "
            "know; a newer one may (pip install -U gguf)"
        ) from None
    block, block_bytes = GGML_QUANT_SIZES[known]
    row = shape[-1] if shape else 1
    if row % block:
        raise InputError(
            f"{path} is damaged: rows of {name} have {row} values, not a multiple of {block} "
            f"as {known.name} needs"
        )
    return TensorInfo(name, known.name, shape, offset, math.prod(shape) // block * block_bytes)
