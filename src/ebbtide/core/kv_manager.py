"""Which blocks hold what for whom: admission, growth, commit, release, loss, transfers.

Invariants
- Only a full block of committed positions is published or handed to the offload layer.
- A block that a step or a load is writing is in the table of one request alone, and has no name.
- A transfer holds a reference to each of its blocks from its start until it returns, whatever
  becomes of the request meanwhile.
- While a request computes or loads a block, ``_producers`` names it; requests that want the same
  block wait there, holding nothing, and are woken when it is published or given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from ebbtide.core.groups import KVGroup
from ebbtide.core.ledger import DEVICE, HOST, Source, Span
from ebbtide.core.matching import Match, match
from ebbtide.core.plan import Table, Transfer, TransferResult
from ebbtide.core.pool import BlockPool
from ebbtide.core.ports import Offload
from ebbtide.core.request import Request, State


class _Flight(NamedTuple):
    """A transfer under way. A load brings the blocks named by ``digests``, for ``request``; a store
    brings none, nor does a load that a reset has overtaken."""

    transfer: Transfer
    group: int
    digests: tuple[bytes, ...]
    request: Request | None


class KVManager:
    """``fed_max``: the positions that all steps in flight together may feed one request."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: int,
        block_size: int,
        offload: Offload,
        fed_max: int,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, len(self.groups))
        self.woken: list[Request] = []  # parked requests that are to be matched again
        self.retry_at = 0  # what did not fit may fit once ``pool.released`` has come this far
        self.outbox: list[Transfer] = []  # transfers to start beside the steps
        self._offload = offload
        self._fed_max = fed_max
        windows = [group.window is not None for group in groups]
        self._windowed = any(windows)
        self._store_order = sorted(range(len(groups)), key=lambda g: not windows[g])
        self._flights: dict[int, _Flight] = {}
        self._producers: dict[bytes, Request] = {}
        self._parked: dict[bytes, list[Request]] = {}

    @property
    def transfers_in_flight(self) -> int:
        return len(self._flights)

    # --- admission -------------------------------------------------------------------------

    def blocks_needed_max(self, positions: int) -> int:
        """An upper bound of the blocks that a request of this many positions ever holds."""
        everything = -(-positions // self.block_size)
        total = 0
        for group in self.groups:
            needed = everything
            if group.window is not None:
                seen = -(-(group.window + self._fed_max) // self.block_size)
                needed = min(everything, seen + 1 + self._offload.blocks_per_chunk)
            total += needed
        return total

    def match(self, request: Request) -> Match:
        """The longest prefix that can be reused; at least one token is always left to compute."""
        size = self.block_size
        chain = request.digest_upto(len(request.tokens) // size, size)
        limit = (len(request.tokens) - 1) // size
        has = self._offload.has
        return match(self.groups, size, chain, limit, self.pool, lambda g, i: has(g, chain, i))

    def park(self, request: Request, match: Match) -> bool:
        """Whether another request is producing what this one needs next; then it waits for all of it.

        That is what the match would load, and what comes right behind it.
        """
        limit = (len(request.tokens) - 1) // self.block_size
        index = match.blocks
        while index < limit and request.digests[index] in self._producers:
            index += 1
        if index == match.blocks:
            loading = (i for i in match.loaded if request.digests[i] in self._producers)
            index = max(loading, default=-1) + 1
            if index == 0:
                return False
        self._parked.setdefault(request.digests[index - 1], []).append(request)
        return True

    def admit(self, request: Request, match: Match, reserve: int) -> list[Transfer] | None:
        """Give the request its blocks: those that hold its prefix, and those to fill.

        Returns the loads that fill the holes of the prefix, or None where the pool has too few
        free blocks (``reserve`` of them are to be left).
        """
        ends = [self._first_end(request, match, group) for group in self.groups]
        hits = match.hits
        fresh = match.missing + sum(end - match.blocks for end in ends)
        idle_hits = sum(self.pool.references(block) == 0 for block in hits)
        lacking = fresh + reserve - (self.pool.available - idle_hits)
        if lacking > 0:
            self.retry_at = self.pool.released + lacking
            return None
        self.pool.hold(hits)
        runs: list[tuple[int, int, Sequence[int]]] = []
        tables = []
        for group, (first, found) in enumerate(zip(match.first, match.found, strict=True)):
            blocks = [b if b is not None else self.pool.take(1)[0] for b in found]
            for missing, run in groupby(enumerate(found), lambda place: place[1] is None):
                if missing:
                    holes = [i for i, _ in run]
                    runs.append((group, first + holes[0], [blocks[i] for i in holes]))
            tables.append(Table(first, blocks + self.pool.take(ends[group] - match.blocks)))
        request.tables = tuple(tables)
        request.capacity = min(ends) * self.block_size
        loads, sources = self._load(request, runs)
        request.loads = {load.id for load in loads}
        self._start_positions(request, match, sources)
        return loads

    def _first_end(self, request: Request, match: Match, group: KVGroup) -> int:
        """The block up to which a request gets blocks at once: all known tokens, where all are kept."""
        end = len(request.tokens)
        if group.window is not None:
            end = min(end, match.blocks * self.block_size + self._fed_max)
        return -(-end // self.block_size)

    def _load(
        self, request: Request, runs: Sequence[tuple[int, int, Sequence[int]]]
    ) -> tuple[list[Transfer], dict[int, Source]]:
        """Start filling the runs (group, index, blocks). Also says where each block index comes from;
        where several groups load it, a tier below the host tier counts."""
        started: list[Transfer] = []
        sources: dict[int, Source] = {}
        if not runs:
            return started, sources
        for (group, at, _), loads in zip(
            runs, self._offload.load(request.digests, runs), strict=True
        ):
            for load in loads:
                names = tuple(request.digests[at : at + len(load.blocks)])
                self._flights[load.id] = _Flight(load, group, names, request)
                self.pool.hold(load.blocks)
                for index in range(at, at + len(load.blocks)):
                    sources[index] = load.tier or sources.get(index, HOST)
                at += len(load.blocks)
            started += loads
        return started, sources

    def _start_positions(self, request: Request, match: Match, loaded: dict[int, Source]) -> None:
        size = self.block_size
        request.scheduled = match.blocks * size
        request.published = match.blocks
        request.boundary = request.scheduled + size
        request.committed = min(loaded, default=match.blocks) * size
        seen = min(match.first)  # a block that no group sees counts like the first that one does
        source = [loaded.get(max(i, seen), DEVICE) for i in range(match.blocks)]
        request.spans = tuple(Span(i * size, (i + 1) * size, s) for i, s in enumerate(source))
        news = max(request.scheduled, request.ledger.reached) + 1
        request.settled = max(request.prompt_length, news)
        for index in range(len(request.tokens) // size):
            if index >= match.blocks or index in loaded:
                self._producers.setdefault(request.digests[index], request)

    def grow(self, request: Request, end: int) -> bool:
        """Cover the positions up to ``end`` in every group; False where the pool has too few blocks."""
        index = -(-end // self.block_size)
        lacking = [max(0, index - t.first - len(t.blocks)) for t in request.tables]
        if sum(lacking) > self.pool.available:
            return False
        for table, count in zip(request.tables, lacking, strict=True):
            table.blocks.extend(self.pool.take(count))
        request.capacity = min(t.first + len(t.blocks) for t in request.tables) * self.block_size
        return True

    # --- commit, release, loss -------------------------------------------------------------

    def commit(self, request: Request) -> None:
        """``request.committed`` has passed ``boundary``: publish, store, let the windows slide."""
        size = self.block_size
        full = request.committed // size
        chain = request.digest_upto(full, size)
        for index in range(request.published, full):
            if not request.private:
                for group, table in enumerate(request.tables):
                    self.pool.publish(group, chain[index], table.blocks[index - table.first])
                self._produced(chain[index])
        request.published = full
        request.boundary = (full + 1) * size
        self._store(request)
        if self._windowed:
            self._release_unseen(request)

    def _store(self, request: Request) -> None:
        if request.private:
            return
        chain, full = request.digests, request.committed // self.block_size
        for group in self._store_order:  # windows first: what they leave behind cannot wait
            first, blocks = request.tables[group]
            for store in self._offload.store(request.id, group, chain, full, first, blocks):
                self._flights[store.id] = _Flight(store, group, (), None)
                self.pool.hold(store.blocks)
                self.outbox.append(store)

    def _release_unseen(self, request: Request) -> None:
        """Drop the blocks that no position from ``committed`` on can see, by whole chunks.

        Steps in flight feed positions from ``committed`` on, so they do not read them either. The
        table is replaced, not cut: a plan in flight may hold the old one.
        """
        per_chunk = self._offload.blocks_per_chunk
        tables = list(request.tables)
        for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            keep = group.first_visible(request.committed) // self.block_size
            count = keep // per_chunk * per_chunk - table.first
            if count > 0:
                self.pool.drop(reversed(table.blocks[:count]))
                tables[number] = Table(table.first + count, table.blocks[count:])
        request.tables = tuple(tables)

    def release(self, request: Request) -> None:
        """Nothing in flight refers to the request: store what is still due, give up all its blocks."""
        request.note_reached()
        self._store(request)
        due = 0 if request.private else request.committed // self.block_size
        self._offload.end(request.id, request.digests, due)
        self._give_up(request)
        for table in request.tables:
            self.pool.drop(reversed(table.blocks))
        request.forget_blocks()

    def _give_up(self, request: Request) -> None:
        """It produces nothing any more: whoever waits for a block of it is to be matched again."""
        for digest in request.digests:
            self._produced(digest, request)

    def _produced(self, digest: bytes, producer: Request | None = None) -> None:
        """The block can be found, whoever produced it; or its ``producer`` has given it up."""
        expected = self._producers.get(digest)
        if expected is not None and producer in (None, expected):
            del self._producers[digest]
            waiters = self._parked.pop(digest, ())
            self.woken += [r for r in waiters if r.state is State.WAITING]

    def first_bad_position(self, request: Request, bad: frozenset[int]) -> int | None:
        """The first position of the request whose KV lies in a bad block."""
        tables = request.tables
        indexes = [f + i for f, blocks in tables for i, block in enumerate(blocks) if block in bad]
        return min(indexes) * self.block_size if indexes else None

    def lose(self, request: Request, position: int | None) -> None:
        """KV that was there is bad from ``position`` on. What lies behind it may have been computed
        from it, so it is not to be found again, on the device or below. (Where a load brings it at
        this moment, the step that reads it judges it.)"""
        if position is None:
            return
        request.note_reached()
        index = position // self.block_size
        for digest in request.digests[index:]:
            for group in range(len(self.groups)):
                block = self.pool.find(group, digest)
                if block is not None:
                    self.pool.unpublish(block)
        self._offload.forget(request.digests, index)
        request.committed = min(request.committed, position)

    # --- transfers -------------------------------------------------------------------------

    def returned(self, result: TransferResult, usable: bool = True) -> Request | None:
        """A transfer has returned. Returns the request that waits for it, if there is one.

        ``usable``: False where the blocks must not be used although the load itself did not fail.
        """
        transfer, group, digests, request = self._flights.pop(result.transfer.id)
        self._offload.finished(result)
        if usable and not result.error:
            for digest, block in zip(digests, transfer.blocks, strict=False):
                self.pool.publish(group, digest, block)
                if self._on_device(digest):
                    self._produced(digest)
        self.pool.drop(reversed(transfer.blocks))
        if request is None or transfer.id not in request.loads:
            return None
        request.loads.discard(transfer.id)
        if not request.loads:  # a window's group may have loaded less: nobody need wait for that
            for digest in request.digests[: request.published]:
                self._produced(digest, request)
        return request

    def _on_device(self, digest: bytes) -> bool:
        return all(self.pool.find(g, digest) is not None for g in range(len(self.groups)))

    def abandon_loads(self, request: Request, late: bool) -> None:
        """The request waits for its loads no longer. ``late``: their chunks count as lost."""
        for number in request.loads:
            self._flights[number] = self._flights[number]._replace(request=None)
            if late:
                self._offload.abandon(self._flights[number].transfer)
        request.loads = set()

    def reset(self, holders: Iterable[Request]) -> None:
        """Forget all content: nothing computed or stored so far is found by a later request."""
        self.pool.unpublish_all()
        self._offload.clear()
        for number, flight in self._flights.items():
            self._flights[number] = flight._replace(digests=())
        for request in holders:
            request.private = True
            self._give_up(request)
