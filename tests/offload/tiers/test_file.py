"""The file tier: what is on the disk, and what happens to it when operations fail or processes die."""

from __future__ import annotations

import errno
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import InputError
from ebbtide.offload.policies import POLICIES
from ebbtide.offload.tiers.base import Result, Status, TierContext
from ebbtide.offload.tiers.file import FileTier, open_file
from ebbtide.offload.tiers.file_io import ABANDONED_S, HEAD_BYTES, TOUCH_S, FileSystem
from ebbtide.offload.tiers.file_settings import FileSettings, parse_url
from ebbtide.testing.tier_contract import (
    Chunk,
    assert_intact,
    assert_ok,
    buffers,
    context,
    keys,
    opened,
)
from ebbtide.testing.tiers import Crash, FaultyFiles, Harm, Strike, strike_at

PAGE = mmap.PAGESIZE
FILE = HEAD_BYTES + PAGE
TICK_S = 0.02  # longer than the clock of a file system ticks
Make = Callable[..., FileTier]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes tiers on one directory, of ``chunks`` chunks of a page. They look at it when told to."""
    tiers: list[FileTier] = []

    def make(
        chunks: int = 100, space: int = 1, files: Any = None, pages: int = 1, **settings: Any
    ) -> FileTier:
        chosen = {
            "directory": str(tmp_path / "kv"),
            "floor": 0,
            "policy": "lru",
            "io": "buffered",
        } | settings
        size = chunks * (HEAD_BYTES + pages * PAGE)
        tier = FileTier(FileSettings(size=size, **chosen), context(pages, space), files)
        tiers.append(tier)
        tier.refresh()
        return tier

    yield make
    for tier in tiers:
        tier.close()


def some(count: int, first: int = 0, pages: int = 1) -> list[Chunk]:
    return [Chunk(number, pages) for number in range(first, first + count)]


def write(tier: FileTier, chunks: list[Chunk]) -> None:
    assert_ok(tier.write(keys(chunks), buffers(chunks)))


def read_one(tier: FileTier, chunk: Chunk) -> Result:
    """Read a chunk: whatever happens to it, it is never another one."""
    target = Chunk.blank(chunk.buffer.nbytes // PAGE)
    (result,) = tier.read([chunk.key], [target])
    assert result.status is not Status.OK or target == chunk.buffer
    return result


def status(tier: FileTier, chunk: Chunk) -> Status:
    return read_one(tier, chunk).status


def files_in(root: Path, suffix: str) -> list[Path]:
    return [path for path in (root / "kv").rglob(f"*{suffix}") if path.is_file()]


def bytes_in(root: Path) -> int:
    """What the tier's files take, whole and half-done."""
    total = 0
    for directory, _, names in os.walk(root / "kv"):
        for name in names:
            if name.endswith((".kv", ".part")):
                total += os.stat(f"{directory}/{name}").st_size
    return total


def file_of(root: Path, chunk: Chunk) -> Path:
    (path,) = (root / "kv").rglob(f"{chunk.key.hex()}.kv")
    return path


def look(tier: FileTier) -> None:
    time.sleep(TICK_S)  # as is always between two looks in operation
    tier.refresh()


def assert_accounts(tier: FileTier, root: Path) -> None:
    stats = tier.stats()
    assert (stats.chunks, stats.bytes) == (len(files_in(root, ".kv")), bytes_in(root))
    assert stats.bytes_max is not None
    assert stats.bytes <= stats.bytes_max


# What a URL says


