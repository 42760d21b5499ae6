"""What a file tier's directory holds, for people who look at it: while servers use it, and without being one.

It takes no lock and has no index. What it removes, the servers miss as if one of them had evicted it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence

from ebbtide.errors import InputError
from ebbtide.offload.tiers.base import MISSING, OK, Entry, Result, Status
from ebbtide.offload.tiers.envelope import HEADER_BYTES, verify
from ebbtide.offload.tiers.file_index import NAMESPACE_BYTES
from ebbtide.offload.tiers.file_io import DIRECT, GONE, HEAD_BYTES, FileSystem
from ebbtide.offload.tiers.file_scan import Listing, chunk_path
from ebbtide.offload.tiers.file_settings import parse_url

FILE_BYTES_MAX = 0x7FFFF000  # one read brings no more, so no tier can have written it


def open_inventory(url: str) -> FileInventory:
    """Of the directory of a ``file://`` URL, which must be there. Raises InputError."""
    root = parse_url(url).directory
    if not os.path.isdir(root):
        raise InputError(f"there is no directory {root}")
    return FileInventory(root)


class FileInventory:
    """An ``Inventory``. Safe to call from any thread."""

    def __init__(self, root: str, fs: FileSystem | None = None) -> None:
        self._root = root
        self._fs = fs or FileSystem()
        self._listing = Listing(self._fs, root)
        self._flags = (
            os.O_RDONLY | os.O_CLOEXEC | DIRECT
        )  # the disk is to be verified, not the cache
        self._spare: list[mmap.mmap] = []  # buffers for files: one per call under way

    def entries(self) -> Iterator[Entry]:
        """Holds the names of one place at a time: a 256th of a namespace."""
        for place, directory in self._listing.places():
            for id, found in self._listing.chunks_in(directory.path, place):
                try:
                    info = self._fs.entry_stat(found)
                except OSError as error:
                    if error.errno in GONE:
                        continue
                    raise
                if stat.S_ISREG(info.st_mode):
                    space, key = id[:NAMESPACE_BYTES], id[NAMESPACE_BYTES:]
                    yield Entry(space, key, info.st_size, info.st_mtime)

    def check(self, entry: Entry) -> Result:
        """Leaves the time of last use as it is."""
        path = chunk_path(self._root, entry.namespace + entry.key)
        try:
            problem, inode = self._problem(path, entry)
            # The file of a chunk that was evicted meanwhile may have been overwritten with another.
            if problem and self._fs.stat(path).st_ino != inode:
                return MISSING
        except OSError as error:
            return MISSING if error.errno in GONE else _failed(error)
        return Result(Status.CORRUPT, f"{problem} ({path})") if problem else OK

    def remove(self, entries: Sequence[Entry]) -> list[Result]:
        return [self._remove(entry) for entry in entries]

    def close(self) -> None:
        self._spare.clear()

    def _remove(self, entry: Entry) -> Result:
        try:
            self._fs.remove(chunk_path(self._root, entry.namespace + entry.key))
        except OSError as error:
            if error.errno not in GONE:
                return _failed(error)
        return OK

    def _problem(self, path: str, entry: Entry) -> tuple[str, int]:
        """What is wrong with a file, and its inode."""
        flags = self._flags
        try:
            return self._read(path, entry, flags)
        except OSError as error:
            if error.errno != errno.EINVAL or not flags & DIRECT:
                raise
        self._flags = flags & ~DIRECT  # its file system takes no direct I/O
        return self._read(path, entry, self._flags)

    def _read(self, path: str, entry: Entry, flags: int) -> tuple[str, int]:
        descriptor = self._fs.open(path, flags)
        try:
            info = self._fs.stat(descriptor)
            size = info.st_size
            if not HEAD_BYTES <= size <= FILE_BYTES_MAX:
                return f"its file has {size} bytes", info.st_ino
            buffer = self._buffer(size)
            try:
                with memoryview(buffer)[: _pages(size)] as whole:
                    count = self._fs.read(descriptor, [whole])
                    if count != size:
                        problem = f"only {count} of {size} bytes could be read"
                        raise OSError(errno.EIO, problem, path)
                    with whole[HEAD_BYTES:size] as payload:
                        head = bytes(whole[:HEADER_BYTES])
                        problem = verify(head, entry.namespace, entry.key, payload)
            finally:
                self._spare.append(buffer)
        finally:
            self._fs.close(descriptor)
        return problem, info.st_ino

    def _buffer(self, size: int) -> mmap.mmap:
        """Of whole pages, as direct I/O wants it."""
        with contextlib.suppress(IndexError):
            buffer = self._spare.pop()
            if len(buffer) >= size:
                return buffer
        return mmap.mmap(-1, _pages(size))


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _failed(error: OSError) -> Result:
    place = f" ({error.filename})" if error.filename else ""
    return Result(Status.FAILED, f"{error.strerror or error}{place}")
