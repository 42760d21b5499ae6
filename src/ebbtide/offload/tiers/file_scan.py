"""What is in the file tier's directory, compared with what the index says: names and sizes, no payloads.

A directory whose modification time has not changed is not looked into again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from ebbtide.offload.tiers.file_index import NAMESPACE_BYTES, PLACE_BYTES, Index
from ebbtide.offload.tiers.file_io import GONE, FileSystem

SUFFIX = ".kv"
SETTLED_NS = 10 * 10**9


class Listing:
    """The names in the directory that are ours. Files and directories of other names are left alone."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._root = root

    def places(self) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
        """The directories with chunks. Raises OSError."""
        for space in self._directories(self._root, NAMESPACE_BYTES):
            for entry in self._directories(space.path, 1):
                yield bytes.fromhex(space.name + entry.name), entry

    def chunks_of(self, namespace: bytes) -> Iterator[bytes]:
        """The ids of all its chunks. Raises OSError."""
        for entry in self._directories(f"{self._root}/{namespace.hex()}", 1):
            for id, _ in self.chunks_in(entry.path, namespace + bytes.fromhex(entry.name)):
                yield id

    def chunks_in(self, directory: str, place: bytes) -> Iterator[tuple[bytes, os.DirEntry[str]]]:
        """The ids of the chunks in a place's directory. Raises OSError."""
        space, first = place[:NAMESPACE_BYTES], place[NAMESPACE_BYTES:]
        for entry in self._scan(directory):
            key = _from_hex(entry.name[: -len(SUFFIX)])
            if entry.name.endswith(SUFFIX) and key[:1] == first:
                yield space + key, entry

    def _directories(self, path: str, name_bytes: int) -> list[os.DirEntry[str]]:
        return [entry for entry in self._scan(path) if len(_from_hex(entry.name)) == name_bytes]

    def _scan(self, directory: str) -> list[os.DirEntry[str]]:
        try:
            return self._fs.scan(directory)
        except OSError as error:
            if error.errno in GONE:
                return []
            raise


class Scanner:
    """``names`` is held by whoever changes a name in the directory together with the index.

    born_ns: a time of the file system's own clock; what was changed long before it is not changing now.
    """

    def __init__(
        self, fs: FileSystem, root: str, index: Index, names: threading.Lock, born_ns: int
    ) -> None:
        self._fs = fs
        self._root = root
        self._listing = Listing(fs, root)
        self._index = index
        self._names = names
        self._born_ns = born_ns
        self._looks: dict[bytes, tuple[int, bool]] = {}  # place: mtime, and whether it is settled

    def look(self, is_stopped: Callable[[], bool]) -> bool:
        """Bring the index up to date with each directory that has changed. Whether all could be.

        Raises OSError where not even the directories can be listed.
        """
        is_whole, there = True, set()
        for place, entry in self._listing.places():
            if is_stopped():
                return False
            there.add(place)
            is_whole &= self._look(place, entry)
        for place in set(self._index.places()) - there:
            self._looks.pop(place, None)
            self._compare(place, directory_path(self._root, place))
        return is_whole

    def _look(self, place: bytes, entry: os.DirEntry[str]) -> bool:
        """Compare a directory if it has changed, and once more after that: clocks tick coarsely."""
        try:
            modified_ns = self._fs.entry_stat(entry).st_mtime_ns
            looked_ns, is_settled = self._looks.get(place, (None, False))
            if looked_ns == modified_ns and is_settled:
                return True
            self._compare(place, entry.path)
        except OSError:
            return False
        is_settled = looked_ns == modified_ns or modified_ns < self._born_ns - SETTLED_NS
        self._looks[place] = modified_ns, is_settled
        return True

    def _compare(self, place: bytes, directory: str) -> None:
        with self._names:
            self._index.begin_look()
        known = self._index.known(place)
        seen: set[bytes] = set()
        new: dict[bytes, tuple[int, float]] = {}
        for id, entry in self._listing.chunks_in(directory, place):
            seen.add(id)
            if id not in known:
                with contextlib.suppress(FileNotFoundError):
                    info = self._fs.entry_stat(entry)
                    new[id] = info.st_size, info.st_mtime
        with self._names:
            self._index.end_look(place, seen, new)


def directory_path(root: str, place: bytes) -> str:
    return f"{root}/{place[:NAMESPACE_BYTES].hex()}/{place[NAMESPACE_BYTES:].hex()}"


def chunk_path(root: str, id: bytes) -> str:
    return f"{directory_path(root, id[:PLACE_BYTES])}/{id[NAMESPACE_BYTES:].hex()}{SUFFIX}"


def _from_hex(text: str) -> bytes:
    """The bytes that we name so; b"" where we would not, as with capital letters or spaces."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return b""
    return raw if raw.hex() == text else b""