def test_a_url_says_all_settings() -> None:
    url = "file:///var/my%20cache?size=1.5GiB&floor=200MB&fsync=always&policy=lru&io=buffered"
    assert parse_url(url) == FileSettings(
        "/var/my cache", 3 << 29, 200_000_000, "always", "lru", "buffered"
    )
    assert parse_url("file:///d") == FileSettings("/d")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("file://kv?size=1GiB", "file:///DIR"),
        ("file:kv", "file:///DIR"),
        ("http:///kv", "file:///DIR"),
        ("file:///kv?sise=1GiB", "no setting 'sise': did you mean size\\?"),
        ("file:///kv?colour=blue", "no setting 'colour': there are size, floor"),
        ("file:///kv?size=much", "size is a size such as .* not 'much'"),
        ("file:///kv?size=", "size is a size such as"),
        ("file:///kv?floor=-1", "floor is a size such as"),
        ("file:///kv?fsync=sometimes", "fsync is never or always, not 'sometimes'"),
        ("file:///kv?policy=mru", "policy is .*lru.*, not 'mru'"),
        ("file:///kv?size=1GiB&size=2GiB", "size is given twice"),
    ],
)
def test_a_wrong_url_is_one_sentence(url: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        parse_url(url)


def test_a_place_that_cannot_work_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no room for one chunk, whose file takes 8192 bytes"):
        open_file(f"file://{tmp_path}?size=8KB", context())
    with pytest.raises(InputError, match="whole pages"):
        open_file(f"file://{tmp_path}", TierContext(bytes(32), PAGE + 1))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot use the directory .*/file"):
        open_file(f"file://{tmp_path}/file", context())


# Quota, floor and order


def test_the_quota_holds_at_every_moment(make: Make, tmp_path: Path) -> None:
    files, peak = FaultyFiles(), 0

    def measure(name: str) -> None:
        nonlocal peak
        peak = max(peak, bytes_in(tmp_path))

    files.after = measure
    tier = make(5, files=files)
    chunks = some(12)
    for chunk in chunks:
        write(tier, [chunk])
    assert peak == 5 * FILE
    assert [status(tier, chunk) for chunk in chunks] == [Status.MISSING] * 7 + [Status.OK] * 5
    assert tier.stats().evictions == 7
    assert_accounts(tier, tmp_path)


def test_chunks_of_another_size_make_room(make: Make, tmp_path: Path) -> None:
    write(make(8, space=2), some(8))
    tier = make(4, pages=3)  # 64 KiB as well
    write(tier, some(3, pages=3))
    assert_intact(tier, some(3, pages=3))
    assert_accounts(tier, tmp_path)


def test_a_smaller_quota_after_a_restart_is_kept(make: Make, tmp_path: Path) -> None:
    before = make(10)
    write(before, some(10))
    before.close()
    assert_accounts(make(4), tmp_path)
    assert len(files_in(tmp_path, ".kv")) == 4


def test_the_longest_unused_goes_first_even_after_a_restart(make: Make, tmp_path: Path) -> None:
    before = make(6)
    chunks = some(6)
    write(before, chunks)
    for age, chunk in enumerate(reversed(chunks)):  # the first is the oldest
        old = time.time() - 2 * TOUCH_S - age
        os.utime(file_of(tmp_path, chunk), (old, old))
    assert_intact(before, chunks[:2])
    before.close()
    after = make(6)
    write(after, some(3, first=10))
    there = [status(after, chunk) is Status.OK for chunk in chunks]
    assert there == [True, True, False, False, False, True]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_any_policy_keeps_accounts(make: Make, tmp_path: Path, policy: str) -> None:
    tier, rng = make(5, policy=policy), random.Random(1)
    for _ in range(200):
        chunk = Chunk(rng.randrange(12))
        write(tier, [chunk])
        read_one(tier, Chunk(rng.randrange(12)))
        if rng.random() < 0.2:
            assert_ok(tier.delete([Chunk(rng.randrange(12)).key]))
    assert_accounts(tier, tmp_path)
    assert tier.stats().evictions > 10
    tier.close()
    assert_accounts(make(5, policy=policy), tmp_path)


def test_another_model_counts_and_goes_when_it_is_oldest(make: Make, tmp_path: Path) -> None:
    other = make(6, space=2)
    write(other, some(4))
    look(tier := make(6))
    write(tier, some(5))
    assert_intact(tier, some(5))
    assert_accounts(tier, tmp_path)
    assert [status(other, chunk) for chunk in some(4)].count(Status.OK) == 1


def test_a_tier_that_can_store_nothing_says_so_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make(floor=1 << 60)
    assert not caplog.records
    for chunk in some(3):
        (result,) = tier.write([chunk.key], [chunk.buffer])
        assert result.status is Status.FULL
    (record,) = caplog.records
    assert "no space above the floor of 1099511627776 MiB" in record.getMessage()


def test_the_floor_is_kept(make: Make, tmp_path: Path) -> None:
    free = [10 * FILE]

    class Small(FaultyFiles):
        def free_bytes(self, path: str) -> int:
            return free[0] - bytes_in(tmp_path)

    tier = make(files=Small(), floor=6 * FILE)
    write(tier, some(6))  # four fit, two take the place of others
    assert len(files_in(tmp_path, ".kv")) == 4
    free[0] = 7 * FILE  # somebody else has filled the disk: each write gives something back
    for _ in range(6):
        (result,) = tier.write([Chunk(9).key], [Chunk(9).buffer])
    assert result.status is Status.OK
    assert bytes_in(tmp_path) == FILE
    free[0] = 2 * FILE
    (result,) = tier.write([Chunk(10).key], [Chunk(10).buffer])
    assert result.status is Status.FULL
    assert "floor" in result.message or "evict" in result.message
    assert bytes_in(tmp_path) == 0


# Files that are not what they were


def test_every_bit_counts(make: Make, tmp_path: Path) -> None:
    tier, chunk = make(), Chunk(1)
    write(tier, [chunk])
    whole = file_of(tmp_path, chunk).read_bytes()
    path = file_of(tmp_path, chunk)
    payload = [HEAD_BYTES * 8, HEAD_BYTES * 8 + 12345, FILE * 8 - 1]
    for bit in [*range(112 * 8), *payload]:
        spoiled = bytearray(whole)
        spoiled[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoiled)
        assert status(tier, chunk) is Status.CORRUPT, f"bit {bit}"
        assert not path.exists()
        assert tier.lookup([chunk.key]) == [False]
    write(tier, [chunk])
    assert_intact(tier, [chunk])


@pytest.mark.parametrize("size", [0, 1, 127, 4095, 4096, 4097, FILE - 1, FILE + 1, FILE + PAGE])
@pytest.mark.parametrize("io", ["buffered", "auto"])
def test_a_file_of_another_length_is_corrupt(
    make: Make, tmp_path: Path, size: int, io: str
) -> None:
    tier, chunk = make(io=io), Chunk(1)
    write(tier, [chunk])
    os.truncate(file_of(tmp_path, chunk), size)
    result = read_one(tier, chunk)
    assert result.status is Status.CORRUPT
    assert str(size) in result.message
    assert status(tier, chunk) is Status.MISSING
    assert_accounts(tier, tmp_path)


def test_files_that_were_mixed_up_are_corrupt(make: Make, tmp_path: Path) -> None:
    tier, other = make(), make(space=2)
    first, second = some(2)
    write(tier, [first, second])
    write(other, [first])
    paths = sorted((tmp_path / "kv").rglob(f"{first.key.hex()}.kv"))
    file_of(tmp_path, second).write_bytes(paths[0].read_bytes())
    assert "another chunk" in read_one(tier, second).message
    paths[0].write_bytes(paths[1].read_bytes())
    assert "another model" in read_one(tier, first).message


def test_a_corrupt_chunk_that_cannot_be_removed_is_not_found_again(
    make: Make, tmp_path: Path
) -> None:
    files = FaultyFiles()
    tier, chunk = make(files=files), Chunk(1)
    write(tier, [chunk])
    file_of(tmp_path, chunk).write_bytes(bytes(FILE))
    files.harm = failing("remove", errno.EIO)
    assert status(tier, chunk) is Status.CORRUPT
    assert tier.lookup([chunk.key]) == [False]
    assert_accounts(tier, tmp_path)
    write(tier, [chunk])
    assert tier.lookup([chunk.key]) == [True]
    assert_intact(tier, [chunk])


# Operations that fail


def failing(operation: str, code: int) -> Harm:
    def harm(number: int, name: str, arguments: tuple[Any, ...]) -> Strike | None:
        return Strike(OSError(code, os.strerror(code))) if name == operation else None

    return harm


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.EIO, Status.FAILED),
        (errno.EACCES, Status.FAILED),
        (errno.EROFS, Status.FAILED),
        (errno.EMFILE, Status.FAILED),
        (errno.ENOSPC, Status.FULL),
        (errno.EDQUOT, Status.FULL),
    ],
)
@pytest.mark.parametrize("operation", ["open", "write", "close", "rename", "free_bytes"])
def test_a_failed_write_is_a_result(
    make: Make, tmp_path: Path, operation: str, code: int, expected: Status
) -> None:
    files = FaultyFiles()
    tier, chunk = make(files=files), Chunk(1)
    files.harm = failing(operation, code)
    (result,) = tier.write([chunk.key], [chunk.buffer])
    assert result.status is expected
    assert os.strerror(code) in result.message
    files.harm = strike_at(0, Crash(), for_ever=False)
    assert bytes_in(tmp_path) == tier.stats().bytes == 0
    assert status(tier, chunk) is Status.MISSING
    write(tier, [chunk])


