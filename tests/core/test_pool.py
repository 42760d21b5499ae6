"""The block pool against a slow model: a record per block, and no index."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ebbtide.core.pool import BlockPool

NUM_BLOCKS, NUM_GROUPS = 6, 2
names = st.tuples(st.integers(0, NUM_GROUPS - 1), st.sampled_from([b"a", b"b", b"c", b"d"]))


@dataclass
class Record:
    references: int = 0
    name: tuple[int, bytes] | None = None
    freed_at: int = 0


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, NUM_GROUPS)
        self.blocks = [Record() for _ in range(NUM_BLOCKS)]
        self.time = 0
        self.released = 0

    def used(self) -> list[int]:
        return [b for b, record in enumerate(self.blocks) if record.references]

    def cached(self) -> list[int]:
        """Oldest first."""
        free = [b for b, r in enumerate(self.blocks) if not r.references and r.name]
        return sorted(free, key=lambda b: self.blocks[b].freed_at)

    @rule(count=st.integers(0, NUM_BLOCKS))
    def take(self, count: int) -> None:
        blank = {b for b, r in enumerate(self.blocks) if not r.references and not r.name}
        cached = self.cached()
        if count > len(blank) + len(cached):
            with pytest.raises(AssertionError, match="asked"):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        evicted = cached[: max(0, count - len(blank))]
        assert len(set(taken)) == count
        assert set(taken) <= blank | set(evicted)
        assert set(evicted) <= set(taken)
        for block in taken:
            self.blocks[block] = Record(references=1)

    @precondition(lambda self: self.used() or self.cached())
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.used() + self.cached()))
        self.pool.hold([block])
        self.blocks[block].references += 1

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.used()))
        self.pool.drop([block])
        record = self.blocks[block]
        record.references -= 1
        if not record.references:
            self.time += 1
            self.released += 1
            record.freed_at = self.time

    @precondition(lambda self: self.used())
    @rule(data=st.data(), name=names)
    def publish(self, data: st.DataObject, name: tuple[int, bytes]) -> None:
        block = data.draw(st.sampled_from(self.used()))
        self.pool.publish(*name, block)
        record = self.blocks[block]
        if record.name is None and name not in [r.name for r in self.blocks]:
            record.name = name

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def unpublish(self, block: int) -> None:
        self.pool.unpublish(block)
        self.blocks[block].name = None

    @rule()
    def unpublish_all(self) -> None:
        self.pool.unpublish_all()
        for record in self.blocks:
            record.name = None

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        assert pool.available == NUM_BLOCKS - len(self.used())
        assert pool.cached == len(self.cached())
        assert pool.released == self.released
        assert [pool.references(b) for b in range(NUM_BLOCKS)] == [
            r.references for r in self.blocks
        ]
        found = {record.name: block for block, record in enumerate(self.blocks) if record.name}
        for group in range(NUM_GROUPS):
            for digest in (b"a", b"b", b"c", b"d"):
                assert pool.find(group, digest) == found.get((group, digest))


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_last_block_dropped_is_the_last_to_be_evicted() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block in blocks:
        pool.publish(0, bytes([block]), block)
    pool.drop(reversed(blocks))  # as for a chain: its first block is worth most
    assert pool.take(2) == [blocks[2], blocks[1]]
    assert pool.find(0, bytes([blocks[0]])) == blocks[0]


def test_a_cached_block_that_is_held_again_is_not_evicted() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.publish(0, b"x", first)
    pool.drop([first, second])
    pool.hold([first])
    assert pool.take(1) == [second]
    with pytest.raises(AssertionError):
        pool.take(1)


def test_a_blank_block_cannot_be_held() -> None:
    with pytest.raises(AssertionError, match="blank"):
        BlockPool(1).hold([0])


def test_dropping_too_often_is_our_bug() -> None:
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.drop(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.drop(blocks)


def test_repr_tells_the_three_kinds() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.publish(0, b"x", first)
    pool.drop([first])
    assert repr(pool) == "<BlockPool 1 in use, 1 cached, 2 blank>"
    assert second
