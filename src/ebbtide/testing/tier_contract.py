"""What every tier promises (``offload.tiers.base``), as tests to be run on a tier of your own.

    class TestMine(TierContract):
        @pytest.fixture
        def open_tier(self, tmp_path):
            return lambda context: open_mine(f"mine://{tmp_path}", context)

``open_tier(context)`` opens a tier; all that one test opens keep their chunks in the same place, and the
next test finds an empty one. A tier that has a quota should be given one of 24 MiB or more.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ebbtide.keys import chunk_key
from ebbtide.offload.tiers.base import Entry, Inventory, Result, Status, Tier, TierContext

PAGE = mmap.PAGESIZE
START_S = 20.0
SOME_TIME_S = 3600.0  # that a clock of somebody else may be off, and a test may take
FILLED_BYTES_MAX = 64 << 20  # a tier of a larger quota is not filled
Open = Callable[[TierContext], Tier]


class TierContract:
    is_persistent = True
    """Whether chunks are found again by a tier that is opened later. Override where not so."""

    def test_what_is_written_is_read_whatever_its_size(self, open_tier: Open) -> None:
        for pages in (1, 3, 256):
            with opened(open_tier, context(pages, space=pages)) as tier:
                written = [Chunk(number, pages) for number in range(5)]
                assert_ok(tier.write(keys(written), buffers(written)))
                assert tier.lookup(keys(written)) == [True] * 5
                assert_intact(tier, written)

    def test_writing_leaves_the_buffer_as_it_was(self, open_tier: Open) -> None:
        with opened(open_tier) as tier:
            chunk = Chunk(1)
            tier.write([chunk.key], [chunk.buffer])
            assert chunk.is_intact(), "the tier has changed a buffer that it was to write"

    def test_reading_fills_the_buffer_and_nothing_beside_it(self, open_tier: Open) -> None:
        with opened(open_tier) as tier:
            chunk = Chunk(1)
            assert_ok(tier.write([chunk.key], [chunk.buffer]))
            pages = memoryview(mmap.mmap(-1, 3 * PAGE))
            assert_ok(tier.read([chunk.key], [pages[PAGE : 2 * PAGE]]))
            assert pages[PAGE : 2 * PAGE] == chunk.buffer
            assert not any(pages[:PAGE]), "the tier wrote before the buffer"
            assert not any(pages[2 * PAGE :]), "the tier wrote behind the buffer"

    def test_each_key_has_its_own_result_in_order(self, open_tier: Open) -> None:
        with opened(open_tier) as tier:
            chunks = [Chunk(number) for number in range(8)]
            assert_ok(tier.write(keys(chunks[::2]), buffers(chunks[::2])))
            order = [5, 0, 7, 2, 1, 6, 3, 4]
            mixed = [chunks[number] for number in order]
            assert tier.lookup(keys(mixed)) == [number % 2 == 0 for number in order]
            targets = [Chunk.blank() for _ in mixed]
            for number, result, target in zip(
                order, tier.read(keys(mixed), targets), targets, strict=True
            ):
                if number % 2:
                    assert result.status is Status.MISSING, result
                else:
                    assert result.status is Status.OK, result
                    assert target == chunks[number].buffer

    def test_no_keys_have_no_results(self, open_tier: Open) -> None:
        with opened(open_tier) as tier:
            assert tier.lookup([]) == []
            assert tier.read([], []) == tier.write([], []) == tier.delete([]) == []

    def test_any_bytes_are_a_key(self, open_tier: Open) -> None:
        with opened(open_tier) as tier:
            digests = [bytes(32), b"\xff" * 32, b"/../" * 8, b"\r\n\0 " * 8, bytes(range(32))]
            chunks = [
                Chunk(number, key=chunk_key(digest, group))
                for number, (digest, group) in enumerate(
                    (digest, group) for digest in digests for group in (0, 1, 256)
                )
            ]
            assert_ok(tier.write(keys(chunks), buffers(chunks)))
            assert_intact(tier, chunks)
            tier.delete([chunks[0].key])
            assert tier.lookup(keys(chunks)) == [False] + [True] * (len(chunks) - 1)

    def test_a_chunk_can_be_written_again(self, open_tier: Open) -> None:
        with opened(open_tier) as tier:
            chunk = Chunk(1)
            for _ in range(3):
                twice = [chunk, chunk]
                assert_ok(tier.write(keys(twice), buffers(twice)))
                assert_intact(tier, twice)

    def test_what_was_deleted_is_missing_and_can_come_back(self, open_tier: Open) -> None:
        with opened(open_tier) as tier:
            gone, kept = Chunk(1), Chunk(2)
            for _ in range(2):
                assert_ok(tier.write(keys([gone, kept]), buffers([gone, kept])))
                for _ in range(2):
                    assert_ok(tier.delete([gone.key]))
                    assert tier.lookup(keys([gone, kept])) == [False, True]
                    (result,) = tier.read([gone.key], [Chunk.blank()])
                    assert result.status is Status.MISSING, result
                assert_intact(tier, [kept])

    def test_another_model_or_layout_never_hits(self, open_tier: Open) -> None:
        with opened(open_tier) as mine, opened(open_tier, context(space=2)) as other:
            chunk = Chunk(1)
            assert_ok(mine.write([chunk.key], [chunk.buffer]))
            assert other.lookup([chunk.key]) == [False]
            (result,) = other.read([chunk.key], [Chunk.blank()])
            assert result.status is Status.MISSING, result
            assert_ok(other.delete([chunk.key]))
            assert_intact(mine, [chunk])

    def test_clearing_forgets_its_own_chunks_only(self, open_tier: Open) -> None:
        with opened(open_tier) as mine, opened(open_tier, context(space=2)) as other:
            chunks = [Chunk(number) for number in range(6)]
            for tier in (mine, other):
                assert_ok(tier.write(keys(chunks), buffers(chunks)))
            for _ in range(2):
                assert_ok([mine.clear()])
                assert mine.lookup(keys(chunks)) == [False] * 6
            for result in mine.read(keys(chunks), [Chunk.blank() for _ in chunks]):
                assert result.status is Status.MISSING, result
            assert_intact(other, chunks)
            assert_ok(mine.write(keys(chunks), buffers(chunks)))
            assert_intact(mine, chunks)

    def test_a_tier_opened_later_finds_what_was_written(self, open_tier: Open) -> None:
        chunks = [Chunk(number) for number in range(6)]
        with opened(open_tier) as tier:
            assert_ok(tier.write(keys(chunks), buffers(chunks)))
            assert_ok(tier.delete([chunks[0].key]))
        with opened(open_tier) as tier:
            there = self.is_persistent
            assert tier.lookup(keys(chunks)) == [False] + [there] * 5
            if there:
                assert_intact(tier, chunks[1:])

    def test_several_threads_at_once(self, open_tier: Open) -> None:
        with opened(open_tier) as tier:
            chunks = [Chunk(number) for number in range(16)]
            problems: list[str] = []

            def work(seed: int) -> None:
                rng = random.Random(seed)
                for _ in range(60):
                    chunk = rng.choice(chunks)
                    problem = _act(rng, tier, chunk)
                    if problem:
                        problems.append(problem)

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not problems
            assert_ok(tier.write(keys(chunks), buffers(chunks)))
            assert_intact(tier, chunks)

    def test_its_quota_is_kept(self, open_tier: Open) -> None:
        with opened(open_tier, context(256)) as tier:
            bytes_max = tier.stats().bytes_max
            if bytes_max is None or bytes_max > FILLED_BYTES_MAX:
                return
            chunks = [Chunk(number, 256) for number in range(2 * bytes_max // (256 * PAGE))]
            for chunk in chunks:
                (result,) = tier.write([chunk.key], [chunk.buffer])
                assert result.status in (Status.OK, Status.FULL), result
                assert tier.stats().bytes <= bytes_max
            targets = [Chunk.blank(256) for _ in chunks]
            results = tier.read(keys(chunks), targets)
            for chunk, result, target in zip(chunks, results, targets, strict=True):
                assert result.status in (Status.OK, Status.MISSING), result
                assert result.status is Status.MISSING or target == chunk.buffer
            assert any(result.status is Status.OK for result in results), "nothing was kept"

    def test_what_is_stored_can_be_looked_through(self, open_tier: Open) -> None:
        """Of every namespace and size; only where a tier is an ``Inventory``."""
        mine, theirs = (
            [Chunk(number) for number in range(5)],
            [Chunk(number, 3) for number in (0, 9)],
        )
        with opened(open_tier) as tier, opened(open_tier, context(3, space=2)) as other:
            if not isinstance(tier, Inventory):
                return
            assert_ok(tier.write(keys(mine), buffers(mine)))
            here = {(context().namespace, chunk.key): chunk for chunk in mine}
            if self.is_persistent:
                assert_ok(other.write(keys(theirs), buffers(theirs)))
                here |= {(context(space=2).namespace, chunk.key): chunk for chunk in theirs}
            found = {(entry.namespace, entry.key): entry for entry in tier.entries()}
            assert found.keys() == here.keys()
            for name, entry in found.items():
                assert entry.bytes >= here[name].buffer.nbytes
                assert entry.used_at is None or abs(time.time() - entry.used_at) < SOME_TIME_S
                assert_ok([tier.check(entry)])
            assert_intact(tier, mine)

    def test_what_was_looked_through_can_be_removed(self, open_tier: Open) -> None:
        chunks = [Chunk(number) for number in range(5)]
        with opened(open_tier) as tier:
            if not isinstance(tier, Inventory):
                return
            assert not list(tier.entries())
            assert tier.remove([]) == []
            assert_ok(tier.write(keys(chunks), buffers(chunks)))
            here = {entry.key: entry for entry in tier.entries()}
            gone, kept = chunks[:2], chunks[2:]
            entries = [here[chunk.key] for chunk in gone]
            absent = Entry(context().namespace, Chunk(99).key, PAGE, None)
            for _ in range(2):
                assert_ok(tier.remove([*entries, absent]))
            for entry in (*entries, absent):
                assert tier.check(entry).status is Status.MISSING
            assert {entry.key for entry in tier.entries()} == set(keys(kept))
            assert tier.lookup(keys(chunks)) == [False] * 2 + [True] * 3
            assert_intact(tier, kept)

    def test_stats(self, open_tier: Open) -> None:
        with opened(open_tier) as tier:
            chunk = Chunk(1)
            assert_ok(tier.write([chunk.key], [chunk.buffer]))
            stats = tier.stats()
            assert stats.state == "up"
            assert min(stats.chunks, stats.bytes, stats.evictions) >= 0
            assert stats.bytes_max is None or 0 < stats.bytes <= stats.bytes_max
            assert tier.name
            assert tier.immediate in (True, False)

    def test_a_closed_tier_fails_and_does_not_raise(self, open_tier: Open) -> None:
        with opened(open_tier) as tier:
            chunk = Chunk(1)
            assert_ok(tier.write([chunk.key], [chunk.buffer]))
            tier.close()
            tier.close()
            assert tier.lookup([chunk.key] * 2) == [False] * 2
            two = [chunk.key] * 2, [chunk.buffer] * 2
            results = [*tier.read(*two), *tier.write(*two), *tier.delete(two[0]), tier.clear()]
            assert [result.status for result in results] == [Status.FAILED] * 7
            assert tier.stats().chunks >= 0


class Chunk:
    """A chunk of random bytes, which are a function of its number."""

    def __init__(self, number: int, pages: int = 1, key: bytes | None = None) -> None:
        self._bytes = random.Random(number).randbytes(pages * PAGE)
        self.key = key or chunk_key(random.Random(-1 - number).randbytes(32), number % 3)
        self.buffer = self.blank(pages)
        self.buffer[:] = self._bytes

    def is_intact(self) -> bool:
        return bytes(self.buffer) == self._bytes

    @staticmethod
    def blank(pages: int = 1) -> memoryview:
        return memoryview(mmap.mmap(-1, pages * PAGE))


def context(pages: int = 1, space: int = 1) -> TierContext:
    return TierContext(bytes([space % 256]) * 32, pages * PAGE)


@contextlib.contextmanager
def opened(open_tier: Open, place: TierContext | None = None) -> Iterator[Tier]:
    """A tier that has finished starting; it is closed in the end."""
    tier = open_tier(place or context())
    try:
        end = time.monotonic() + START_S
        while tier.stats().state == "starting" and time.monotonic() < end:
            time.sleep(0.001)
        yield tier
    finally:
        tier.close()


def keys(chunks: Sequence[Chunk]) -> list[bytes]:
    return [chunk.key for chunk in chunks]


def buffers(chunks: Sequence[Chunk]) -> list[memoryview]:
    return [chunk.buffer for chunk in chunks]


def assert_ok(results: Sequence[Result]) -> None:
    bad = [result for result in results if result.status is not Status.OK]
    assert not bad, f"not OK: {bad}"


def assert_intact(tier: Tier, chunks: Sequence[Chunk]) -> None:
    """All chunks are there, with every byte."""
    targets = [memoryview(mmap.mmap(-1, chunk.buffer.nbytes)) for chunk in chunks]
    assert_ok(tier.read(keys(chunks), targets))
    for chunk, target in zip(chunks, targets, strict=True):
        assert target == chunk.buffer, "a chunk that was read OK is not what was written"


def _act(rng: random.Random, tier: Tier, chunk: Chunk) -> str:
    """One call of any kind. Returns what is wrong with its result."""
    match rng.randrange(4):
        case 0:
            (result,) = tier.write([chunk.key], [chunk.buffer])
            return "" if result.status is Status.OK else f"write: {result}"
        case 1:
            (result,) = tier.delete([chunk.key])
            return "" if result.status is Status.OK else f"delete: {result}"
        case _:
            target = Chunk.blank(chunk.buffer.nbytes // PAGE)
            (result,) = tier.read([chunk.key], [target])
            if result.status is Status.OK:
                return "" if target == chunk.buffer else "read: other bytes than were written"
            return "" if result.status is Status.MISSING else f"read: {result}"