@pytest.mark.parametrize("operation", ["open", "read", "stat", "close"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_failed_read_is_a_result(make: Make, operation: str, code: int) -> None:
    files = FaultyFiles()
    tier, chunk = make(files=files), Chunk(1)
    write(tier, [chunk])
    files.harm = failing(operation, code)
    assert status(tier, chunk) is Status.FAILED
    files.harm = failing("touch", code)
    assert_intact(tier, [chunk])


def test_a_short_write_or_read_is_a_result(make: Make, tmp_path: Path) -> None:
    class Short(FaultyFiles):
        limit = FILE

        def write(self, descriptor: int, buffers: Any) -> int:
            return os.write(descriptor, b"".join(map(bytes, buffers))[: self.limit])

        def read(self, descriptor: int, buffers: Any) -> int:
            return min(self.limit, os.preadv(descriptor, buffers, 0))

    files = Short()
    tier, chunk = make(files=files), Chunk(1)
    files.limit = FILE - 1
    (result,) = tier.write([chunk.key], [chunk.buffer])
    assert result == Result(Status.FULL, f"only {FILE - 1} of {FILE} bytes were written")
    assert bytes_in(tmp_path) == 0
    files.limit = FILE
    write(tier, [chunk])
    files.limit = PAGE
    assert status(tier, chunk) is Status.FAILED
    files.limit = FILE
    assert_intact(tier, [chunk])


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, make: Make, code: int
) -> None:
    with pytest.raises(InputError, match=rf"{tmp_path}/kv: {os.strerror(code)}"):
        make(files=FaultyFiles(failing("open", code)))


def test_a_directory_that_is_gone_takes_the_tier_down_and_back(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make()
    write(tier, some(2))
    (tmp_path / "kv").rename(tmp_path / "elsewhere")
    tier.refresh()
    tier.refresh()
    assert tier.stats().state.startswith("down: No such file")
    assert tier.lookup(keys(some(2))) == [False] * 2
    (result,) = tier.write([Chunk(3).key], [Chunk(3).buffer])
    assert result.status is Status.FAILED
    assert not (tmp_path / "kv").exists(), "it may be a mount: nothing is to be written below it"
    (tmp_path / "elsewhere").rename(tmp_path / "kv")
    tier.refresh()
    assert tier.stats().state == "up"
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in said] == [
        "the file tier is down",
        "the file tier could not store a chunk",
        "the file tier is back",
    ]
    write(tier, [Chunk(3)])
    assert_intact(tier, some(2))


# The N-th operation fails, for every N

QUOTA = 4  # chunks


class Unsynced(FileSystem):
    def sync(self, descriptor: int) -> None:
        """Would take most of the time, and change nothing that a test can see."""


def live(root: Path, files: FaultyFiles) -> FileTier | None:
    """A tier's life, with every kind of operation. None where it could not be opened."""
    settings = FileSettings(str(root / "kv"), QUOTA * FILE, floor=0, fsync="always", io="buffered")
    try:
        tier = FileTier(settings, context(), files)  # type: ignore[arg-type]
    except InputError:
        return None
    tier.refresh()
    for chunk in some(6):
        tier.write([chunk.key], [chunk.buffer])
    tier.delete([Chunk(5).key])
    if there := files_in(root, ".kv"):
        there[0].write_bytes(bytes(FILE))
    for chunk in some(6):
        read_one(tier, chunk)
    tier.refresh()
    for chunk in some(2, first=6):
        tier.write([chunk.key], [chunk.buffer])
    return tier


def length_of_life(root: Path) -> int:
    files = FaultyFiles(files=Unsynced())
    tier = live(root, files)
    assert tier is not None
    tier.close()
    return files.count


def assert_sound(root: Path, make: Make) -> None:
    """After a reopening: no leftovers, exact accounts, and each chunk intact or absent."""
    tier = make(QUOTA)
    assert files_in(root, ".part") == []
    assert len(files_in(root, ".lock")) == 1
    assert_accounts(tier, root)
    for chunk in some(9):
        assert status(tier, chunk) in (Status.OK, Status.MISSING, Status.CORRUPT)
    assert_accounts(tier, root)
    write(tier, some(4))
    assert_intact(tier, some(4))
    tier.close()


@pytest.mark.parametrize("is_done", [False, True], ids=["not-done", "done"])
@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for-ever"])
def test_any_operation_may_fail(tmp_path: Path, make: Make, for_ever: bool, is_done: bool) -> None:
    for number in range(1, length_of_life(tmp_path / "0") + 1):
        root = tmp_path / str(number)
        error = OSError(errno.EIO, "injected")
        harm = strike_at(number, error, for_ever=for_ever, is_done=is_done)
        files = FaultyFiles(harm, Unsynced())

        def within_quota(name: str, root: Path = root) -> None:
            if name in ("write", "rename"):
                assert bytes_in(root) <= QUOTA * FILE

        files.after = within_quota
        tier = live(root, files)
        if tier is not None:
            files.harm = strike_at(0, error, for_ever=False)
            tier.refresh()
            assert tier.stats().state == "up"
            assert_accounts(tier, root)
            tier.close()
        assert_sound(root, lambda chunks, root=root: make(chunks, directory=str(root / "kv")))


def test_a_crash_between_any_two_operations(tmp_path: Path, make: Make) -> None:
    for number in range(1, length_of_life(tmp_path / "0") + 1):
        root = tmp_path / str(number)
        files = FaultyFiles(strike_at(number, Crash(), for_ever=True), Unsynced())
        try:
            tier = live(root, files)
            assert tier is not None
            tier.close()
        except Crash:
            files.crash()
        assert bytes_in(root) <= QUOTA * FILE
        assert_sound(root, lambda chunks, root=root: make(chunks, directory=str(root / "kv")))


WORK = """
import random, sys
from ebbtide.offload.tiers.file import open_file
from ebbtide.testing.tier_contract import Chunk, context
tier = open_file(sys.argv[1], context())
while tier.stats().state == "starting":
    pass
rng = random.Random(sys.argv[2])
print("ready", flush=True)
while True:
    chunk = Chunk(rng.randrange(40))
    if rng.random() < 0.2:
        tier.delete([chunk.key])
    else:
        tier.write([chunk.key], [chunk.buffer])
"""


def test_a_process_killed_at_any_moment(tmp_path: Path, make: Make) -> None:
    rng = random.Random(1)
    url = f"file://{tmp_path}/kv?size={20 * FILE}&floor=0"
    for seed in range(4):
        command = [sys.executable, "-c", WORK, url, str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.0, 0.1))
            child.send_signal(signal.SIGKILL)
        tier = make(20)
        assert files_in(tmp_path, ".part") == []
        assert_accounts(tier, tmp_path)
        assert {status(tier, chunk) for chunk in some(40)} <= {Status.OK, Status.MISSING}
        tier.close()
    assert files_in(tmp_path, ".kv")


