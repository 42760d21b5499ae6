"""The scheduler: which requests run in the next step, and what a step's outcome means for them.

    plan    = scheduler.schedule(now)          # may be called again while one plan is still running
    outputs = scheduler.apply(plan, outcome)   # in the order of the plans
    scheduler.transferred(results)             # at any time between these calls
    transfers = scheduler.take_transfers()     # to be started, after each of the calls above

Running requests come first (those that decode, then those that still feed their prompt), then
waiting ones by (priority, arrival). A request that must give up its blocks drains: it keeps them
until the steps in flight have returned, and only then ends or waits again. So no outcome ever
meets another life of its request.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ebbtide.core.groups import KVGroup
from ebbtide.core.kv_manager import KVManager
from ebbtide.core.ledger import COMPUTED, Cause, Span
from ebbtide.core.output import Counters, Output, Report
from ebbtide.core.plan import Row, StepOutcome, StepPlan, TokenLogprob, Transfer, TransferResult
from ebbtide.core.ports import Offload
from ebbtide.core.request import Drain, FinishReason, Request, State
from ebbtide.errors import InputError, QueueFull
from ebbtide.keys import root_digest
from ebbtide.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """num_blocks: size of the pool. step_tokens_max: positions fed per step. overlap: plans in flight.

    sync_load_blocks_max: so many blocks may be loaded inside a step. max_step_retries: how many failed
    steps in a row a request survives; from the third try on it runs alone, so that a step that fails
    because of it fails nobody else. namespace: digest of what gives KV its meaning.
    """

    num_blocks: int
    block_size: int
    groups: tuple[KVGroup, ...] = (KVGroup(),)
    length_max: int
    batch_max: int = 256
    step_tokens_max: int = 512
    waiting_max: int = 4096
    overlap: int = 1
    sync_load_blocks_max: int = 64
    load_deadline_s: float = 30.0
    max_step_retries: int = 3
    fail_on_lost_kv: bool = False
    namespace: bytes = b""


SUSPECT = 2  # failed steps in a row: a request with as many runs alone, until it gets further


class Scheduler:
    def __init__(self, config: SchedulerConfig, offload: Offload) -> None:
        self.config = config
        self.counters = Counters()
        fed_max = config.step_tokens_max * config.overlap
        self.kv = KVManager(config.groups, config.num_blocks, config.block_size, offload, fed_max)
        self.requests: dict[str, Request] = {}  # every unfinished one
        self._running: dict[str, Request] = {}
        self._loading: dict[str, Request] = {}  # in the order of their deadlines
        self._draining: dict[str, Request] = {}
        self._waiting: list[tuple[int, int, Request]] = []  # a heap; may hold finished ones
        self._does_not_fit: tuple[Request, int] | None = None
        self._outputs: list[Output] = []
        self._arrivals = 0

    # --- requests come and go --------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._running) + len(self._draining)

    @property
    def loading(self) -> int:
        return len(self._loading)

    @property
    def waiting(self) -> int:
        return len(self.requests) - self.running - self.loading

    def add(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        fail_on_lost_kv: bool | None = None,
        held: bool = False,
    ) -> None:
        """Queue a request. ``params`` come with every default filled, the seed, and all stop ids.
        ``held``: it is not to start before ``ready`` is called.

        Raises InputError for one that can never run, QueueFull where too many wait.
        """
        config = self.config
        assert request_id not in self.requests, f"request id {request_id} is in use"
        if self.waiting >= config.waiting_max:
            raise QueueFull(f"{self.waiting} requests are waiting already; try again later")
        self._arrivals += 1
        request = Request(
            request_id,
            list(prompt),
            params,
            length_max=self.length_max(len(prompt), params.max_tokens),
            root=root_digest(config.namespace, {"salt": cache_salt}),
            priority=priority,
            arrival=self._arrivals,
            fail_on_lost_kv=config.fail_on_lost_kv if fail_on_lost_kv is None else fail_on_lost_kv,
        )
        self.requests[request_id] = request
        if not held:
            self._queue(request)

    def ready(self, request_id: str) -> None:
        """A held request may start. No-op for one that has ended."""
        request = self.requests.get(request_id)
        if request is not None:
            self._queue(request)

    def length_max(self, prompt_length: int, max_tokens: int | None) -> int:
        """Prompt plus output at most. Raises InputError for what model or pool can never hold."""
        limit = self.config.length_max
        if prompt_length == 0:
            raise InputError("the prompt is empty: it must have at least one token", "prompt")
        if prompt_length >= limit:
            raise InputError(
                f"the prompt has {prompt_length} tokens, but prompt and output together may have "
                f"{limit} at most: shorten the prompt",
                "prompt",
            )
        length = limit if max_tokens is None else min(limit, prompt_length + max_tokens)
        if max_tokens is None:
            length = max(prompt_length + 1, self._longest_that_fits(length))
        needed = self.kv.blocks_needed_max(length - 1)
        if needed > self.config.num_blocks:
            raise InputError(
                f"{prompt_length} prompt tokens and {length - prompt_length} output tokens need "
                f"{needed} KV blocks, but the pool has {self.config.num_blocks} of "
                f"{self.config.block_size} positions: ask for less or enlarge the KV memory",
                "prompt",
            )
        return length

    def _longest_that_fits(self, length: int) -> int:
        lengths, needed = range(1, length + 1), self.kv.blocks_needed_max
        return bisect_right(lengths, self.config.num_blocks, key=lambda n: needed(n - 1))

    def end(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request in whatever state it is. No-op for one that has ended."""
        request = self.requests.get(request_id)
        if request is None or request.finish is not None:
            return
        self._finish(request, reason)
        if request.state is State.WAITING:
            self._close(request)
            if len(self._waiting) > 2 * self.waiting + 64:  # too many that have ended
                self._waiting = [entry for entry in self._waiting if not entry[2].finish]
                heapq.heapify(self._waiting)
        else:
            self._drain(request, Drain.ENDED)

    def take_outputs(self) -> list[Output]:
        """Outputs that no call of ``apply`` has returned yet."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_transfers(self) -> list[Transfer]:
        """Transfers to start beside the steps. Each must come back through ``transferred``."""
        outbox, self.kv.outbox = self.kv.outbox, []
        return outbox

    def next_deadline(self) -> float | None:
        """When ``schedule`` should be called again at the latest."""
        return next((r.load_deadline for r in self._loading.values()), None)

    def reset(self) -> None:
        """Forget all cached KV, here and below. Requests that run keep theirs to themselves."""
        self.kv.reset(r for r in self.requests.values() if r.tables)

    # --- scheduling ------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None where nothing can run now. ``now`` in seconds, any origin."""
        self._expire_loads(now)
        for request in self.kv.woken:
            self._queue(request)
        self.kv.woken = []
        preemptions = self.counters.preemptions
        rows: list[Row] = []
        loads: list[Transfer] = []
        running = list(self._running.values())
        suspects = [r for r in running if r.failed_steps >= SUSPECT]
        for suspect in suspects:
            budget = self._schedule_running([suspect], rows)
            if rows:
                break  # it runs alone
        else:
            others = [r for r in running if r not in suspects] if suspects else running
            budget = self._schedule_running(others, rows)
            if self.counters.preemptions == preemptions:
                budget = self._admit(rows, loads, budget, now)
        if not rows:
            return None
        self.counters.steps += 1
        fed = self.config.step_tokens_max - budget
        return StepPlan(self.counters.steps, rows, loads, fed)

    def _schedule_running(self, requests: Iterable[Request], rows: list[Row]) -> int:
        budget = self.config.step_tokens_max
        prefills = []
        for request in requests:
            target = request.target
            count = target - request.scheduled
            if count <= 0 or target >= request.length_max or request.state is not State.RUNNING:
                continue  # all is fed, or its last token is being sampled, or it was just preempted
            if count > 1:
                prefills.append(request)
            elif budget and (target <= request.capacity or self._make_room(request, target)):
                self._feed(request, target, rows)
                budget -= 1
        for request in prefills:
            if request.state is State.RUNNING:
                budget -= self._schedule_prefill(request, budget, rows)
        return budget

    def _schedule_prefill(self, request: Request, budget: int, rows: list[Row]) -> int:
        """Feed as much of the request's known tokens as the budget allows. Returns how many."""
        start = request.scheduled
        end = min(request.target, start + budget)
        if end == start or (end > request.capacity and not self._make_room(request, end)):
            return 0
        self._feed(request, end, rows)
        return end - start

    def _feed(self, request: Request, end: int, rows: list[Row]) -> None:
        start = request.scheduled
        tokens, tables = request.tokens, request.tables
        sampling = request.params if end == request.target else None
        index = end - request.prompt_length
        rows.append(Row(request.id, tokens, len(tokens), start, end, tables, sampling, index))
        request.scheduled = end
        request.in_flight += 1
        if sampling is not None:
            request.target = end + 1

    def _make_room(self, request: Request, end: int) -> bool:
        """Give a running request blocks up to ``end``, preempting requests of lower rank if need be."""
        while not self.kv.grow(request, end):
            if self._draining:
                return False  # blocks are on their way back
            holders = [*self._running.values(), *self._loading.values()]
            victim = max(holders, key=lambda r: r.rank)
            if victim is request:
                return False  # those before it will end, and then there is room
            self._preempt(victim)
        return True

    def _preempt(self, request: Request) -> None:
        self.counters.preemptions += 1
        request.cause = Cause.PREEMPTED
        self._drain(request, Drain.PREEMPTED)

    def _admit(self, rows: list[Row], loads: list[Transfer], budget: int, now: float) -> int:
        """Start waiting requests, best rank first, until one does not fit."""
        held = len(self.requests) - self.waiting
        while self._waiting and budget > 0 and held < self.config.batch_max:
            request = self._waiting[0][2]
            if request.state is State.FINISHED:
                heapq.heappop(self._waiting)
                continue
            tried = (request, len(self._running))
            if self._does_not_fit == tried and self.kv.pool.released < self.kv.retry_at:
                break  # too little has become free since
            match = self.kv.match(request)
            if self.kv.park(request, match):
                heapq.heappop(self._waiting)
                continue
            reserve = len(self._running) * len(self.config.groups)
            started = self.kv.admit(request, match, reserve)
            if started is None:
                self._does_not_fit = tried
                break
            heapq.heappop(self._waiting)
            held += 1
            suspect = request.failed_steps >= SUSPECT
            sync_blocks = sum(len(load.blocks) for load in loads) + match.missing
            sync_max = 0 if suspect else self.config.sync_load_blocks_max
            if match.missing and (sync_blocks > sync_max or any(load.tier for load in started)):
                self._start_loading(request, started, now)
                continue
            loads += started
            self._run(request)
            if not (suspect and rows):
                budget -= self._schedule_prefill(request, budget, rows)
            if suspect:
                break  # it runs alone, now or in the next step
        return budget

    def _run(self, request: Request) -> None:
        request.move(State.RUNNING)
        self._running[request.id] = request

    def _queue(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.priority, request.arrival, request))

    # --- outcomes --------------------------------------------------------------------------

    def apply(self, plan: StepPlan, outcome: StepOutcome) -> list[Output]:
        """Take in what a step brought. Returns what the requests' owners are to hear."""
        if outcome.error is not None:
            self._step_failed(plan, outcome.error)
        elif outcome.invalid_blocks:
            self._lose_blocks(outcome.invalid_blocks)
        for load in plan.loads:
            self._sync_load_done(load, outcome)
        tokens = iter(outcome.tokens)
        for index, (request_id, _, _, start, end, _, sampling, _) in enumerate(plan.rows):
            request = self.requests[request_id]
            request.in_flight -= 1
            token = None if sampling is None else next(tokens, None)
            if request.drain is not Drain.LOST:
                if start < request.settled:
                    self._settle(request, start, end)
                request.committed = min(end, len(request.tokens))  # a dropped token has no name
                if end >= request.boundary:
                    self.kv.commit(request)
                if token is not None and request.finish is None:
                    self._take(request, token, outcome.logprobs.get(index))
            if request.drain and not request.in_flight:
                self._release(request)
        return self.take_outputs()

    def _take(self, request: Request, token: int, logprob: TokenLogprob | None) -> None:
        """A sampled token joins the request's tokens, and may end it."""
        tokens = request.tokens
        tokens.append(token)
        self.counters.generated_tokens += 1
        length = len(tokens)
        if length == request.prompt_length + 1:
            totals = self.counters.prompt_tokens
            for source, count in request.ledger.sources.items():
                totals[source] = totals.get(source, 0) + count
        reason = None
        if token in request.params.stop_token_ids:
            reason = FinishReason.STOP
        elif length >= request.length_max:
            reason = FinishReason.LENGTH
        elif (rule := request.repetition) and rule.push(tokens, length - request.prompt_length):
            reason = FinishReason.REPETITION
        output = Output(request.id, token, logprob)
        if reason is None:
            self._outputs.append(output)
        else:
            self._finish(request, reason, last=output)
            self._drain(request, Drain.ENDED)

    def _settle(self, request: Request, start: int, end: int) -> None:
        """Enter in the ledger what has just become certain. New ground ends a row of failures."""
        if end > request.ledger.reached:
            request.failed_steps = request.losses = 0
        for span in (*request.spans, Span(start, end, COMPUTED)):
            again = request.ledger.commit(span, request.cause)
            self.counters.recomputed_tokens[request.cause] += again
        request.spans = ()

    def _step_failed(self, plan: StepPlan, error: BaseException) -> None:
        """Nothing that the step wrote counts. Its requests try again, a bounded number of times."""
        self.counters.failed_steps += 1
        for row in plan.rows:
            request = self.requests[row.request_id]
            if request.drain is not Drain.LOST:  # else the step before it has failed already
                request.failed_steps += 1
            if request.failed_steps > self.config.max_step_retries:
                message = f"{request.failed_steps} steps in a row failed, the last with: {error}"
                self._finish(request, FinishReason.ERROR, message)
            self._lose(request)

    def _lose_blocks(self, bad: frozenset[int]) -> None:
        """The content of these blocks is bad: whoever holds one goes back, or ends, by its policy."""
        named = frozenset(block for block in bad if self.kv.pool.unpublish(block))
        for request in list(self.requests.values()):
            position = self.kv.first_bad_position(request, bad)
            if position is None:
                continue
            came = position < request.committed  # else nothing came yet of what a load is to bring
            self.kv.lose(request, position if came else self.kv.first_bad_position(request, named))
            self._kv_lost(request, f"the KV of the request was lost from position {position} on")

    def _lose(self, request: Request) -> None:
        request.cause = Cause.FAILED
        self._drain(request, Drain.LOST)

    # --- the end of a life -----------------------------------------------------------------

    def _finish(
        self, request: Request, reason: FinishReason, message: str = "", last: Output | None = None
    ) -> None:
        """Decide how the request ends, and tell, with its ``last`` token. The first reason stays."""
        if request.finish is not None:
            return
        request.finish = reason
        self.counters.finished[reason] += 1
        ledger, prompt = request.ledger, request.prompt_length
        counts = (dict(ledger.sources), dict(ledger.recomputed))
        report = Report(prompt, len(request.tokens) - prompt, *counts)
        last = last or Output(request.id)
        self._outputs.append(last._replace(finish=reason, message=message, report=report))

    def _drain(self, request: Request, why: Drain) -> None:
        """The request gives up its blocks as soon as no step in flight refers to it."""
        request.drain = max(request.drain, why)
        if request.state is not State.DRAINING:
            self._running.pop(request.id, None)
            self._loading.pop(request.id, None)
            request.move(State.DRAINING)
            self._draining[request.id] = request
        if not request.in_flight:
            self._release(request)

    def _release(self, request: Request) -> None:
        self.kv.abandon_loads(request, late=False)
        self.kv.release(request)
        del self._draining[request.id]
        request.drain = Drain.NO
        if request.finish is not None:
            self._close(request)
        else:
            request.move(State.WAITING)
            self._queue(request)

    def _close(self, request: Request) -> None:
        request.move(State.FINISHED)
        del self.requests[request.id]

    # --- loads -----------------------------------------------------------------------------

    def _start_loading(self, request: Request, loads: Sequence[Transfer], now: float) -> None:
        request.move(State.LOADING)
        request.committed = 0
        request.load_deadline = now + self.config.load_deadline_s
        self._loading[request.id] = request
        self.kv.outbox += loads

    def transferred(self, results: Iterable[TransferResult]) -> None:
        """Transfers have returned, in any order."""
        for result in results:
            request = self.kv.returned(result)
            if request is None:
                continue
            request.load_error = request.load_error or result.error
            if request.loads:
                continue
            if request.load_error:
                self._kv_lost(request, f"KV could not be loaded: {request.load_error}")
            else:
                del self._loading[request.id]
                request.committed = request.scheduled
                self._run(request)

    def _sync_load_done(self, load: Transfer, outcome: StepOutcome) -> None:
        bad = not outcome.invalid_blocks.isdisjoint(load.blocks)
        error = "the step reported its blocks as invalid" if bad else ""
        self.kv.returned(TransferResult(load, error), usable=outcome.error is None)

    def _expire_loads(self, now: float) -> None:
        late = takewhile(lambda r: r.load_deadline <= now, self._loading.values())
        for request in list(late):
            self.kv.abandon_loads(request, late=True)
            self._kv_lost(request, f"loading took over {self.config.load_deadline_s:g} s")

    def give_up(self, loads: Collection[int]) -> None:
        """These transfers take too long, though they may yet succeed: nobody waits for them any more."""
        for request in [r for r in self._loading.values() if not r.loads.isdisjoint(loads)]:
            self._lose(request)

    def _kv_lost(self, request: Request, message: str) -> None:
        """Go back, or end. A tier can spoil each chunk of a chain once, so the way back is bounded."""
        request.losses += 1
        losses_max = self.config.max_step_retries + len(request.digests)
        if request.fail_on_lost_kv or request.losses > losses_max + 1:
            self._finish(request, FinishReason.ERROR, message)
        self._lose(request)

    def __repr__(self) -> str:
        counts = f"{len(self._running)} running, {self.loading} loading, {self.waiting} waiting"
        return f"<Scheduler {counts}, {len(self._draining)} draining, {self.kv.pool!r}>"
