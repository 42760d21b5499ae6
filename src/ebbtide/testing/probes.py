"""Probes: rare branches that a run of the simulator must have come through, seen from outside.

``NAMES`` lists them all, so that one which is never hit can be told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ebbtide.core.ledger import DEVICE, Cause
from ebbtide.core.plan import StepOutcome, TransferResult
from ebbtide.core.request import Drain, FinishReason, Request, State
from ebbtide.core.scheduler import Scheduler
from ebbtide.offload.host import SlotState
from ebbtide.offload.manager import OffloadManager
from ebbtide.testing import tier_probes
from ebbtide.testing.lower_tier import LowerTier

NAMES = tier_probes.NAMES | frozenset(
    {
        "refused: can never fit",
        "refused: too many wait",
        "preempted: while running, no step in flight",
        "preempted: while a step was in flight",
        "preempted: while loading",
        "preempted: but the step in flight finished it",
        "preempted: lost its KV while draining",
        "admitted: prefix hit right after a preemption",
        "admitted: the whole prompt is cached",
        "admitted: part of a chunk is loaded",
        "admitted: sync load",
        "admitted: async load",
        "admitted: holes between device hits",
        "parked: for a computed block",
        "parked: for a loaded block",
        "parked: its producer was aborted",
        "aborted: waiting",
        "aborted: parked",
        "aborted: loading",
        "aborted: running",
        "aborted: draining",
        "load failed: first chunk",
        "load failed: middle chunk",
        "load failed: last chunk",
        "load failed: only chunk",
        "load late: returned after its request had ended",
        "load late: returned while its request runs again",
        "load late: returned while its request loads again",
        "load: its blocks have a name already when it returns",
        "sync load failed",
        "invalid block: shared by several requests",
        "invalid block: cached, held by nobody",
        "invalid block: its holder has a second step in flight",
        "invalid block: its holder is loading",
        "window: released while a plan was in flight",
        "reset: during a load",
        "reset: during a store",
        "reset: with parked requests",
        "reset: with a request that drains",
        "host: a pinned slot was dropped",
        "host: a slot was dropped while it was filled",
        "host: evicted",
        "host: a store found no room",
        "ended: on a chunk's end, its last token written",
        "ended: on a chunk's end, its last token not written",
        "step failed: tried again",
        "step failed: too often",
    }
)


class _Before(NamedTuple):
    state: State
    drain: Drain
    in_flight: int
    firsts: tuple[int, ...]
    loads: int


class Probes:
    """Tell it what is about to happen and what has happened; ``hit`` counts what it saw."""

    def __init__(
        self,
        scheduler: Scheduler,
        manager: OffloadManager,
        tiers: Sequence[LowerTier],
        hit: Counter[str],
    ) -> None:
        self.hit = hit
        self.tiers = tier_probes.TierProbes(tiers, manager, hit)
        self._scheduler = scheduler
        self._manager = manager
        self._before: dict[Request, _Before] = {}
        self._preempted: set[Request] = set()
        self._abandoned: dict[int, Request] = {}  # load -> who waited for it
        self._outcome: StepOutcome | None = None
        self._evictions = self._dropped = 0

    def count(self, name: str, happened: object = True) -> None:
        assert name in NAMES, name
        if happened:
            self.hit[name] += 1

    # --- before and after a call of the scheduler ------------------------------------------

    def before(
        self, outcome: StepOutcome | None = None, transfer: TransferResult | None = None
    ) -> None:
        self._before = {}
        self._outcome = outcome
        if transfer is not None:
            self._before_transfer(transfer)
            if transfer.transfer.tier:
                self.tiers.before_read(transfer)
            return
        for r in self._scheduler.requests.values():
            firsts = tuple([table.first for table in r.tables])
            self._before[r] = _Before(r.state, r.drain, r.in_flight, firsts, len(r.loads))
        if outcome is not None:
            self._before_outcome(outcome)

    def after(self, event: str) -> None:
        for request, before in self._before.items():
            self._changed(request, before, event)
        manager = self._manager
        self.count("host: evicted", manager.slots.evictions > self._evictions)
        self._evictions = manager.slots.evictions
        self.count("host: a store found no room", manager.counters.store_dropped > self._dropped)
        self._dropped = manager.counters.store_dropped
        if manager.slots.in_use > len(manager.slots._at):
            draining = [s for s in manager.slots._slots if s.state is SlotState.DRAINING]
            self.count("host: a pinned slot was dropped", any(s.pins for s in draining))
            self.count(
                "host: a slot was dropped while it was filled", not all(s.pins for s in draining)
            )

    def _changed(self, request: Request, before: _Before, event: str) -> None:
        if event == "schedule":
            self._scheduled(request, before)
        elif event == "apply":
            firsts = tuple(t.first for t in request.tables)
            slid = request.state is State.RUNNING and firsts != before.firsts
            self.count("window: released while a plan was in flight", slid and request.in_flight)
            lost = before.drain is Drain.PREEMPTED and request.cause is Cause.FAILED
            self.count("preempted: lost its KV while draining", lost)
            ended = request.finish is not None
            self.count(
                "preempted: but the step in flight finished it",
                before.drain is Drain.PREEMPTED and ended and request.finish != FinishReason.ERROR,
            )
            failed = self._outcome is not None and self._outcome.error is not None
            self.count("step failed: tried again", failed and request.failed_steps and not ended)
            self.count("step failed: too often", failed and request.finish is FinishReason.ERROR)
            if request.state is State.FINISHED:
                self._ended(request)

    def _scheduled(self, request: Request, before: _Before) -> None:
        left = request.state in (State.DRAINING, State.WAITING)
        if left and before.state is State.RUNNING:
            name = "a step was in flight" if request.in_flight else "running, no step in flight"
            self.count(f"preempted: while {name}")
        elif left and before.state is State.LOADING and request.cause.name == "PREEMPTED":
            self.count("preempted: while loading")
        if left:
            self._preempted.add(request)
        if before.state is State.WAITING and request.state in (State.RUNNING, State.LOADING):
            self._admitted(request)
        if before.state is State.WAITING and request.state is State.WAITING:
            kv = self._scheduler.kv
            wanted = [d for d, waiters in kv._parked.items() if request in waiters]
            loading = [d for d in wanted if kv._producers[d].state is State.LOADING]
            self.count("parked: for a loaded block", loading)
            self.count("parked: for a computed block", wanted and not loading)

    def _admitted(self, request: Request) -> None:
        kv, size = self._scheduler.kv, self._scheduler.config.block_size
        per_chunk = self._manager.blocks_per_chunk
        flights = [f.transfer for f in kv._flights.values() if f.request is request]
        matched = request.published
        self.count(
            "admitted: prefix hit right after a preemption", request in self._preempted and matched
        )
        self._preempted.discard(request)
        whole = matched == (request.prompt_length - 1) // size > 0
        self.count("admitted: the whole prompt is cached", whole and not flights)
        self.count(
            "admitted: part of a chunk is loaded", any(len(t.blocks) < per_chunk for t in flights)
        )
        self.count("admitted: sync load", flights and request.state is State.RUNNING)
        self.count("admitted: async load", flights and request.state is State.LOADING)
        sources = [span.source for span in request.spans]
        self.count(
            "admitted: holes between device hits",
            any(a != DEVICE == b for a, b in pairwise(sources)),
        )
        for transfer in flights:
            self._abandoned[transfer.id] = request

    # --- single kinds of event -------------------------------------------------------------

    def _before_outcome(self, outcome: StepOutcome) -> None:
        pool = self._scheduler.kv.pool
        requests = self._scheduler.requests.values()
        for block in outcome.invalid_blocks:
            holders = [r for r in requests if any(block in t.blocks for t in r.tables)]
            self.count("invalid block: shared by several requests", len(holders) > 1)
            self.count("invalid block: cached, held by nobody", block in pool._cached)
            loading = any(r.state is State.LOADING for r in holders)
            self.count("invalid block: its holder is loading", loading)
            second = any(r.in_flight > 1 for r in holders)
            self.count("invalid block: its holder has a second step in flight", second)
            flights = self._scheduler.kv._flights.values()
            self.count("sync load failed", any(block in f.transfer.blocks for f in flights))

    def _before_transfer(self, result: TransferResult) -> None:
        transfer = result.transfer
        kv = self._scheduler.kv
        flight = kv._flights[transfer.id]
        waited = self._abandoned.pop(transfer.id, None)
        if flight.request is None and waited is not None:
            done = waited.finish is not None
            self.count("load late: returned after its request had ended", done)
            self.count(
                "load late: returned while its request runs again", waited.state is State.RUNNING
            )
            self.count(
                "load late: returned while its request loads again", waited.state is State.LOADING
            )
        named = [kv.pool.find(flight.group, digest) for digest in flight.digests]
        self.count("load: its blocks have a name already when it returns", any(named))
        if result.error and flight.request is not None:
            loads = [f.transfer for f in kv._flights.values() if f.request is flight.request]
            self._count_place(
                sorted(flight.request.loads).index(transfer.id), len(loads), flight.request
            )

    def _count_place(self, place: int, loads: int, request: Request) -> None:
        everything = sorted([i for i, r in self._abandoned.items() if r is request])
        if loads == 1 and not everything:
            self.count("load failed: only chunk")
        elif place == 0:
            self.count("load failed: first chunk")
        else:
            last = place == loads - 1
            self.count("load failed: last chunk" if last else "load failed: middle chunk")

    def _ended(self, request: Request) -> None:
        chunk = self._scheduler.config.block_size * self._manager.blocks_per_chunk
        if len(request.tokens) % chunk == 0 and request.finish is not FinishReason.ABORT:
            written = request.ledger.reached == len(request.tokens)
            self.count(
                f"ended: on a chunk's end, its last token {'' if written else 'not '}written"
            )

    def aborting(self, request_id: str) -> None:
        request = self._scheduler.requests[request_id]
        kv = self._scheduler.kv
        parked = any(request in waiters for waiters in kv._parked.values())
        self.count("aborted: parked" if parked else f"aborted: {request.state.value}")
        producing = [d for d, producer in kv._producers.items() if producer is request]
        self.count("parked: its producer was aborted", any(d in kv._parked for d in producing))

    def resetting(self) -> None:
        kv = self._scheduler.kv
        directions = {f.transfer.direction.value for f in kv._flights.values()}
        self.count("reset: during a load", "load" in directions)
        self.count("reset: during a store", "store" in directions)
        self.count("reset: with parked requests", kv._parked)
        self.count("reset: with a request that drains", self._scheduler._draining)