# Several on one directory


def test_each_sees_what_the_other_does(make: Make, tmp_path: Path) -> None:
    one, other = make(), make()
    write(one, some(3))
    look(other)
    assert other.lookup(keys(some(3))) == [True] * 3
    assert_intact(other, some(3))
    assert_ok(one.delete([Chunk(0).key]))
    assert status(other, Chunk(0)) is Status.MISSING  # before it has looked
    assert_ok(one.delete([Chunk(1).key]))
    look(other)
    assert other.lookup(keys(some(3))) == [False, False, True]
    for tier in (one, other):
        look(tier)
        assert_accounts(tier, tmp_path)


def test_what_the_other_evicted_can_be_written_again(make: Make, tmp_path: Path) -> None:
    one, other = make(), make()
    write(one, some(1))
    look(other)
    other.delete([Chunk(0).key])
    write(one, some(1))
    assert_intact(one, some(1))
    look(one)
    assert_accounts(one, tmp_path)


def test_the_quota_counts_what_others_wrote(make: Make, tmp_path: Path) -> None:
    one, other = make(6), make(6)
    write(one, some(5))
    write(other, some(5, first=5))
    look(one)  # sees ten chunks where there is room for six
    assert_accounts(one, tmp_path)
    look(other)
    assert_accounts(other, tmp_path)
    write(other, some(6, first=20))  # while ``one`` does not look
    assert len(files_in(tmp_path, ".kv")) == 6


