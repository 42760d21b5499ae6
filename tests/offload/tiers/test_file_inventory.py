"""Looking at a file tier's directory: what is told, and that nothing is changed by it."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import InputError
from ebbtide.offload.tiers.base import OK, Entry, Status
from ebbtide.offload.tiers.file import FileTier
from ebbtide.offload.tiers.file_inventory import FILE_BYTES_MAX, FileInventory, open_inventory
from ebbtide.offload.tiers.file_io import DIRECT, HEAD_BYTES, FileSystem
from ebbtide.offload.tiers.file_settings import FileSettings
from ebbtide.testing.tier_contract import (
    Chunk,
    assert_intact,
    assert_ok,
    buffers,
    context,
    keys,
    opened,
)

FILE = HEAD_BYTES + mmap.PAGESIZE
USED_AT = 1_700_000_000.0


def open_tier(root: Path, pages: int = 1, space: int = 1) -> FileTier:
    """It looks at the directory when it is told to."""
    tier = FileTier(FileSettings(str(root), floor=0, io="buffered"), context(pages, space))
    tier.refresh()
    return tier


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With six chunks of one namespace, and three larger ones of another; all were used at USED_AT."""
    root = tmp_path / "kv"
    for count, pages, space in ((6, 1, 1), (3, 3, 2)):
        chunks = [Chunk(number, pages) for number in range(count)]
        with opened(lambda _, p=pages, s=space: open_tier(root, p, s)) as tier:  # type: ignore[misc]
            assert_ok(tier.write(keys(chunks), buffers(chunks)))
    for path in root.rglob("*.kv"):
        os.utime(path, (USED_AT, USED_AT))
    return root


def path_of(root: Path, entry: Entry) -> Path:
    key = entry.key.hex()
    return root / entry.namespace.hex() / key[:2] / f"{key}.kv"


def tree(root: Path) -> dict[Path, tuple[int, int, int]]:
    """All that anybody can see of a directory."""
    found = {}
    for path in (root, *root.rglob("*")):
        info = path.stat()
        found[path] = info.st_size, info.st_mtime_ns, info.st_ino
    return found


def test_entries_of_all_namespaces_and_sizes(root: Path) -> None:
    found = list(FileInventory(str(root)).entries())
    mine = {(context().namespace, Chunk(number).key, FILE) for number in range(6)}
    large = HEAD_BYTES + 3 * mmap.PAGESIZE
    theirs = {(context(space=2).namespace, Chunk(number).key, large) for number in range(3)}
    assert {entry[:3] for entry in found} == mine | theirs
    assert {entry.used_at for entry in found} == {USED_AT}


def test_looking_changes_nothing(root: Path) -> None:
    (root / "writing" / f"{'0' * 32}.1.part").write_bytes(b"of somebody who died")
    before = tree(root)
    inventory = open_inventory(f"file://{root}?size=1")
    assert all(inventory.check(entry) is OK for entry in inventory.entries())
    inventory.close()
    assert tree(root) == before


def test_a_directory_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no directory"):
        open_inventory(f"file://{tmp_path}/kv")
    assert not (tmp_path / "kv").exists()


def test_entries_are_listed_a_directory_at_a_time(root: Path) -> None:
    class Counting(FileSystem):
        looked = 0

        def scan(self, path: str) -> list[os.DirEntry[str]]:
            self.looked += 1
            return super().scan(path)

    files = Counting()
    entries = FileInventory(str(root), files).entries()
    next(entries)
    first = files.looked
    assert len(list(entries)) == 8
    assert first == 3  # the root, its first namespace, and the first place of it
    assert files.looked > 2 * first


def test_what_goes_while_it_is_listed_is_left_out(root: Path) -> None:
    class Losing(FileSystem):
        def entry_stat(self, entry: os.DirEntry[str]) -> os.stat_result:
            if entry.name == f"{Chunk(0).key.hex()}.kv":
                os.unlink(entry.path)
            return super().entry_stat(entry)

    found = [entry.key for entry in FileInventory(str(root), Losing()).entries()]
    assert len(found) == 7
    assert Chunk(0).key not in found


def test_what_cannot_be_listed_is_said(root: Path) -> None:
    class Forbidden(FileSystem):
        def scan(self, path: str) -> list[os.DirEntry[str]]:
            if path == f"{root}/{context(space=2).namespace.hex()}":
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return super().scan(path)

    with pytest.raises(PermissionError):
        list(FileInventory(str(root), Forbidden()).entries())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def swap(path: Path) -> None:
    """With a chunk of another name."""
    other = next(each for each in path.parents[1].rglob("*.kv") if each != path)
    path.write_bytes(other.read_bytes())


