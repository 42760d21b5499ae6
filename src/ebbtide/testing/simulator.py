"""The deterministic simulator: scheduler, offload and witness under faults, all decided by one seed.

    python -m ebbtide.testing.simulator --seed 7 -v        one seed, told step by step
    python -m ebbtide.testing.simulator --seeds 0 2000     many, on two processes

First requests arrive while faults are injected; then the faults stop, but for poisonous requests, and
everything must converge. After every event the rules of ``invariants`` and ``rules`` are checked; at the
end every finished request must equal the oracle, and nothing may be left.

To test an eviction policy or host memory of your own, see ``docs/testing.md``:

    python -m ebbtide.testing.simulator --policy my.module:MyPolicy --memory my.module:MyMemory
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from ebbtide.core.output import Output
from ebbtide.core.plan import StepOutcome, StepPlan, Transfer, TransferResult
from ebbtide.core.request import FinishReason, Request, State
from ebbtide.errors import InputError, QueueFull
from ebbtide.testing import invariants
from ebbtide.testing.probes import NAMES, Probes
from ebbtide.testing.rig import DEFAULT_PARTS, Client, Parts, Rig
from ebbtide.testing.rules import Rules
from ebbtide.testing.world import Traffic, World

EVENTS_MAX = 30_000
STANDARD_SEEDS = 2_000  # so many must come through every probe


class Result(NamedTuple):
    """What a seed brought. ``trace`` is a digest of everything that happened."""

    injected: Counter[str]
    probes: Counter[str]
    trace: str


class Verdict(NamedTuple):
    """``failure`` says how the seed failed, and is empty where it did not."""

    seed: int
    failure: str
    result: Result | None


@dataclass(slots=True)
class Moving:
    """A transfer beside the steps: first its bytes move, some time later it reports."""

    transfer: Transfer
    not_before: float
    result: TransferResult | None = None


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
        self.rig = rig = Rig(world, rng, parts)
        self.scheduler, self.manager = rig.scheduler, rig.manager
        memory = rig.faulty.memory
        self.chains = invariants.Chains(rig.model, memory, world.host_slots, world.blocks_per_chunk)
        self.now = 0.0
        self.traffic = Traffic(world, rng)
        self.clients: dict[str, Client] = {}
        self.requests: list[Request] = []  # whose chains are still to be learned
        self.to_come = world.requests
        self.submitted: deque[StepPlan] = deque()  # handed out, not run
        self.ran: deque[tuple[StepPlan, StepOutcome]] = deque()  # run, not applied
        self.moving: list[Moving] = []
        self.probes = Probes(self.scheduler, self.manager)
        self.rules = Rules(self.scheduler, self.manager, self.chains)
        self.healed = False
        self._decided = False  # the scheduler was called
        self._touched = self._moved = False
        self._idle = False  # the last schedule() found nothing, and nothing has happened since
        self._totals: tuple[int, ...] = ()
        self._trace = blake2b(digest_size=16)
        self._tell = tell

    # --- the loop --------------------------------------------------------------------------

    def run(self) -> Result:
        self._say(f"world: {self.world}")
        for _ in range(EVENTS_MAX):
            if self.to_come == 0 and not self.healed and self.rng.random() < 0.02:
                self._say("faults stop")
                self.healed = True
                self.rig.faults = self.world.faults.lasting()
            if not (self.to_come or self.scheduler.requests or self.moving or self.plans):
                break
            self._event()
            self._check()
        else:
            raise AssertionError(f"no end after {EVENTS_MAX} events: {self._state()}")
        self._check_end()
        return Result(self.rig.injected, self.probes.hit, self._trace.hexdigest())

    @property
    def plans(self) -> list[StepPlan]:
        """In flight."""
        return [plan for plan, _ in self.ran] + list(self.submitted)

    def _event(self) -> None:
        """One thing happens: drawn from what can happen now."""
        rng = self.rng
        self.now += rng.random()
        due = [m for m in self.moving if m.not_before <= self.now]
        events: list[tuple[float, Callable[[], None]]] = []
        if self.to_come:
            events.append((1, self._arrive))
        if len(self.plans) < self.world.overlap and not self._idle:
            events.append((4, self._schedule))
        if self.submitted:
            events.append((3, self._run_step))
        if self.ran:
            events.append((3, self._apply))
        if due:
            events.append((3, lambda: self._transfer(rng.choice(due))))
        if not events:
            self._wait()
            return
        weights = [weight for weight, _ in events]
        rng.choices([event for _, event in events], weights)[0]()
        if self.scheduler.requests and self.rig.strikes("abort"):
            self._abort(list(self.scheduler.requests))
        if self.scheduler.loading and self.rig.strikes("abort_loading"):
            self._abort(list(self.scheduler._loading))
        if self.scheduler._draining and self.rig.strikes("abort_draining"):
            self._abort(list(self.scheduler._draining))
        if self.rig.strikes("evict"):
            pool = self.scheduler.kv.pool
            pool.drop(pool.take(pool.available))
            self._collect("evict")
        if self.rig.strikes("reset"):
            self._reset()

    def _wait(self) -> None:
        """Nothing can happen now: then something is on its way, or something is wrong."""
        times = [m.not_before for m in self.moving]
        deadline = self.scheduler.next_deadline()
        assert times or self.plans, f"stuck: {self._state()}"
        assert (deadline is None) == (not self.scheduler.loading)
        self.now = max(self.now, min([*times, *([] if deadline is None else [deadline])]))
        self._idle = False

    # --- events ----------------------------------------------------------------------------

    def _arrive(self) -> None:
        self.to_come -= 1
        request_id = f"r{self.world.requests - self.to_come}"
        prompt, params, options = self.traffic.request()
        try:
            self.scheduler.add(request_id, prompt, params, **options)
        except InputError as refusal:
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

    def _schedule(self) -> None:
        self.probes.before()
        late = [r for r in self.scheduler._loading.values() if r.load_deadline <= self.now]
        self.rig.injected["late_load"] += len(late)
        self.rules.before_schedule(self.now)
        plan = self.scheduler.schedule(self.now)
        self.rules.after_schedule(self.now, plan)
        self._collect("schedule")
        self.probes.after("schedule")
        self._idle = plan is None
        if plan is None:
            assert self.plans or self.moving or not self.scheduler.requests, (
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

    def _transfer(self, moving: Moving) -> None:
        """Its bytes move; it reports at once, or later."""
        self._touched = self._moved = True
        if moving.result is None:
            moving.result = self.rig.faulty.move(moving.transfer)
            if self.rng.random() < 0.5:
                return
        self.moving.remove(moving)
        self._say(f"transfer {moving.transfer.id} returns: {moving.result.error or 'ok'}")
        self.probes.before(transfer=moving.result)
        self.rules.before_transfer(moving.result)
        self.scheduler.transferred([moving.result])
        self.rules.after_transfer(moving.result)
        self._collect("transferred")
        self.probes.after("transferred")

    def _abort(self, ids: Sequence[str]) -> None:
        request_id = self.rng.choice(ids)
        self.probes.aborting(request_id)
        self.scheduler.end(request_id)
        self._say(f"abort {request_id}")
        self._collect("abort")

    def _reset(self) -> None:
        self.probes.resetting()
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
        self.rules.started(transfers)
        for transfer in transfers:
            slow = self.rig.strikes("slow_transfer")
            wait = self.rng.uniform(3, 60) if slow else 0.0
            self.moving.append(Moving(transfer, self.now + wait))
            self._say(f"  {event} starts {transfer}")
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
            transfers = [m.transfer for m in self.moving] + [t for p in plans for t in p.loads]
            invariants.check_requests(scheduler, plans)
            invariants.check_blocks(scheduler, plans, transfers)
            invariants.check_host(self.manager, transfers)
            self.rules.check_sharers()
            self._check_totals()
        if self._touched:  # the device's bytes have changed, or names may have been given
            self._touched = False
            self.requests = [r for r in self.requests if r.state is not State.FINISHED]
            self.chains.check_device(scheduler, self.rig.faulty.bad_blocks)
        if self._moved:
            self._moved = False
            self.chains.check_host(self.manager, self.rig.arena, self.rig.faulty.bad_slots)

    def _check_totals(self) -> None:
        """Counters never go down, and say what the clients heard."""
        counters, below = self.scheduler.counters, self.manager.counters
        clients = self.clients.values()
        assert counters.generated_tokens == sum(len(c.tokens) for c in clients)
        ends = Counter(c.end.finish for c in clients if c.end)
        assert counters.finished == {reason: ends[reason] for reason in FinishReason}
        started = sum(len(c.prompt) for c in clients if c.tokens)
        assert sum(counters.prompt_tokens.values()) == started, "sources do not sum up"
        totals = (
            counters.steps,
            counters.failed_steps,
            counters.preemptions,
            *counters.prompt_tokens.values(),
            *counters.recomputed_tokens.values(),
            *(getattr(below, name) for name in below.__slots__),
            self.manager.slots.evictions,
        )
        if self._totals:
            downs = [i for i, (a, b) in enumerate(zip(self._totals, totals, strict=True)) if b < a]
            assert not downs, f"counters {downs} went down: {self._totals} -> {totals}"
        self._totals = totals

    def _check_end(self) -> None:
        assert self.scheduler.schedule(self.now) is None
        self.rig.check_end(list(self.clients.values()))
        aborts = sum(self.rig.injected[f] for f in ("abort", "abort_loading", "abort_draining"))
        assert self.scheduler.counters.finished[FinishReason.ABORT] <= aborts

    # --- telling ---------------------------------------------------------------------------

    def _state(self) -> str:
        requests = list(self.scheduler.requests.values())
        return f"{self.scheduler!r} {requests} moving {self.moving}, seed's injected {self.rig.injected}"

    def _say(self, line: str) -> None:
        self._trace.update(line.encode())
        self._tell(f"{self.now:8.2f} {line}")


# --- the command -----------------------------------------------------------------------------


def simulate(seed: int, parts: Parts = DEFAULT_PARTS, verbose: bool = False) -> Verdict:
    """Run a seed. A failure is part of the verdict, never raised."""
    try:
        simulation = Simulation(seed, parts=parts, tell=print if verbose else lambda line: None)
        return Verdict(seed, "", simulation.run())
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rsplit('/', 1)[-1]}:{place.lineno}"
        if verbose:
            traceback.print_exc()
        return Verdict(seed, f"{where} {type(error).__name__}: {error}"[:600], None)


def simulate_all(seeds: Iterable[int], parts: Parts = DEFAULT_PARTS) -> Iterator[Verdict]:
    """Run many seeds on two processes, in order."""
    with ProcessPoolExecutor(2) as pool:
        yield from pool.map(partial(simulate, parts=parts), seeds, chunksize=8)


def main() -> int:
    arguments = _arguments()
    parts = Parts(_named(arguments.policy), _named(arguments.memory))
    if arguments.seed is not None:
        verdict = simulate(arguments.seed, parts, arguments.verbose)
        injected = dict(+verdict.result.injected) if verdict.result else {}
        print(verdict.failure or f"seed {arguments.seed} is fine: {injected}")
        return bool(verdict.failure)
    first, last = arguments.seeds
    total: Counter[str] = Counter()
    probes: Counter[str] = Counter()
    failed: list[int] = []
    for verdict in simulate_all(range(first, last), parts):
        if verdict.result is None:
            failed.append(verdict.seed)
            print(f"seed {verdict.seed} failed: {verdict.failure}")
            print(f"  replay: python -m ebbtide.testing.simulator --seed {verdict.seed} -v")
        else:
            total += verdict.result.injected
            probes += verdict.result.probes
    if arguments.keep and failed:
        with arguments.keep.open("a") as file:
            file.writelines(f"{seed}\n" for seed in failed)
    if arguments.verbose:
        for name, count in sorted({**total, **probes}.items()):
            print(f"  {name}: {count}")
    missed = sorted(NAMES - probes.keys()) if last - first >= STANDARD_SEEDS else []
    for name in missed:
        print(f"never seen: {name}")
    print(
        f"sim: {last - first} seeds, {len(failed)} failures, {total.total()} faults injected, "
        f"{len(probes)} probes hit"
    )
    return bool(failed or missed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--seed", type=int, help="run this seed only")
    add("--seeds", type=int, nargs=2, metavar=("A", "B"), default=(0, 200), help="A to B - 1")
    add("-v", "--verbose", action="store_true", help="tell every event of --seed, or all counts")
    add("--keep", type=Path, metavar="FILE", help="append the seeds that failed to this file")
    add("--policy", default="ebbtide.offload.policies:LRU", metavar="MODULE:NAME")
    add("--memory", default="ebbtide.offload.arena:Arena", metavar="MODULE:NAME")
    return parser.parse_args()


def _named(path: str) -> Any:
    """The object that "module:name" says."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{path!r} names nothing that can be imported: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