def test_only_what_has_changed_is_looked_into(make: Make, tmp_path: Path) -> None:
    scanned: list[str] = []
    files = FaultyFiles()
    tier = make(files=files)
    write(tier, some(20))
    for _ in range(3):
        look(tier)

    def note(number: int, name: str, arguments: tuple[Any, ...]) -> Strike | None:
        if name == "scan":
            scanned.append(arguments[0])
        assert name != "read", "a look reads no payload"
        return None

    files.harm = note
    tier.refresh()
    depth = len((tmp_path / "kv").parts)
    assert max(len(Path(path).parts) for path in scanned) == depth + 1
    other = make()
    write(other, [Chunk(50)])
    scanned.clear()
    look(tier)
    assert tier.lookup([Chunk(50).key]) == [True]
    assert sum(len(Path(path).parts) == depth + 2 for path in scanned) == 1


def test_what_a_living_process_writes_is_left_alone(make: Make, tmp_path: Path) -> None:
    files = FaultyFiles()
    one = make(files=files)

    def meanwhile(number: int, name: str, arguments: tuple[Any, ...]) -> Strike | None:
        if name == "rename":
            other = make()
            other.refresh()
            assert other.stats().bytes == 0
            assert other._others == FILE
        return None

    files.harm = meanwhile
    write(one, some(1))
    assert_intact(one, some(1))


