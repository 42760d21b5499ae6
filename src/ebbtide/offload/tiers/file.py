"""The file tier: chunks as files below a directory, of a bounded total size.

    file:///var/cache/ebbtide?size=20GiB&floor=1GiB&fsync=never&policy=mq&io=auto

A chunk's file gets its name when it is whole, and is never changed under that name. So whatever fails or
dies, each chunk is there, or is not; what a power loss or a bad disk did to a file, its checksum tells.

Names in the directory and the index change together, under one lock (``_names``): so the index knows
exactly what is there, but for what other processes did since the last look (``refresh``). Payloads are
read and written outside of it. Several processes may share a directory; all of them evict.

A full tier takes the file of its victim for the new chunk, rather than removing one file and making
another: that takes no room on the way, and freeing a file's blocks can cost more than writing it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ebbtide.errors import InputError
from ebbtide.offload.policies import make_policy
from ebbtide.offload.tiers.base import MISSING, OK, Entry, Result, Status, TierContext, TierStats
from ebbtide.offload.tiers.envelope import header
from ebbtide.offload.tiers.file_index import Index
from ebbtide.offload.tiers.file_inventory import FileInventory
from ebbtide.offload.tiers.file_io import (
    GONE,
    HEAD_BYTES,
    ChunkFiles,
    FileSystem,
    Parts,
    takes_direct_io,
)
from ebbtide.offload.tiers.file_scan import Listing, Scanner, chunk_path
from ebbtide.offload.tiers.file_settings import FileSettings, parse_url

log = logging.getLogger(__name__)

LOOK_S = 1.0  # how often the directory is looked at for what others did ...
LOOK_SHARE = 0.05  # ... but for no more than this share of the time
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
CLOSED = Result(Status.FAILED, "the file tier is closed")


def open_file(url: str, context: TierContext) -> FileTier:
    """Open the tier of a ``file://`` URL. Raises InputError, in one sentence."""
    tier = FileTier(parse_url(url), context)
    tier.start()
    return tier


