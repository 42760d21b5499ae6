"""Rules of single decisions, judged from outside: what a call of the scheduler may do, given what was.

``invariants`` says what must be true at any time; a wrong decision can leave all of that true (a late
load that is waited for, a bad chunk that is tried again, a token booked to the wrong source). So these
rules compare the state before a call with the state after it. Tell them of every call::

    rules.before_schedule(now);  plan = scheduler.schedule(now);  rules.after_schedule(now, plan)
    rules.before_apply(plan, outcome);  scheduler.apply(...);     rules.after_apply(plan, outcome)
    rules.before_transfer(result);  scheduler.transferred(...);   rules.after_transfer(result)
    rules.started(transfers)        # after each call, with what it started beside the steps
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from ebbtide.core.ledger import COMPUTED, DEVICE, HOST, Cause
from ebbtide.core.plan import Direction, StepOutcome, StepPlan, Transfer, TransferResult
from ebbtide.core.request import Drain, FinishReason, Request, State
from ebbtide.core.scheduler import SUSPECT, Scheduler
from ebbtide.keys import chunk_key
from ebbtide.offload.host import SlotState
from ebbtide.offload.manager import OffloadManager
from ebbtide.testing.invariants import Chains


class _Past(NamedTuple):
    """A request as it was before ``apply``."""

    drain: Drain
    finish: FinishReason | None
    length: int
    published: int
    lost: bool  # it holds a bad block
    poisoned: range  # blocks that are bad, or may have been computed from one that was committed
    behind: frozenset[int | None]  # the named ones among them


class _Life(NamedTuple):
    """An owner's time with its blocks: the full ones in the end; by group, the first that it had, and
    the chunk from which on none was seen to."""

    chain: tuple[bytes, ...]
    firsts: dict[int, int]
    dues: dict[int, int]
    dropped: int  # chunks that were counted so


class WatchedManager(OffloadManager):
    """Remembers what has happened since ``Rules`` last looked: lives that have ended, keys that were
    forgotten, tiers that were cleared."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.lives: list[_Life] = []
        self.forgotten: list[bytes] = []
        self.cleared: list[str] = []
        self._seen = Counter[bytes]()  # chunks, by the lives that came by
        self._lacked = Counter[bytes]()  # the same, while no slot had them
        self._firsts: dict[str, dict[int, int]] = {}
        self._dropped: Counter[str] = Counter()

    def store(self, owner: str, group: int, *arguments: Any) -> list[Transfer]:
        chain, full, first, _ = arguments
        self._firsts.setdefault(owner, {}).setdefault(group, first)
        before = self.counters.store_dropped
        due = self._due(owner, group)
        keys = [self._key(group, chain, i) for i in range(due, full // self.blocks_per_chunk)]
        held = {key for key in keys if self.slots.holds(key)}
        stores = super().store(owner, group, *arguments)
        self._dropped[owner] += self.counters.store_dropped - before
        passed = keys[: self._due(owner, group) - due]
        had = keys[max(0, -(-first // self.blocks_per_chunk) - due) :]
        self._check_seen_enough(passed, set(had), held)
        return stores

    def _due(self, owner: str, group: int) -> int:
        progress = self._progress.get((owner, group))
        return 0 if progress is None else progress.due

    def _check_seen_enough(self, passed: list[bytes], had: set[bytes], held: set[bytes]) -> None:
        """A chunk is stored from its k-th life on, and not before."""
        self._seen.update(passed)
        self._lacked.update(key for key in passed if key not in held)
        for key in passed:
            holds = self.slots.holds(key)
            if key in had and key not in held and self._lacked[key] >= self._store_after:
                assert holds, f"{key.hex()} is not stored, though it was seen often enough"
            if holds and key not in held:
                assert self._seen[key] >= self._store_after, f"{key.hex()} is stored too early"

    def end(self, owner: str, chain: Sequence[bytes], full: int) -> None:
        before = self.counters.store_dropped
        dues = {group: self._due(owner, group) for group in range(self._num_groups)}
        super().end(owner, chain, full)
        dropped = self._dropped.pop(owner, 0) + self.counters.store_dropped - before
        firsts = self._firsts.pop(owner, {})
        self.lives.append(_Life(tuple(chain[:full]), firsts, dues, dropped))

    def forget(self, chain: Sequence[bytes], index: int) -> None:
        super().forget(chain, index)
        for chunk in range(index // self.blocks_per_chunk, len(chain) // self.blocks_per_chunk):
            last = chain[(chunk + 1) * self.blocks_per_chunk - 1]
            self.forgotten += [chunk_key(last, group) for group in range(self._num_groups)]

    def clear(self, names: Sequence[str] | None = None) -> None:
        super().clear(names)
        self.cleared += [tier.name for tier in self.below] if names is None else names


class Rules:
    """``held``: the requests that are not to start yet."""

    def __init__(
        self,
        scheduler: Scheduler,
        manager: WatchedManager,
        chains: Chains,
        held: Collection[str] = (),
    ) -> None:
        self._scheduler = scheduler
        self._held_back = held
        self._manager = manager
        self._chains = chains
        self._roots: dict[bytes, str] = {}
        self._private: set[int] = set()  # blocks of requests that a reset came by
        self._bad: frozenset[int] = frozenset()  # blocks that the last outcome reported
        self._chunks: set[bytes] = set()  # that were ever stored, or about to be
        # per request, over its whole life
        self._computed: Counter[str] = Counter()  # prompt positions, the first time
        self._again: Counter[str] = Counter()  # positions, from the second time on
        self._reached: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()  # steps in a row, without new ground
        self._losses: Counter[str] = Counter()  # of KV, likewise
        self._loaded: defaultdict[str, set[str]] = defaultdict(set)  # from where
        self._preempted: set[str] = set()
        self._lost: set[str] = set()
        # before a call
        self.late: list[tuple[Request, list[Transfer]]] = []
        self._held: set[Request] = set()
        self._preemptions = 0
        self._past: dict[Request, _Past] = {}
        self._waiter: Request | None = None
        self._last = False  # of the loads that ``_waiter`` waits for
        self._failed_loads: dict[Request, set[int]] = {}  # of this admission

    def arrived(self, request: Request, salt: str) -> None:
        """Only requests of one salt share a root, and with it names of blocks and chunks."""
        assert self._roots.setdefault(request.root, salt) == salt, "two salts have one root"

    # --- schedule --------------------------------------------------------------------------

    def before_schedule(self, now: float) -> None:
        scheduler = self._scheduler
        flights = scheduler.kv._flights
        loading = scheduler._loading.values()
        late = [r for r in loading if r.load_deadline <= now]
        self.late = [(r, [flights[load].transfer for load in r.loads]) for r in late]
        self._held = {*scheduler._running.values(), *loading}
        self._preemptions = scheduler.counters.preemptions

    def given_up(self, requests: Iterable[Request]) -> None:
        """They are to go on without the loads that they wait for; that counts as no loss."""
        for request in requests:
            self._lost.add(request.id)
            self._failed_loads.pop(request, None)

    def after_schedule(self, now: float, plan: StepPlan | None) -> None:
        scheduler = self._scheduler
        late = {request for request, _ in self.late}
        for request, transfers in self.late:
            self._note_lost_kv(request)
            self._failed_loads.pop(request, None)  # it may load again by now
            for transfer in transfers:
                assert not self._finds(transfer), f"{transfer} came late, and is still found"
        for request in scheduler._loading.values():
            assert request.load_deadline > now, f"{request!r} is late, and still waited for"
            if request not in self._held:
                due = now + scheduler.config.load_deadline_s
                assert request.load_deadline == due, f"{request!r}: {request.load_deadline}"
        stay = {*scheduler._running.values(), *scheduler._loading.values()}
        if scheduler.counters.preemptions > self._preemptions:
            gone = self._held - stay - late
            self._preempted.update(request.id for request in gone)
            best = min((r.priority, r.arrival) for r in gone)
            overtaken = [r for r in stay if (r.priority, r.arrival) > best]
            assert not overtaken, f"preempted before {overtaken}: {gone}"
            assert stay <= self._held, "admitted in the step that preempted"
        for flight in scheduler.kv._flights.values():
            if flight.request is not None:
                self._loaded[flight.request.id].add(flight.transfer.tier or HOST)
        admitted = stay - self._held
        for request in admitted:
            self._failed_loads.pop(request, None)
            self._check_sources(request)
        self._check_order(admitted)
        if plan is not None:
            alone = len(plan.rows) == 1 and not plan.loads
            suspects = [r for r in plan.rows if self._failures[r.request_id] >= SUSPECT]
            assert alone or not suspects, f"{suspects} are to run alone: {plan}"
            slow = [load for load in plan.loads if load.tier]
            assert not slow, f"a step is to wait for {slow}"
            synced = sum(len(load.blocks) for load in plan.loads)
            assert synced <= scheduler.config.sync_load_blocks_max, f"{synced} blocks in a step"

    def _check_order(self, admitted: Iterable[Request]) -> None:
        """Nobody who waits in the queue was overtaken there."""
        kv, requests = self._scheduler.kv, self._scheduler.requests.values()
        elsewhere = {r for parked in kv._parked.values() for r in parked}.union(kv.woken)
        elsewhere |= {r for r in requests if r.id in self._held_back}
        waiting = [r for r in requests if r.state is State.WAITING and r not in elsewhere]
        worst = max((r.rank for r in admitted), default=(0, 0))
        overtaken = [r for r in waiting if r.rank < worst]
        assert not overtaken or not admitted, f"{admitted} were admitted before {overtaken}"

    def _check_sources(self, request: Request) -> None:
        """What an admitted request starts with is booked as loaded just where a load brings it."""
        loaded: dict[bytes, set[str]] = {}
        for flight in self._scheduler.kv._flights.values():
            if flight.request is request:
                for digest in flight.digests:
                    loaded.setdefault(digest, set()).add(flight.transfer.tier or HOST)
        seen = min(table.first for table in request.tables)
        size = self._scheduler.config.block_size
        for start, end, source in request.spans:
            sources = loaded.get(request.digests[max(start // size, seen)], {DEVICE})
            below = sources - {HOST} or sources
            assert end == start + size
            assert source in below, f"{request!r}: {start} is from {source}, not of {sources}"

    # --- apply -----------------------------------------------------------------------------

    def before_apply(self, plan: StepPlan, outcome: StepOutcome) -> None:
        size, names = self._scheduler.config.block_size, self._scheduler.kv.pool._name
        self._bad = frozenset() if outcome.error else outcome.invalid_blocks
        self._past = {}
        for r in self._scheduler.requests.values():
            bad = {
                block: first + i
                for first, blocks in r.tables
                for i, block in enumerate(blocks)
                if block in self._bad
            }
            # neither named nor committed: a load or a step was writing it, nothing came of it yet
            was_there = [i for b, i in bad.items() if b in names or i * size < r.committed]
            poisoned = range(min(was_there, default=r.published), r.published)
            behind = frozenset(self._named(r, poisoned))
            self._past[r] = _Past(
                r.drain, r.finish, len(r.tokens), r.published, bool(bad), poisoned, behind
            )

    def after_apply(self, plan: StepPlan, outcome: StepOutcome) -> None:
        rows = {row.request_id: row for row in plan.rows}
        for request, past in self._past.items():
            row = rows.get(request.id)
            lost = past.lost or (outcome.error is not None and row is not None)
            self._lost.update({request.id} if lost else ())
            if lost and outcome.error is None and past.finish is None:
                self._note_lost_kv(request)
            self._check_behind(request, past)
            if row is not None:
                if not lost and past.drain is not Drain.LOST:
                    self._note_fed(request, row.start, min(row.end, past.length))
                elif outcome.error is not None and past.drain is not Drain.LOST:
                    self._failures[request.id] += 1
            self._check_ledger(request)
            self._check_published(request, past.published)
            if outcome.error is not None and past.finish is None:
                self._check_given_up(request)
        found = [block for block in self._bad if block in self._scheduler.kv.pool._name]
        assert not found, f"blocks {found} were reported as bad, and can still be found"

    def _note_fed(self, request: Request, start: int, end: int) -> None:
        name, reached = request.id, self._reached[request.id]
        self._computed[name] += max(0, min(end, request.prompt_length) - max(start, reached))
        self._again[name] += max(0, min(end, reached) - start)
        if end > reached:
            self._reached[name] = end
            self._failures[name] = self._losses[name] = 0
            kept = (request.failed_steps, request.losses)
            assert kept == (0, 0), f"{request!r} got further than ever, and keeps {kept} failures"

    def _note_lost_kv(self, request: Request) -> None:
        """Then it ends by its policy, or because it has gone back too often."""
        self._lost.add(request.id)
        self._losses[request.id] += 1
        most = 1 + self._scheduler.config.max_step_retries + len(request.digests)
        if request.fail_on_lost_kv or self._losses[request.id] > most:
            assert request.finish is not None, f"{request!r} goes on, though it is to end"
        else:
            assert request.finish is not FinishReason.ERROR, f"{request!r} ends for one loss"

    def _named(self, request: Request, indexes: Iterable[int]) -> list[int | None]:
        """The blocks that are found by the digests of these blocks of the request."""
        groups = range(len(self._scheduler.config.groups))
        find = self._scheduler.kv.pool.find
        return [find(group, request.digests[index]) for index in indexes for group in groups]

    def _check_behind(self, request: Request, past: _Past) -> None:
        """Nothing that may have been computed from a bad block can be found; a sound copy may."""
        found = past.behind.intersection(self._named(request, past.poisoned)) - {None}
        assert not found, f"{request!r}: blocks {found} behind a bad one are found"
        per_chunk = self._manager.blocks_per_chunk
        lasts = {(index // per_chunk + 1) * per_chunk - 1 for index in past.poisoned}
        for last in lasts:
            for group in range(len(self._scheduler.config.groups)):
                if last < len(request.digests):
                    key = request.digests[last] + group.to_bytes(2, "little")
                    has = self._manager.slots.has(key)
                    assert not has, f"{request!r}: the chunk up to block {last} is found"

    def _check_ledger(self, request: Request) -> None:
        name, ledger = request.id, request.ledger
        said = (ledger.sources[COMPUTED], sum(ledger.recomputed.values()))
        real = (self._computed[name], self._again[name])
        assert said == real, (
            f"{request!r}: {said} positions booked as computed and again, not {real}"
        )
        sources = {source for source, count in ledger.sources.items() if count}
        never = sources - {DEVICE, COMPUTED} - self._loaded[name]
        assert not never, f"{request!r} has tokens from {never}, but never loaded from there"
        if ledger.recomputed[Cause.PREEMPTED]:
            assert name in self._preempted, f"{request!r} books to a preemption that never was"
        if ledger.recomputed[Cause.FAILED]:
            assert name in self._lost, f"{request!r} books to a failure that never was"

    def _check_published(self, request: Request, before: int) -> None:
        if request.state is not State.RUNNING or request.private:
            return
        new = range(before, request.published)
        assert None not in self._named(request, new), f"{request!r}: not all of {new} is found"

    def _check_given_up(self, request: Request) -> None:
        """A failed step ends a request only after too many in a row."""
        if request.finish is FinishReason.ERROR:
            count = self._failures[request.id]
            assert count > self._scheduler.config.max_step_retries, f"{request!r}: {count} failures"

    # --- transfers -------------------------------------------------------------------------

    def before_transfer(self, result: TransferResult) -> None:
        flight = self._scheduler.kv._flights[result.transfer.id]
        self._waiter = flight.request
        self._last = flight.request is not None and flight.request.loads == {result.transfer.id}
        if flight.request is not None and result.error:
            self._failed_loads.setdefault(flight.request, set()).add(result.transfer.id)

    def after_transfer(self, result: TransferResult) -> None:
        transfer, request = result.transfer, self._waiter
        if result.error and result.tried and transfer.direction is Direction.LOAD:
            assert not self._finds(transfer), f"{transfer} failed, and is still found"
        if request is not None and self._last:
            failed = self._failed_loads.pop(request, None)
            if failed:
                self._note_lost_kv(request)
            runs = request.state is State.RUNNING
            assert runs != bool(failed), f"{request!r}, of whose loads {failed} failed"

    def started(self, transfers: Iterable[Transfer]) -> None:
        """After every call, with the transfers that it started."""
        slots, requests = self._manager.slots, self._scheduler.requests.values()
        self._chunks |= slots._at.keys()
        for life in self._manager.lives:
            self._check_all_stored(life)
        self._manager.lives = []
        for transfer in transfers:
            if transfer.direction is Direction.STORE:
                assert not self._bad.intersection(transfer.blocks), f"{transfer} stores bad blocks"
                assert not self._private.intersection(transfer.blocks), f"{transfer} after a reset"
                self._check_no_hole(transfer)
        self._bad = frozenset()
        self._private = {b for r in requests if r.private for t in r.tables for b in t.blocks}

    def _check_no_hole(self, store: Transfer) -> None:
        """Where all is kept, a chain is stored from its start: a hole would cap every later hit."""
        digest, group = store.key[:-2], store.key[-2:]
        if self._scheduler.config.groups[int.from_bytes(group, "little")].window is None:
            for _ in store.blocks:
                digest = self._chains.parent(digest)
            if self._chains.knows(digest):
                assert digest + group in self._chunks, f"{store}: the chunk before it never was"

    def _check_all_stored(self, life: _Life) -> None:
        """Every full chunk of what a request had was stored once, or is counted as dropped. (One that was
        seen too seldom was judged when it came by.)"""
        per_chunk, lacking = self._manager.blocks_per_chunk, 0
        for group, first in life.firsts.items():
            had = -(-first // per_chunk)
            if self._manager._store_after > 1:
                had = max(had, life.dues[group])
            lasts = life.chain[(had + 1) * per_chunk - 1 :: per_chunk]
            lacking += sum(chunk_key(digest, group) not in self._chunks for digest in lasts)
        lacking *= self._manager.slots.num_slots > 0
        assert lacking <= life.dropped, f"{lacking} chunks were neither stored nor counted: {life}"

    def _finds(self, transfer: Transfer) -> bool:
        slots = self._manager.slots
        same = slots.slot_of(transfer.key) == transfer.slot
        return same and slots._slots[transfer.slot].state is SlotState.READY

    # --- at any time -----------------------------------------------------------------------

    def check_sharers(self) -> None:
        """Nobody is parked for a block that its producer has computed or loaded by now."""
        kv, size = self._scheduler.kv, self._scheduler.config.block_size
        for digest, waiters in kv._parked.items():
            producer = kv._producers[digest]
            if not any(r.state is State.WAITING for r in waiters):
                continue
            if any(f.request is producer and digest in f.digests for f in kv._flights.values()):
                continue
            index = producer.digests.index(digest)
            if producer.state is State.RUNNING:
                done = index < producer.committed // size
                assert not done, f"parked for block {index} of {producer!r}, which is computed"
            elif producer.state is State.LOADING and index < producer.published:
                assert not kv._on_device(digest), f"parked for block {index}, which is loaded"