def test_where_files_cannot_be_locked_age_tells(make: Make, tmp_path: Path) -> None:
    def lockless() -> FaultyFiles:
        return FaultyFiles(failing("lock", errno.ENOLCK))

    dead = lockless()
    make(files=dead)
    part = files_in(tmp_path, ".lock")[0].with_suffix(".7.part")
    part.write_bytes(bytes(10))
    tier = make(files=lockless())
    assert part.exists()
    later = lockless()
    later.skew_s = ABANDONED_S + 10
    tier.close()
    make(files=later)
    assert not part.exists()


def test_a_chunk_evicted_while_it_is_read_is_missing(make: Make) -> None:
    files = FaultyFiles()
    tier, reader = make(2), make(2, files=files)
    write(tier, some(2))
    look(reader)

    def meanwhile(number: int, name: str, arguments: tuple[Any, ...]) -> Strike | None:
        if name == "read":
            write(tier, some(2, first=5))  # takes the file that the reader has open
        return None

    files.harm = meanwhile
    assert status(reader, Chunk(0)) is Status.MISSING


def test_threads_and_tiers_on_one_full_directory(make: Make, tmp_path: Path) -> None:
    tiers = [make(8), make(8, io="auto")]
    problems: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        tier = tiers[seed % 2]
        for turn in range(80):
            chunk = Chunk(rng.randrange(16))
            results = tier.write([chunk.key], [chunk.buffer])
            results.append(read_one(tier, Chunk(rng.randrange(16))))
            if rng.random() < 0.2:
                results += tier.delete([chunk.key])
            if seed < 2 and turn % 20 == 0:
                look(tier)
            fine = (Status.OK, Status.MISSING, Status.FULL)
            problems.extend(str(result) for result in results if result.status not in fine)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    for tier in tiers:
        look(tier)
    look(tiers[0])
    for tier in tiers:
        assert_accounts(tier, tmp_path)
    assert files_in(tmp_path, ".part") == []