class FileTier:
    """Chunks below ``settings.directory``: see the module. ``start`` looks at it from then on."""

    name = "file"
    immediate = True

    def __init__(
        self, settings: FileSettings, context: TierContext, fs: FileSystem | None = None
    ) -> None:
        """Raises InputError where the directory cannot be used."""
        self._fs = fs or FileSystem()
        self._settings = settings
        self._space = context.namespace
        self._root = settings.directory
        self._chunk_bytes = context.chunk_bytes
        _check_sizes(settings, context)
        capacity = settings.size // (HEAD_BYTES + context.chunk_bytes)
        self._index = Index(make_policy(settings.policy, capacity))
        self._names = threading.Lock()  # what is there, and what the index says: changed together
        self._orphans: list[str] = []  # files of ours that could not be removed: still counted
        self._others = 0  # bytes that other processes are writing
        self._evictions = 0
        self._bad: set[bytes] = set()  # corrupt chunks whose files could not be removed
        self._is_loaded = False
        self._was_refused = False  # a chunk, and that was said
        self._down = ""
        self._idle = threading.Condition()
        self._running = 0
        self._is_closed = False
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        try:
            self._parts, self.is_direct = self._prepare()
        except OSError as error:
            raise InputError(
                f"the file tier cannot use the directory {self._root}: {error.strerror or error}"
            ) from error
        self._files = ChunkFiles(
            self._fs, self._space, context.chunk_bytes, self.is_direct, settings.fsync == "always"
        )
        self._listing = Listing(self._fs, self._root)
        self._inventory = FileInventory(self._root, self._fs)
        self._scanner = Scanner(self._fs, self._root, self._index, self._names, self._parts.born_ns)

    def start(self) -> None:
        """Look at the directory now, on a thread, and from time to time."""
        self._watcher = threading.Thread(target=self._watch, name="file-tier", daemon=True)
        self._watcher.start()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        if self._down or self._is_closed:
            return [False] * len(keys)
        return [self._is_known(self._space + key) for key in keys]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        return self._each(self._read, keys, buffers)

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        return self._each(self._write, keys, buffers)

    def delete(self, keys: Sequence[bytes]) -> list[Result]:
        return self._each(lambda key: self._remove(self._space + key), keys)

    def clear(self) -> Result:
        return self._each(lambda _: self._clear(), [None])[0]

    def stats(self) -> TierStats:
        """Chunks and bytes of every namespace: that is what the quota is for."""
        state = "up" if self._is_loaded else "starting"
        return TierStats(
            chunks=self._index.chunks,
            bytes=self._index.used,
            bytes_max=self._settings.size,
            evictions=self._evictions,
            state=f"down: {self._down}" if self._down else state,
        )

    def entries(self) -> Iterator[Entry]:
        return self._inventory.entries()

    def check(self, entry: Entry) -> Result:
        return self._inventory.check(entry)

    def remove(self, entries: Sequence[Entry]) -> list[Result]:
        return self._each(lambda entry: self._remove(entry.namespace + entry.key), entries)

    def close(self) -> None:
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
        with self._idle:
            was_closed, self._is_closed = self._is_closed, True
            self._idle.wait_for(lambda: self._running == 0)
        if not was_closed:
            self._remove_orphans()
            self._parts.close()

    def refresh(self) -> None:
        """See what others have done; the first time, what there is. Reads names and sizes only."""
        try:
            self._parts.beat()
            self._others = self._parts.sweep()
            self._remove_orphans()
            is_whole = self._scanner.look(self._stop.is_set)
        except OSError as error:
            if not self._down:
                log.warning("the file tier is down: %s", _sentence(error))
            self._down = _sentence(error)
            return
        if self._down:
            log.warning("the file tier is back: %s", self._root)
        self._down = ""
        self._index.order()
        self._is_loaded = self._is_loaded or is_whole
        if self._is_loaded:
            self._trim()

    def _prepare(self) -> tuple[Parts, bool]:
        workshop = f"{self._root}/writing"
        self._fs.make_directory(workshop)
        parts = Parts(self._fs, workshop)
        try:
            parts.sweep()
            is_direct = self._settings.io != "buffered" and takes_direct_io(
                self._fs, parts.new_path(), self._chunk_bytes
            )
        except OSError:
            parts.close()
            raise
        if self._settings.io == "direct" and not is_direct:
            parts.close()
            raise OSError(errno.EINVAL, "its file system takes no direct I/O (leave io=direct out)")
        return parts, is_direct

    def _each(self, act: Callable[..., Result], *columns: Sequence[Any]) -> list[Result]:
        with self._idle:
            if self._is_closed:
                return [CLOSED] * len(columns[0])
            self._running += 1
        try:
            return [act(*row) for row in zip(*columns, strict=True)]
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def _read(self, key: bytes, buffer: memoryview) -> Result:
        id = self._space + key
        try:
            problem = self._files.read(chunk_path(self._root, id), key, buffer)
        except OSError as error:
            if error.errno not in GONE:
                return _failure(error)
            if self._index.size(id) is not None:
                self._remove(id)
            return MISSING
        if problem:
            if self._remove(id).status is not Status.OK:
                self._bad.add(id)  # it is not to be found again, though it is still there
            return Result(Status.CORRUPT, f"{problem} ({chunk_path(self._root, id)})")
        self._index.touch(id)
        return OK

    def _write(self, key: bytes, buffer: memoryview) -> Result:
        id = self._space + key
        if self._is_known(id):
            with contextlib.suppress(OSError):  # another process may have evicted it
                self._fs.touch(chunk_path(self._root, id))
                self._index.touch(id)
                return OK
        if not self._is_loaded:
            return Result(Status.FULL, "what is there already is still being counted")
        part = self._parts.new_path()
        try:
            is_new = self._make_room(part)
        except OSError as error:
            return self._refused(error)
        try:
            self._files.write(part, header(self._space, key, buffer), buffer, is_new)
            self._publish(part, id)
        except OSError as error:
            self._abandon(part)
            return self._refused(error)
        return OK

    def _refused(self, error: OSError) -> Result:
        """Of a chunk that could not be stored. The first is said: a tier may store nothing at all."""
        if not self._was_refused:
            log.warning("the file tier could not store a chunk: %s", _sentence(error))
            self._was_refused = True
        return _failure(error)

    def _make_room(self, part: str) -> bool:
        """Reserve the bytes of a file. Whether it is to be made: else ``part`` is a victim's file.

        Raises OSError, ENOSPC where no room can be made.
        """
        size, evicted = self._files.size, 0
        while True:
            with self._names:
                free = self._fs.free_bytes(self._root) - self._settings.floor - self._index.reserved
                room = self._settings.size - self._others - self._index.used
                if room >= size and free >= size:
                    self._index.reserve(size)
                    return True
                if room >= size and evicted >= size:  # giving back did not help, or does not yet
                    raise OSError(errno.ENOSPC, "the file system has less free than the floor")
                victim = self._index.victim()
                if victim is None:
                    why = (
                        ""
                        if free >= size
                        else f", and no space above the floor of {self._settings.floor >> 20} MiB"
                    )
                    raise OSError(errno.ENOSPC, f"there is no chunk left to evict{why}")
                can_reuse = victim[1] == size and room >= 0 and free >= 0
                was_there = self._evict(*victim, part if can_reuse else None)
                if can_reuse and was_there:
                    return False
                evicted += victim[1]

    def _trim(self) -> None:
        """Evict what is beyond the quota: others have written, or it is smaller than it was."""
        with contextlib.suppress(OSError):  # the next look tries again
            while self._index.used + self._others > self._settings.size:
                with self._names:
                    victim = self._index.victim()
                    if victim is None:
                        return
                    self._evict(*victim, None)

    def _evict(self, id: bytes, size: int, part: str | None) -> bool:
        """Remove a victim's file, or call it ``part`` and keep its bytes reserved. Whether it was there."""
        try:
            if part is None:
                self._fs.remove(chunk_path(self._root, id))
            else:
                self._fs.rename(chunk_path(self._root, id), part)
        except OSError as error:
            if error.errno in GONE:  # another process was faster
                self._index.release(size)
                return False
            if part is not None:  # it may have its new name, though that was said to have failed
                with contextlib.suppress(OSError):
                    self._fs.remove(part)
            self._index.put(id, size)
            raise
        self._evictions += 1
        if part is None:
            self._index.release(size)
        return True

    def _publish(self, part: str, id: bytes) -> None:
        path = chunk_path(self._root, id)
        with self._names:
            try:
                self._files.publish(part, path)
            except OSError:  # it may have its name, though that was said to have failed
                with contextlib.suppress(OSError):
                    self._fs.remove(path)
                self._index.discard(id)
                raise
            self._index.put(id, self._files.size)
            self._bad.discard(id)

    def _remove(self, id: bytes) -> Result:
        with self._names:
            try:
                self._fs.remove(chunk_path(self._root, id))
            except OSError as error:
                if error.errno not in GONE:
                    return _failure(error)
            self._index.discard(id)
            self._bad.discard(id)
        return OK

    def _is_known(self, id: bytes) -> bool:
        return self._index.size(id) is not None and id not in self._bad

    def _clear(self) -> Result:
        result = OK
        try:
            for id in self._listing.chunks_of(self._space):
                removed = self._remove(id)
                result = removed if result is OK else result
        except OSError as error:
            return _failure(error)
        return result

    def _abandon(self, part: str) -> None:
        """Remove a file that no chunk came of, now or later. Until then its bytes stay reserved."""
        try:
            self._fs.remove(part)
        except OSError as error:
            if error.errno not in GONE:
                self._orphans.append(part)
                return
        self._index.release(self._files.size)

    def _remove_orphans(self) -> None:
        for _ in range(len(self._orphans)):
            self._abandon(self._orphans.pop(0))

    def _watch(self) -> None:
        self.refresh()
        took_s = 0.0
        while not self._stop.wait(max(LOOK_S, took_s / LOOK_SHARE)):
            begin = time.monotonic()
            self.refresh()
            took_s = time.monotonic() - begin


def _check_sizes(settings: FileSettings, context: TierContext) -> None:
    needed = HEAD_BYTES + context.chunk_bytes
    if context.chunk_bytes % mmap.PAGESIZE:
        raise InputError(f"a chunk of {context.chunk_bytes} bytes is not a number of whole pages")
    if settings.size < needed:
        raise InputError(
            f"the file tier's size of {settings.size} bytes has no room for one chunk, "
            f"whose file takes {needed} bytes",
            "size",
        )


def _failure(error: OSError) -> Result:
    status = Status.FULL if error.errno in NO_ROOM else Status.FAILED
    return Result(status, _sentence(error))


def _sentence(error: OSError) -> str:
    place = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{place}"
