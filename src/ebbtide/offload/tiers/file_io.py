"""The file tier's hands: how one chunk is written and read, and which files are somebody's half-done work.

    DIR/<namespace>/<first byte of the key>/<key>.kv    a chunk: a page with its envelope, then its payload
    DIR/writing/<writer>.<number>.part                  a chunk that is being written
    DIR/writing/<writer>.lock                           locked by that writer for as long as it lives

All of it goes through ``FileSystem``, so that a test can do harm at any operation.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence

from ebbtide.offload.tiers.envelope import HEADER_BYTES, header, verify

HEAD_BYTES = 4096  # the envelope has a page of its own, so that the payload is aligned in the file
TOUCH_S = (
    60  # a chunk's time of last use is kept to this precision: not every read is to cause a write
)
ABANDONED_S = (
    24 * 3600
)  # where files cannot be locked: a writer that was silent for so long is gone
LOCKS_TRIED_MAX = 100
DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has it
GONE = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})
Buffer = memoryview | mmap.mmap


class FileSystem:
    """Every operation on files that the tier makes. All raise OSError."""

    def make_directory(self, path: str) -> None:
        os.makedirs(path, 0o700, exist_ok=True)

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags, 0o600)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read(self, descriptor: int, buffers: Sequence[Buffer]) -> int:
        return os.preadv(descriptor, buffers, 0)

    def write(self, descriptor: int, buffers: Sequence[Buffer]) -> int:
        return os.pwritev(descriptor, buffers, 0)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def lock(self, descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def stat(self, target: str | int) -> os.stat_result:
        return os.stat(target)

    def touch(self, target: str | int) -> None:
        os.utime(target)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def scan(self, path: str) -> list[os.DirEntry[str]]:
        with os.scandir(path) as entries:
            return list(entries)

    def entry_stat(self, entry: os.DirEntry[str]) -> os.stat_result:
        return entry.stat()

    def free_bytes(self, path: str) -> int:
        space = os.statvfs(path)
        return space.f_bavail * space.f_frsize

    def now(self) -> float:
        return time.time()


class Parts:
    """The files that this writer has begun, and the leftovers of writers that are no more.

    A writer holds the lock of its lock file until it closes or dies, on this machine or, by a network
    mount, on another. Where locks do not work, it touches the file instead (``beat``).
    """

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._directory = directory
        self._numbers = itertools.count()
        self._locked = True
        self.writer, self._descriptor = self._take_lock()
        try:
            self.born_ns = fs.stat(self._descriptor).st_mtime_ns  # by the clock of the file system
        except OSError:
            self.close()
            raise

    def new_path(self) -> str:
        return f"{self._directory}/{self.writer}.{next(self._numbers)}.part"

    def beat(self) -> None:
        """Say that we live. Raises OSError where the directory is gone, or is another one now."""
        if self._locked:
            self._fs.stat(self._lock_path(self.writer))
        else:
            self._fs.touch(self._lock_path(self.writer))

    def sweep(self) -> int:
        """Remove what dead writers have left. Returns the bytes that the living are writing."""
        parts: dict[str, list[os.DirEntry[str]]] = {}
        for entry in self._fs.scan(self._directory):
            writer, _, rest = entry.name.partition(".")
            if writer != self.writer and rest.endswith(("part", "lock")):
                parts.setdefault(writer, []).append(entry)
        living = 0
        for writer, entries in parts.items():
            with contextlib.suppress(OSError):  # what could not be removed is found again later
                living += self._sweep(writer, [e for e in entries if e.name.endswith("part")])
        return living

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._fs.remove(self._lock_path(self.writer))
        with contextlib.suppress(OSError):
            self._fs.close(self._descriptor)

    def _sweep(self, writer: str, parts: list[os.DirEntry[str]]) -> int:
        path = self._lock_path(writer)
        try:
            descriptor = self._fs.open(path, os.O_RDWR)
        except FileNotFoundError:  # a lock file is the first to come and the last to go
            self._remove(part.path for part in parts)
            return 0
        try:
            if self._lives(descriptor):
                return sum(self._fs.entry_stat(part).st_size for part in parts)
            self._remove(part.path for part in parts)
            self._remove([path])
            return 0
        finally:
            self._fs.close(descriptor)

    def _lives(self, descriptor: int) -> bool:
        try:
            self._fs.lock(descriptor)
        except BlockingIOError:
            return True
        except OSError:
            return self._fs.now() - self._fs.stat(descriptor).st_mtime < ABANDONED_S
        return False

    def _remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # another writer sweeps, too
                self._fs.remove(path)

    def _lock_path(self, writer: str) -> str:
        return f"{self._directory}/{writer}.lock"

    def _take_lock(self) -> tuple[str, int]:
        for _ in range(LOCKS_TRIED_MAX):
            writer = secrets.token_hex(16)
            path = self._lock_path(writer)
            descriptor = self._fs.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                self._fs.lock(descriptor)
                # Another writer may have swept the file away before it was locked.
                if self._fs.stat(path).st_ino == self._fs.stat(descriptor).st_ino:
                    return writer, descriptor
            except (BlockingIOError, FileNotFoundError):
                pass
            except OSError:
                self._locked = False
                return writer, descriptor
            self._fs.close(descriptor)
        raise OSError(errno.EAGAIN, "no lock file could be locked")


class ChunkFiles:
    """Reads and writes single chunks, straight from and into the caller's buffers."""

    def __init__(
        self, fs: FileSystem, namespace: bytes, payload_bytes: int, is_direct: bool, is_synced: bool
    ) -> None:
        self.size = HEAD_BYTES + payload_bytes
        self._fs = fs
        self._namespace = namespace
        self._is_synced = is_synced
        self._flags = os.O_CLOEXEC | (DIRECT if is_direct else 0)
        self._pages: list[mmap.mmap] = []  # spare pages for headers: one per call under way

    def write(self, path: str, head: bytes, payload: Buffer, is_new: bool = True) -> None:
        """Make the file ``path``; or overwrite all of it, where it is not new."""
        flags = os.O_WRONLY | self._flags | (os.O_CREAT | os.O_EXCL if is_new else 0)
        with self._page() as page, self._opened(path, flags) as descriptor:
            page[: len(head)] = head
            count = self._fs.write(descriptor, [page, payload])
            if count != self.size:
                problem = f"only {count} of {self.size} bytes were written"
                raise OSError(errno.ENOSPC, problem)
            if self._is_synced:
                self._fs.sync(descriptor)

    def publish(self, part: str, path: str) -> None:
        """Give a written file its name, at once and for all to see."""
        directory = os.path.dirname(path)
        try:
            self._fs.rename(part, path)
        except FileNotFoundError:
            self._fs.make_directory(directory)
            self._fs.rename(part, path)
        if self._is_synced:
            with self._opened(directory, os.O_RDONLY | os.O_CLOEXEC) as descriptor:
                self._fs.sync(descriptor)

    def read(self, path: str, key: bytes, payload: memoryview) -> str:
        """Fill ``payload``. Returns what is wrong with the chunk, "" where nothing is."""
        with self._page() as page, self._opened(path, os.O_RDONLY | self._flags) as descriptor:
            count = self._fs.read(descriptor, [page, payload])
            info = self._fs.stat(descriptor)
            if info.st_size != self.size:
                problem = f"its file has {info.st_size} bytes, not {self.size}"
            elif count != self.size:
                raise OSError(errno.EIO, f"only {count} of {self.size} bytes could be read")
            else:
                problem = verify(page[:HEADER_BYTES], self._namespace, key, payload)
            if not problem and self._fs.now() - info.st_mtime > TOUCH_S:
                with contextlib.suppress(
                    OSError
                ):  # a file of somebody else's: its order is a guess
                    self._fs.touch(descriptor)
        # A chunk that was evicted meanwhile may be half overwritten with another (``FileTier``).
        if problem and self._fs.stat(path).st_ino != info.st_ino:
            raise FileNotFoundError(errno.ENOENT, "it was evicted while it was read")
        return problem

    @contextlib.contextmanager
    def _page(self) -> Iterator[mmap.mmap]:
        try:
            page = self._pages.pop()
        except IndexError:
            page = mmap.mmap(-1, HEAD_BYTES)
        try:
            yield page
        finally:
            self._pages.append(page)

    @contextlib.contextmanager
    def _opened(self, path: str, flags: int) -> Iterator[int]:
        descriptor = self._fs.open(path, flags)
        try:
            yield descriptor
        finally:
            self._fs.close(descriptor)


def takes_direct_io(fs: FileSystem, path: str, payload_bytes: int) -> bool:
    """Whether files such as ``path`` can be written and read past the page cache: by trying."""
    namespace, key = bytes(32), b"direct"
    files = ChunkFiles(fs, namespace, payload_bytes, is_direct=True, is_synced=False)
    payload = memoryview(mmap.mmap(-1, payload_bytes))
    try:
        files.write(path, header(namespace, key, payload), payload)
        return not files.read(path, key, payload)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            fs.remove(path)