# Start and end


def test_it_serves_while_it_loads(make: Make, tmp_path: Path) -> None:
    before = make()
    chunks = some(4)
    write(before, chunks)
    before.close()
    gate, is_there = threading.Event(), threading.Event()

    def wait(number: int, name: str, arguments: tuple[Any, ...]) -> Strike | None:
        if name == "entry_stat" and arguments[0].name.endswith(".kv"):
            is_there.set()
            assert gate.wait(20)
        return None

    settings = FileSettings(str(tmp_path / "kv"), 100 * FILE, floor=0)
    tier = FileTier(settings, context(), FaultyFiles(wait))  # type: ignore[arg-type]
    tier.start()
    try:
        assert is_there.wait(20)
        assert tier.stats().state == "starting"
        assert tier.lookup([b"no such key"]) == [False]
        assert_intact(tier, chunks)
        (result,) = tier.write([Chunk(9).key], [Chunk(9).buffer])
        assert result.status is Status.FULL
    finally:
        gate.set()
    with opened(lambda _: tier):
        assert tier.lookup(keys(chunks)) == [True] * 4
        write(tier, [Chunk(9)])


def test_closing_waits_for_what_is_under_way(make: Make) -> None:
    gate, is_there, results = threading.Event(), threading.Event(), []

    def wait(number: int, name: str, arguments: tuple[Any, ...]) -> Strike | None:
        if name == "write":
            is_there.set()
            assert gate.wait(20)
        return None

    files = FaultyFiles()
    tier, chunk = make(files=files), Chunk(1)
    files.harm = wait
    writer = threading.Thread(
        target=lambda: results.extend(tier.write([chunk.key], [chunk.buffer]))
    )
    writer.start()
    assert is_there.wait(20)
    closer = threading.Thread(target=tier.close)
    closer.start()
    time.sleep(0.05)
    assert closer.is_alive()
    gate.set()
    writer.join()
    closer.join()
    assert_ok(results)
    assert_intact(make(), [chunk])


def test_nothing_is_left_open(make: Make, tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(3):
        with opened(lambda c: open_file(f"file://{tmp_path}/kv?floor=0", c)) as tier:
            tier.write(keys(some(3)), buffers(some(3)))
            tier.read(keys(some(5)), buffers(some(5)))
    assert descriptors() == before
    assert files_in(tmp_path, ".lock") == []