HARM: dict[str, Callable[[Path], object]] = {
    "its checksum": flip,
    "another chunk": swap,
    "has 100 bytes": lambda path: os.truncate(path, 100),
    "has 0 bytes": lambda path: os.truncate(path, 0),
    "bytes, not": lambda path: os.truncate(path, HEAD_BYTES + 100),
    f"has {FILE_BYTES_MAX + 1} bytes": lambda path: os.truncate(path, FILE_BYTES_MAX + 1),
    "not a chunk": lambda path: path.write_bytes(b"\0" * FILE),
}


@pytest.mark.parametrize("words", HARM)
def test_what_is_corrupt_is_found_and_kept(root: Path, words: str) -> None:
    inventory = FileInventory(str(root))
    entries = list(inventory.entries())
    bad = next(entry for entry in entries if entry.key == Chunk(0).key)
    HARM[words](path_of(root, bad))
    for entry in entries:
        status, message = inventory.check(entry)
        assert status is (Status.CORRUPT if entry is bad else Status.OK)
        assert (words in message) == (entry is bad)
    assert path_of(root, bad).exists()


def test_a_chunk_of_another_model_is_corrupt(root: Path) -> None:
    entry = next(FileInventory(str(root)).entries())
    other = entry._replace(namespace=b"\3" * 32)
    path_of(root, other).parent.mkdir(parents=True)
    path_of(root, entry).rename(path_of(root, other))
    status, message = FileInventory(str(root)).check(other)
    assert status is Status.CORRUPT
    assert "another model" in message


@pytest.mark.parametrize("is_back", [False, True])
def test_what_was_evicted_while_it_was_read_is_missing(root: Path, is_back: bool) -> None:
    """A server takes the file of its victim for the next chunk."""

    class Evicting(FileSystem):
        def read(self, descriptor: int, buffers: Any) -> int:
            victim = path_of(root, entry)
            part = root / "writing" / "part"
            victim.rename(part)
            flip(part)
            if is_back:
                victim.write_bytes(b"written anew")
            return super().read(descriptor, buffers)

    entry = next(FileInventory(str(root)).entries())
    assert FileInventory(str(root), Evicting()).check(entry).status is Status.MISSING


@pytest.mark.parametrize("operation", ["open", "read", "stat"])
def test_what_cannot_be_read_has_failed(root: Path, operation: str) -> None:
    class Broken(FileSystem):
        pass

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    setattr(Broken, operation, fail)
    entry = next(FileInventory(str(root)).entries())
    assert FileInventory(str(root), Broken()).check(entry).status is Status.FAILED
    assert path_of(root, entry).exists()


@pytest.mark.skipif(not DIRECT, reason="the system has no direct I/O")
@pytest.mark.parametrize("operation", ["open", "read"])
def test_a_file_system_without_direct_io(root: Path, operation: str) -> None:
    class Buffered(FileSystem):
        refused = 0
        flags = 0

        def open(self, path: str, flags: int) -> int:
            self.flags = flags
            self._refuse("open")
            return super().open(path, flags & ~DIRECT)

        def read(self, descriptor: int, buffers: Any) -> int:
            self._refuse("read")
            return super().read(descriptor, buffers)

        def _refuse(self, name: str) -> None:
            if name == operation and self.flags & DIRECT:
                self.refused += 1
                raise OSError(errno.EINVAL, "Invalid argument")

    files = Buffered()
    inventory = FileInventory(str(root), files)
    for entry in inventory.entries():
        assert inventory.check(entry) is OK
    assert files.refused == 1


def test_a_server_misses_what_was_removed_and_writes_it_again(root: Path) -> None:
    chunks = [Chunk(number) for number in range(6)]
    with opened(lambda _: open_tier(root)) as tier:
        inventory = FileInventory(str(root))
        mine = [entry for entry in inventory.entries() if entry.namespace == context().namespace]
        assert_ok(inventory.remove(mine[:4]))
        first, *others = (chunk for chunk in chunks if chunk.key in {e.key for e in mine[:4]})
        assert tier.read([first.key], [Chunk.blank()])[0].status is Status.MISSING
        assert_ok(tier.write(keys([others[0]]), buffers([others[0]])))  # it believes it has it
        time.sleep(0.02)  # longer than the clock of a file system ticks
        tier.refresh()
        assert tier.stats().chunks == 6
        assert_ok(tier.write(keys(chunks), buffers(chunks)))
        assert tier.stats().chunks == 9
        assert_intact(tier, chunks)


def test_a_tier_keeps_its_accounts_when_asked_to_remove(root: Path) -> None:
    with opened(lambda _: open_tier(root)) as tier:
        entries = list(tier.entries())
        assert len(entries) == 9
        assert_ok(tier.remove(entries[:4]))
        stats = tier.stats()
        assert (stats.chunks, stats.bytes) == (5, sum(entry.bytes for entry in entries[4:]))
    assert [result.status for result in tier.remove(entries)] == [Status.FAILED] * 9
