"""One seed's world, run event by event: what ``simulator`` runs many of."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from hashlib import blake2b
from typing import NamedTuple

from ebbtide.core.output import Output
from ebbtide.core.plan import StepOutcome, StepPlan, TransferResult
from ebbtide.core.request import FinishReason, Request, State
from ebbtide.errors import InputError, QueueFull
from ebbtide.offload.below import Action, BelowCounters, Job, JobResult
from ebbtide.offload.manager import OffloadCounters
from ebbtide.testing import invariants
from ebbtide.testing.beside import Answer, Beside, Lookup, Moving
from ebbtide.testing.lower_tier import Place
from ebbtide.testing.probes import Probes
from ebbtide.testing.rig import DEFAULT_PARTS, Client, Parts, Rig
from ebbtide.testing.rules import Rules
from ebbtide.testing.tier_rules import TierRules
from ebbtide.testing.world import Traffic, World

EVENTS_MAX = 30_000
FAULTY_EVENTS_MAX = 3_000  # then the faults stop, also where requests are still to come
HOST = [field.name for field in fields(OffloadCounters)]
BELOW = [field.name for field in fields(BelowCounters)]


class Result(NamedTuple):
    """What a seed brought. ``trace`` is a digest of everything that happened."""

    injected: Counter[str]
    probes: Counter[str]
    trace: str


class Simulation:
    """One seed's world. ``run`` raises ``AssertionError`` where a rule is broken."""

    def __init__(
        self,
        seed: int,
        *,
        parts: Parts = DEFAULT_PARTS,
        world: World | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.world = world = world or World.draw(rng)
        self.now = 0.0
        self.traffic = Traffic(world, rng)
        self.to_come = world.requests
        self.healed = False
        self.hit = Counter[str]()
        self.injected = Counter[str]()
        self._parts = parts
        self._crashes_at = rng.randrange(world.requests) if world.crashes else -1
        self._trace = blake2b(digest_size=16)
        self._tell = tell
        self._begin(None)

    def _begin(self, places: Sequence[Place] | None) -> None:
        """A process starts: all but ``places`` is new."""
        world, rng = self.world, self.rng
        self.rig = rig = Rig(world, rng, self._parts, places)
        self.scheduler, self.manager = rig.scheduler, rig.manager
        memory = rig.faulty.memory
        if places is None:
            slots, per_chunk = world.host_slots, world.blocks_per_chunk
            self.chains = invariants.Chains(rig.model, memory, slots, per_chunk)
        else:
            self.chains.restart(memory)
        self.clients: dict[str, Client] = {}
        self.requests: list[Request] = []  # whose chains are still to be learned
        self.submitted: deque[StepPlan] = deque()  # handed out, not run
        self.ran: deque[tuple[StepPlan, StepOutcome]] = deque()  # run, not applied
        self.beside = Beside(rig, rng)
        self.probes = Probes(self.scheduler, self.manager, rig.tiers, self.hit)
        self.rules = Rules(self.scheduler, self.manager, self.chains, self.beside.held)
        self.tier_rules = TierRules(self.manager, rig.slots, rig.tiers)
        self._decided = False  # the scheduler was called
        self._touched = self._moved = False
        self._idle = False  # the last schedule() found nothing, and nothing has happened since
        self._flushed = False
        self._totals: dict[str, int] = {}

    # --- the loop --------------------------------------------------------------------------

    def run(self) -> Result:
        rng = self.rng
        self._say(f"world: {self.world}")
        for event in range(EVENTS_MAX):
            patient = self.to_come and event < FAULTY_EVENTS_MAX
            if not patient and not self.healed and rng.random() < 0.02:
                self._say("faults stop")
                self.healed = True
                self.rig.faults = self.world.faults.lasting()
            if self.to_come <= self._crashes_at and rng.random() < 0.05:
                self._crash()
            if not (self.to_come or self.scheduler.requests or self._is_something_left()):
                break
            self._event()
            self._check()
        else:
            raise AssertionError(f"no end after {EVENTS_MAX} events: {self._state()}")
        self._check_end()
        self.injected += self.rig.injected
        return Result(self.injected, self.hit, self._trace.hexdigest())

    def _is_something_left(self) -> bool:
        if self.plans or self.beside.moving or self.manager.next_deadline() is not None:
            return True
        if self._flushed:
            return False
        self._flush()
        return True

    @property
    def plans(self) -> list[StepPlan]:
        """In flight."""
        return [plan for plan, _ in self.ran] + list(self.submitted)

    def _event(self) -> None:
        """One thing happens: drawn from what can happen now."""
        rng = self.rng
        self.now += rng.random()
        due = self.beside.due(self.now)
        events: list[tuple[float, Callable[[], None]]] = []
        if self.to_come and len(self.scheduler.requests) < self.world.company_max:
            events.append((1, self._arrive))
        if len(self.plans) < self.world.overlap and not self._idle:
            events.append((4, self._schedule))
        if self.submitted:
            events.append((3, self._run_step))
        if self.ran:
            events.append((3, self._apply))
        if due:
            events.append((3, lambda: self._move(rng.choice(due))))
        if not events:
            self._wait()
            return
        weights = [weight for weight, _ in events]
        rng.choices([event for _, event in events], weights)[0]()
        if self.scheduler.requests and self.rig.strikes("abort"):
            self._abort(list(self.scheduler.requests))
        if self.scheduler.loading and self.rig.strikes("abort_loading"):
            self._abort(list(self.scheduler._loading))
        waiters = [r for waiters in self.scheduler.kv._parked.values() for r in waiters]
        parked = [r.id for r in waiters if r.state is State.WAITING]
        if parked and self.rig.strikes("abort_loading"):
            self._abort(parked)
        if self.scheduler._draining and self.rig.strikes("abort_draining"):
            self._abort(list(self.scheduler._draining))
        if self.rig.strikes("evict"):
            self._evict()
        if self.rig.strikes("reset"):
            self._reset()
        awaited = parked or any(transfer.tier for transfer in self.beside.transfers)
        if awaited and self.rig.strikes("reset_awaited"):
            self._reset()
        if self.rig.places and self.rig.strikes("tier_shared"):
            rng.choice(self.rig.places).harm(rng)

    def _wait(self) -> None:
        """Nothing can happen now: then something is on its way, or something is wrong."""
        times = [m.not_before for m in self.beside.moving]
        deadline = self.scheduler.next_deadline()
        assert (deadline is None) == (not self.scheduler.loading)
        times += [t for t in (deadline, self.manager.next_deadline()) if t is not None]
        assert times, f"stuck: {self._state()}"
        self.now = max(self.now, min(times))
        self._idle = False

    # --- events ----------------------------------------------------------------------------

    def _arrive(self) -> None:
        self.to_come -= 1
        request_id = f"r{self.world.requests - self.to_come}"
        prompt, params, options = self.traffic.request()
        held = self.beside.look_up(request_id, prompt, options["cache_salt"], self.now)
        try:
            self.scheduler.add(request_id, prompt, params, held=held, **options)
        except InputError as refusal:
            self.beside.held.discard(request_id)
            self._say(f"{request_id} refused: {refusal}")
            full = self.scheduler.waiting >= self.world.waiting_max
            if isinstance(refusal, QueueFull) != full:
                raise AssertionError(f"refused: {refusal}") from refusal
            self.probes.count(f"refused: {'too many wait' if full else 'can never fit'}")
            return
        request = self.scheduler.requests[request_id]
        poisoned = self.rig.strikes("poison")
        self.rig.poisoned |= {request_id} if poisoned else set()
        self.clients[request_id] = Client(request_id, prompt, params, request.length_max, poisoned)
        self.requests.append(request)
        self.rules.arrived(request, options["cache_salt"])
        self._say(f"{request_id} arrives, {len(prompt)} tokens, {params.max_tokens} to come")
        self._collect("arrival")

    def _give_up(self) -> None:
        """Loads of a tier that stalls are not waited for."""
        loads = self.manager.take_given_up()
        flights = self.scheduler.kv._flights
        awaited = {
            n: flights[n].transfer for r in self.scheduler._loading.values() for n in r.loads
        }
        for tier in self.manager.below:
            stalls_at = tier.stalls_at(self.manager.compute_seconds)
            if stalls_at is not None and stalls_at <= self.now:
                kept = [t for n, t in awaited.items() if t.tier == tier.name and n not in loads]
                assert not kept, f"{tier.name} stalls, and is waited for: {kept}"
        if not loads:
            return
        self.rig.injected["stalled_load"] += len(loads)
        holders = [r for r in self.scheduler._loading.values() if not r.loads.isdisjoint(loads)]
        self.rules.given_up(holders)
        self.tier_rules.late([flights[load].transfer for load in loads])
        self.probes.count("tier: stalled loads are given up", holders)
        self.scheduler.give_up(loads)
        assert not any(r in self.scheduler._loading.values() for r in holders)
        back = self.beside.call_back(loads, self.now)
        self.probes.count("tier: a load is called back", back)
        self._say(f"given up: {loads} of {holders}, and called back: {[t.id for t in back]}")
        self._collect("give up")

    def _schedule(self) -> None:
        self.manager.tick(self.now)
        self._give_up()
        self.probes.before()
        late = [r for r in self.scheduler._loading.values() if r.load_deadline <= self.now]
        self.rig.injected["late_load"] += len(late)
        self.rules.before_schedule(self.now)
        plan = self.scheduler.schedule(self.now)
        self.rules.after_schedule(self.now, plan)
        self.tier_rules.late(load for _, loads in self.rules.late for load in loads)
        self._collect("schedule")
        self.probes.after("schedule")
        self._idle = plan is None
        if plan is None:
            assert self.plans or self.beside.moving or not self.scheduler.requests, (
                f"nothing in flight, nothing to run, but unfinished: {self._state()}"
            )
            return
        assert sum(row.end - row.start for row in plan.rows) == plan.num_tokens
        assert 0 < plan.num_tokens <= self.world.step_tokens_max
        self.submitted.append(plan)
        rows = ", ".join(f"{r.request_id}[{r.start}:{r.end}]" for r in plan.rows)
        self._say(f"step {plan.step}: {rows}; loads {[t.id for t in plan.loads]}")

    def _run_step(self) -> None:
        self._touched = True
        plan = self.submitted.popleft()
        outcome = self.rig.run_step(plan)
        self.ran.append((plan, outcome))
        self._say(f"step {plan.step} ran: {outcome.error or sorted(outcome.invalid_blocks)}")

    def _apply(self) -> None:
        self._touched = True
        plan, outcome = self.ran.popleft()
        self.probes.before(outcome)
        self.rules.before_apply(plan, outcome)
        outputs = self.scheduler.apply(plan, outcome)
        self.rules.after_apply(plan, outcome)
        self._say(f"apply {plan.step}")
        self._hear(outputs)
        self._collect("apply")
        self.probes.after("apply")

    def _move(self, moving: Moving) -> None:
        """It is carried out; it reports at once, or later."""
        self._touched = self._moved = True
        item = moving.item
        if moving.result is None:
            moving.result = self.beside.carry_out(item)
            if isinstance(item, Job) and item.action is Action.WRITE:
                self._check_payload(item)
            if self.rng.random() < 0.5:
                if isinstance(item, Lookup) and self.rng.random() < 0.3:
                    self._ready(item.request_id, "does not wait for its lookups")
                return
        self.beside.moving.remove(moving)
        result = moving.result
        if isinstance(result, TransferResult):
            self._transferred(result)
        elif isinstance(result, JobResult):
            self._done(result)
        else:
            self._answered(result)

    def _transferred(self, result: TransferResult) -> None:
        self._say(f"transfer {result.transfer.id} returns: {result.error or 'ok'}")
        self.probes.before(transfer=result)
        self.rules.before_transfer(result)
        self.scheduler.transferred([result])
        self.rules.after_transfer(result)
        self.tier_rules.moved(result)
        self._collect("transferred")
        self.probes.after("transferred")

    def _done(self, result: JobResult) -> None:
        self._say(f"{result.job} returns: {result.result}")
        self.probes.tiers.before_done(result)
        self.manager.done(result)
        self.tier_rules.done(result)
        self._collect("job")

    def _answered(self, answer: Answer) -> None:
        lookup = answer.lookup
        self._say(f"{lookup.tier} has {len(answer.found)} of {len(lookup.keys)}")
        is_held = lookup.request_id in self.beside.held
        self.probes.tiers.answered(lookup.tier, answer.found, is_held)
        self.manager.found(lookup.tier, answer.found)
        self.tier_rules.found(lookup.tier, answer.found)
        if self.beside.answered(lookup.request_id):
            self._ready(lookup.request_id, "is ready")
        self._collect("lookup")

    def _ready(self, request_id: str, why: str) -> None:
        if request_id in self.beside.held:
            self.beside.held.discard(request_id)
            self.scheduler.ready(request_id)
            self._say(f"{request_id} {why}")
            self._collect("ready")

    def _flush(self) -> None:
        """The process is to end: what the tiers below lack is written there."""
        self._flushed = True
        self.manager.flush()
        self._collect("flush")
        writes = sum(job.action is Action.WRITE for job in self.beside.jobs)
        self.probes.tiers.count("flush: something to write", writes)
        self._say(f"flush: {writes} writes")

    def _crash(self) -> None:
        self._say("crash")
        self._crashes_at = -1
        self.probes.tiers.crashing(self.beside.jobs)
        self.beside.crash()
        for client in self.clients.values():
            client.check_so_far(self.rig.model)
        self.injected += self.rig.injected
        self._begin(self.rig.places)

    def _abort(self, ids: Sequence[str]) -> None:
        request_id = self.rng.choice(ids)
        self.probes.aborting(request_id)
        held = request_id in self.beside.held
        self.probes.tiers.count("lookup: it is aborted while held", held)
        self.scheduler.end(request_id)
        self._say(f"abort {request_id}")
        self._collect("abort")

    def _evict(self) -> None:
        """Other work takes the free blocks; where there are tiers, also slots; or blocks here and there."""
        pool, rng = self.scheduler.kv.pool, self.rng
        if self.world.scattered:
            for block in rng.sample(list(pool._cached), pool.cached // 2):
                pool.unpublish(block)
        else:
            pool.drop(pool.take(pool.available))
        while self.rig.tiers and rng.random() < 0.85 and self.manager._demote():
            pass
        self._collect("evict")

    def _reset(self) -> None:
        self.probes.resetting()
        if self.rig.tiers and self.rng.random() < 0.3:
            name = self.rng.choice(["host", *self.rig.faulty.tiers])
            self.probes.tiers.clearing([name], self.beside.transfers)
            self.manager.clear([name])
            self._say(f"{name} is cleared")
            self._collect("clear")
            return
        self.probes.tiers.clearing(None, self.beside.transfers)
        self.scheduler.reset()
        self._say("reset")
        self._collect("reset")
        assert not self.scheduler.kv.pool._name
        assert not self.manager.slots._at

    def _collect(self, event: str) -> None:
        """What every call of the scheduler may leave behind: outputs, and transfers to start."""
        self._hear(self.scheduler.take_outputs())
        self.chains.learn(self.requests)
        transfers = self.scheduler.take_transfers()
        jobs = self.manager.take_jobs()
        self.probes.tiers.started([*transfers, *jobs])
        self.rules.started(transfers)
        self.tier_rules.started(transfers, jobs)
        self.beside.start([*transfers, *jobs], self.now)
        for item in [*transfers, *jobs]:
            self._say(f"  {event} starts {item}")
        self._idle = False
        self._decided = True

    def _hear(self, outputs: Sequence[Output]) -> None:
        stopped = []
        for output in outputs:
            client = self.clients[output.request_id]
            client.hear(output)
            if output.finish is None and self.rng.random() < self.world.stops:
                client.stopped = True
                stopped.append(client.name)
            if output.finish is not None:
                self.traffic.ended(client.prompt + client.tokens)
                self._say(f"{output.request_id} ends: {output.finish.value} {output.message}")
        for request_id in stopped:
            self._say(f"{request_id} is stopped")
            self.scheduler.end(request_id, FinishReason.STOP)
        if stopped:
            self._hear(self.scheduler.take_outputs())

    # --- checks ----------------------------------------------------------------------------

    def _check(self) -> None:
        scheduler, plans = self.scheduler, self.plans
        if self._decided:
            self._decided = False
            transfers = self.beside.transfers + [t for p in plans for t in p.loads]
            invariants.check_requests(scheduler, plans, self.beside.held)
            invariants.check_blocks(scheduler, plans, transfers)
            invariants.check_host(self.manager, transfers, self.beside.jobs)
            self.rules.check_sharers()
            self.tier_rules.check()
            if not self._flushed:
                self.tier_rules.check_kept()
            self._check_totals()
        if self._touched:  # the device's bytes have changed, or names may have been given
            self._touched = False
            self.requests = [r for r in self.requests if r.state is not State.FINISHED]
            self.chains.check_device(scheduler, self.rig.faulty.bad_blocks)
        if self._moved:
            self._moved = False
            self.chains.check_host(self.manager, self.rig.arena, self.rig.faulty.bad_slots)

    def _check_payload(self, write: Job) -> None:
        place = self.rig.faulty.tiers[write.tier].place
        payload = place.chunks.get(write.key)
        if payload is not None:
            self.chains.check_payload(write.key, payload, place.bad[write.key])

    def _check_totals(self) -> None:
        """Counters never go down, and say what the clients heard."""
        counters, below = self.scheduler.counters, self.manager.counters
        clients = self.clients.values()
        assert counters.generated_tokens == sum(len(c.tokens) for c in clients)
        ends = Counter(c.end.finish for c in clients if c.end)
        assert counters.finished == {reason: ends[reason] for reason in FinishReason}
        started = sum(len(c.prompt) for c in clients if c.tokens)
        assert sum(counters.prompt_tokens.values()) == started, "sources do not sum up"
        totals = {
            "steps": counters.steps,
            "failed steps": counters.failed_steps,
            "preemptions": counters.preemptions,
            "evictions": self.manager.slots.evictions,
            **counters.prompt_tokens,
            **{cause.value: count for cause, count in counters.recomputed_tokens.items()},
            **{name: getattr(below, name) for name in HOST},
        }
        for tier in self.manager.below:
            totals |= {f"{tier.name} {name}": getattr(tier.counters, name) for name in BELOW}
        downs = {name: n for name, n in self._totals.items() if totals[name] < n}
        assert not downs, f"counters went down from {downs}"
        self._totals = totals

    def _check_end(self) -> None:
        uncleared = [tier.name for tier in self.manager.below if tier._uncleared]
        assert not uncleared, f"{uncleared} were never cleared"
        assert self.scheduler.schedule(self.now) is None
        self.rig.check_end(list(self.clients.values()))
        aborts = sum(self.rig.injected[f] for f in ("abort", "abort_loading", "abort_draining"))
        assert self.scheduler.counters.finished[FinishReason.ABORT] <= aborts

    # --- telling ---------------------------------------------------------------------------

    def _state(self) -> str:
        requests = list(self.scheduler.requests.values())
        moving, injected = self.beside.moving, self.rig.injected
        return f"{self.scheduler!r} {requests} moving {moving}, injected {injected}"

    def _say(self, line: str) -> None:
        self._trace.update(line.encode())
        self._tell(f"{self.now:8.2f} {line}")
