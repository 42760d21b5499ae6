"""The rules that hold at all times, checked against the actual structures.

Everything is counted anew from what requests, plans and transfers say, and compared with what the
pool, the queues and the host slots believe. Whoever drives a scheduler can call these between any
two of its calls:

    check_requests, check_blocks    states and queues; references, names, blocks being written
    check_host                      slots and pins
    Chains.check_device/check_host  the bytes themselves, where the witness is the model
    check_drained                   after the end: nothing is left

They look into private structures on purpose: nothing in there may disagree. A broken rule raises
``AssertionError``, which says what is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from ebbtide.core.plan import NO_SLOT, Direction, StepPlan, Transfer
from ebbtide.core.pool import BlockPool
from ebbtide.core.request import Drain, Request, State
from ebbtide.core.scheduler import Scheduler
from ebbtide.offload.arena import ChunkMemory
from ebbtide.offload.below import Action, Job
from ebbtide.offload.host import SlotState
from ebbtide.offload.manager import OffloadManager
from ebbtide.testing.witness import WitnessMemory, WitnessModel, WitnessTape, Words

# --- requests and queues -------------------------------------------------------------------


def check_requests(
    scheduler: Scheduler, plans: Sequence[StepPlan], held: Collection[str] = ()
) -> None:
    """``plans`` are in flight; the requests of ``held`` are not to start yet. Every request is where its
    state says, and every wait has an owner."""
    in_flight = Counter(row.request_id for plan in plans for row in plan.rows)
    queued = Counter(r for _, _, r in scheduler._waiting if r.state is not State.FINISHED)
    queued.update(r for r in scheduler.kv.woken if r.state is not State.FINISHED)
    parked = _check_parked(scheduler)
    containers = {
        State.RUNNING: scheduler._running,
        State.LOADING: scheduler._loading,
        State.DRAINING: scheduler._draining,
    }
    for state, container in containers.items():
        for request_id, request in container.items():
            assert scheduler.requests.get(request_id) is request, f"{request!r} is a ghost"
            assert request.state is state, f"{request!r} is among the {state.name}"
    for request in scheduler.requests.values():
        places = queued[request] + parked[request]
        waits = request.state is State.WAITING and request.id not in held
        assert places == waits, f"{request!r} is queued {places} times"
        if request.state in containers:
            assert request.id in containers[request.state], f"{request!r} is in no container"
        assert request.in_flight == in_flight[request.id], f"{request!r}: steps in flight differ"
        _check_positions(scheduler, request)
        _check_state(scheduler, request)
    assert in_flight.keys() <= scheduler.requests.keys(), "a step runs for a request that is gone"
    deadlines = [r.load_deadline for r in scheduler._loading.values()]
    assert deadlines == sorted(deadlines)
    assert scheduler.running + scheduler.loading <= scheduler.config.batch_max


def _check_parked(scheduler: Scheduler) -> Counter[Request]:
    kv = scheduler.kv
    for digest, waiters in kv._parked.items():
        assert digest in kv._producers, f"nobody produces what {waiters} wait for"
    for producer in kv._producers.values():
        assert producer.tables, f"{producer!r} produces, but holds no block"
        assert producer.state not in (State.WAITING, State.FINISHED), f"{producer!r} produces"
    return Counter(
        r for waiters in kv._parked.values() for r in waiters if r.state is not State.FINISHED
    )


def _check_positions(scheduler: Scheduler, request: Request) -> None:
    r, size = request, scheduler.config.block_size
    assert 0 <= r.committed <= r.scheduled <= r.target <= r.length_max, f"{r!r}"
    assert r.target - len(r.tokens) in range(scheduler.config.overlap + 1), f"{r!r}"
    if not r.tables:
        assert r.state is State.WAITING, f"{r!r} has no tables"
        return
    assert r.scheduled <= r.capacity, f"{r!r} is scheduled beyond its capacity {r.capacity}"
    held = 0
    known = max(r.committed, r.published * size)  # matched positions count, also while they load
    for group, (first, blocks) in zip(scheduler.config.groups, r.tables, strict=True):
        assert (first + len(blocks)) * size >= r.capacity, f"{r!r}: a table is too short"
        if r.drain is not Drain.LOST:  # else it has been cut back
            seen = group.first_visible(known)
            assert first * size <= seen, f"{r!r}: a visible block was released"
        held += len(blocks)
    bound = scheduler.kv.blocks_needed_max(r.length_max - 1)
    assert held <= bound, f"{r!r} holds {held} blocks, {bound} were thought to do"


def _check_state(scheduler: Scheduler, request: Request) -> None:
    r = request
    assert (r.state is State.DRAINING) == (r.drain is not Drain.NO), f"{r!r}: {r.drain!r}"
    if r.state is State.DRAINING:
        assert r.in_flight, f"{r!r} drains, but nothing is in flight"
    elif r.state in (State.WAITING, State.LOADING):
        assert r.in_flight == 0, f"{r!r} waits while a step runs for it"
        assert r.committed == 0, f"{r!r} waits with committed positions"
    if r.state is State.LOADING:
        assert r.loads, f"{r!r} loads nothing"
        assert r.loads <= scheduler.kv._flights.keys(), f"{r!r} waits for a load that is gone"
    if r.finish is not None:
        assert r.state is State.DRAINING, f"{r!r} has ended, but is not draining"


# --- blocks --------------------------------------------------------------------------------


def check_blocks(
    scheduler: Scheduler, plans: Sequence[StepPlan], moving: Sequence[Transfer]
) -> None:
    """``moving``: the transfers that were started and have not returned, sync loads among them."""
    pool = scheduler.kv.pool
    flights = [flight.transfer for flight in scheduler.kv._flights.values()]
    assert sorted(t.id for t in moving) == sorted(t.id for t in flights), "a transfer is lost"
    users = [0] * pool.num_blocks
    for request in scheduler.requests.values():
        for _, blocks in request.tables:
            for block in blocks:
                users[block] += 1
    holders = list(users)
    for transfer in flights:
        for block in transfer.blocks:
            holders[block] += 1
    references = pool._references
    if holders != references:
        wrong = [(b, r, h) for b, (r, h) in enumerate(zip(references, holders, strict=True))]
        raise AssertionError(f"references differ at {[w for w in wrong if w[1] != w[2]]}")
    free = {block for block, count in enumerate(holders) if not count}
    assert len(pool._blank) + len(pool._cached) == len(free), "a block is free twice, or lost"
    assert free.issuperset(pool._blank), "a blank block is in use"
    assert pool._cached.keys() == free & pool._name.keys(), "cached blocks differ"
    indexed = {b: (g, d) for g, index in enumerate(pool._index) for d, b in index.items()}
    assert indexed == _names(pool), "index and names differ"
    for request in scheduler.requests.values():
        if request.private:  # since a reset
            named = [b for t in request.tables for b in t.blocks if b in pool._name]
            assert not named, f"{request!r} shares {named}, which a reset has made its own"
    _check_written(scheduler, plans, flights, users)


def _names(pool: BlockPool) -> dict[int, tuple[int, bytes]]:
    return {block: (pool._group[block], digest) for block, digest in pool._name.items()}


def _check_written(
    scheduler: Scheduler,
    plans: Sequence[StepPlan],
    flights: Iterable[Transfer],
    users: Sequence[int],
) -> None:
    """A block that a step or a load is writing has no name and is in one table at most."""
    pool, size = scheduler.kv.pool, scheduler.config.block_size
    stored = {b for t in flights if t.direction is Direction.STORE for b in t.blocks}
    for plan in plans:
        for row in plan.rows:
            for first, blocks in row.tables:
                for block in blocks[row.start // size - first : -(-row.end // size) - first]:
                    assert block not in pool._name, f"block {block} is being computed, but visible"
                    assert users[block] == 1, f"block {block} is computed, but shared"
                    assert block not in stored, f"block {block} is computed and stored"
    for load in flights:
        if load.direction is Direction.LOAD:
            for block in load.blocks:
                assert block not in pool._name, f"block {block} is being loaded, but visible"
                assert users[block] <= 1, f"block {block} is loaded, but shared"
                assert block not in stored, f"block {block} is loaded and stored"


# --- host slots ----------------------------------------------------------------------------


_BUSY = (SlotState.FILLING, SlotState.DRAINING)


def check_host(
    manager: OffloadManager, moving: Sequence[Transfer], jobs: Sequence[Job] = ()
) -> None:
    """Pins equal loads and writes in flight; a slot is filling or draining only while it is used."""
    slots = manager.slots
    stores = [t for t in moving if t.direction is Direction.STORE]
    reads = [t for t in moving if t.tier]
    loads = Counter(t.slot for t in moving if t.direction is Direction.LOAD and not t.tier)
    loads.update(job.slot for job in jobs if job.action is Action.WRITE)
    fills = Counter(t.slot for t in [*stores, *reads] if t.slot != NO_SLOT)
    fills_or_loads = {*loads, *fills}
    states = [slot.state for slot in slots._slots]
    ready, filling = SlotState.READY, SlotState.FILLING
    found = {slots._slots[i].key: i for i, s in enumerate(states) if s is ready or s is filling}
    free = [i for i, state in enumerate(states) if state is SlotState.FREE]
    busy = {i for i, slot in enumerate(slots._slots) if slot.pins or slot.state in _BUSY}
    assert busy <= fills_or_loads, f"slots {busy - fills_or_loads}: nobody uses them"
    for number in fills_or_loads:
        slot = slots._slots[number]
        if number in fills:
            filled = fills[number] == 1 and not slot.pins and number not in loads
            assert filled, f"slot {number} has {fills[number]} stores, {slot.pins} loads"
            assert slot.state in _BUSY, f"slot {number}: {slot}"
        else:
            assert slot.pins == loads[number], f"slot {number}: {slot}, pins differ"
            assert slot.state in (ready, SlotState.DRAINING), f"slot {number}: {slot}"
    assert found == slots._at, "the index of the slots differs"
    assert sorted(slots._free) == free, "the free list of the slots differs"
    assert manager._stores == len(stores), "stores in flight differ"
    for tier in manager.below:
        assert tier._reads == sum(t.tier == tier.name for t in reads), "reads in flight differ"
        count = sum(job.tier == tier.name for job in jobs)
        assert tier.jobs_in_flight == count, (
            f"{tier.jobs_in_flight} jobs of {tier.name}, not {count}"
        )


# --- content -------------------------------------------------------------------------------


class Chains:
    """The KV that every chain seen so far stands for, by the witness, and the check against it."""

    def __init__(
        self, model: WitnessModel, memory: WitnessMemory, slots: int, per_chunk: int
    ) -> None:
        self._model = model
        self._memory = memory
        self._tapes: dict[bytes, WitnessTape] = {}
        self._words: dict[tuple[int, bytes], Words] = {}
        self._known: dict[Request, int] = {}  # how much of its chain was learned
        self._parents: dict[bytes, bytes] = {}
        self._expected = np.zeros_like(memory.words)
        self._names: dict[int, tuple[int, bytes]] = {}
        shape = (slots, per_chunk, *memory.words.shape[1:])
        self._expected_host: Words = np.zeros(shape, np.uint64)
        self._keys: dict[int, bytes] = {}

    def restart(self, memory: WitnessMemory) -> None:
        """Everything but the tiers below is lost; what chains stand for stays known."""
        self._memory = memory
        self._known, self._names, self._keys = {}, {}, {}

    def learn(self, requests: Iterable[Request]) -> None:
        """Take in the chains of requests: call it while, or after, their digests have grown."""
        size = self._memory.block_size
        for request in requests:
            start = self._known.get(request, 0)
            for index in range(start, len(request.digests)):
                parent = request.digests[index - 1] if index else request.root
                tokens = request.tokens[index * size : (index + 1) * size]
                self._learn(parent, request.digests[index], tokens)
            self._known[request] = len(request.digests)

    def _learn(self, parent: bytes, digest: bytes, tokens: Sequence[int]) -> None:
        if digest in self._tapes:
            return
        known = self._tapes.get(parent)
        tape = known.copy() if known else WitnessTape(self._model)
        kv = np.array([tape.push(token) for token in tokens], np.uint64)  # [position, group, slice]
        self._tapes[digest] = tape
        self._parents[digest] = parent
        for group in range(len(self._model.groups)):
            self._words[group, digest] = kv[:, group]

    def knows(self, digest: bytes) -> bool:
        """Whether this is a block's digest, and not a root."""
        return digest in self._parents

    def parent(self, digest: bytes) -> bytes:
        return self._parents[digest]

    def check_device(self, scheduler: Scheduler, known_bad: Collection[int]) -> None:
        """Every named block holds what its name stands for, but for those known to be bad."""
        names = _names(scheduler.kv.pool)
        if names != self._names:
            for block, name in names.items():
                if self._names.get(block) != name:
                    self._expected[block] = self._words[name]
            self._names = names
        blocks = [block for block in names if block not in known_bad]
        same = (self._memory.words[blocks] == self._expected[blocks]).all(axis=(1, 2))
        assert same.all(), f"wrong content in the named blocks {np.array(blocks)[~same]}"

    def check_host(
        self, manager: OffloadManager, arena: ChunkMemory, known_bad: Collection[tuple[int, int]]
    ) -> None:
        """Every ready slot holds its chunk. ``known_bad``: (slot, block of the chunk)."""
        slots = manager.slots._slots
        ready = {n: s.key for n, s in enumerate(slots) if s.state is SlotState.READY}
        if not ready:
            return
        for number, key in ready.items():
            if self._keys.get(number) != key:
                self._expected_host[number] = self._chunk(key)
        self._keys = ready
        numbers = list(ready)
        shape = self._expected_host.shape
        content = arena.slots(numbers).view(np.uint64).reshape(-1, *shape[1:])
        same = (content == self._expected_host[numbers]).all(axis=(2, 3))
        wrong = [(numbers[i], block) for i, block in np.argwhere(~same)]
        wrong = [place for place in wrong if place not in known_bad]
        assert not wrong, f"wrong content in the slots (slot, block) {wrong}"

    def check_payload(self, key: bytes, payload: bytes, known_bad: Collection[int]) -> None:
        """A tier holds the chunk as it should be. ``known_bad``: blocks of the chunk."""
        expected = self._chunk(key)
        content = np.frombuffer(payload[: expected.nbytes], np.uint64).reshape(expected.shape)
        same = (content == expected).all(axis=(1, 2))
        wrong = [block for block in np.flatnonzero(~same) if block not in known_bad]
        assert not wrong, f"wrong content in the blocks {wrong} of the chunk {key.hex()} in a tier"

    def _chunk(self, key: bytes) -> Words:
        digest, group = key[:-2], int.from_bytes(key[-2:], "little")
        blocks: list[Words] = []
        for _ in range(self._expected_host.shape[1]):
            blocks.insert(0, self._words[group, digest])
            digest = self._parents[digest]
        return np.array(blocks)


# --- the end -------------------------------------------------------------------------------


def check_drained(scheduler: Scheduler, manager: OffloadManager) -> None:
    """All requests have ended and all transfers have returned: nothing is held by anyone."""
    kv, slots = scheduler.kv, manager.slots
    left = {
        "requests": scheduler.requests,
        "running": scheduler._running,
        "loading": scheduler._loading,
        "draining": scheduler._draining,
        "transfers": kv._flights,
        "transfers to start": kv.outbox,
        "producers": kv._producers,
        "parked": kv._parked,
        "stores due": manager._progress,
        "slots that are to leave": manager._leaving,
        "jobs": manager.jobs_in_flight,
        "loads awaited": manager._awaited,
        "late reads": [tier.name for tier in manager.below if tier._late],
        "references": [b for b, count in enumerate(kv.pool._references) if count],
        "pins": [n for n, slot in enumerate(slots._slots) if slot.pins],
        "slots in between": [
            n
            for n, slot in enumerate(slots._slots)
            if slot.state in (SlotState.FILLING, SlotState.DRAINING)
        ],
        "outputs": scheduler._outputs,
    }
    for what, things in left.items():
        assert not things, f"{what} left: {things}"
    assert kv.pool.available == kv.pool.num_blocks, f"blocks left: {kv.pool!r}"
    assert slots.in_use == len(slots._at), f"slots left: {slots!r}"
