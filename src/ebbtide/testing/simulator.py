"""The deterministic simulator: scheduler, offload and witness under faults, all decided by one seed.

    python -m ebbtide.testing.simulator --seed 7 -v        one seed, told step by step
    python -m ebbtide.testing.simulator --seeds 0 2000     many, on two processes

First requests arrive while faults are injected; then the faults stop and everything must converge.
After every event the rules of ``invariants`` are checked; at the end every finished request must
equal the oracle, and nothing may be left.

To test an eviction policy of your own: ``Simulation(seed, policy=MyPolicy).run()``.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from ebbtide.core.ledger import Cause
from ebbtide.core.output import Output
from ebbtide.core.plan import StepOutcome, StepPlan, Transfer, TransferResult
from ebbtide.core.request import FinishReason, Request
from ebbtide.core.scheduler import Scheduler, SchedulerConfig
from ebbtide.errors import InputError
from ebbtide.offload.arena import Arena
from ebbtide.offload.host import HostSlots
from ebbtide.offload.manager import OffloadManager
from ebbtide.offload.policies import LRU, EvictionPolicy
from ebbtide.params import SamplingParams
from ebbtide.testing import invariants
from ebbtide.testing.faulty import FaultyMemory
from ebbtide.testing.probes import Probes
from ebbtide.testing.witness import WitnessExecutor, WitnessMemory, WitnessModel, oracle
from ebbtide.testing.world import Faults, Traffic, World

EVENTS_MAX = 30_000


class Result(NamedTuple):
    """What a seed brought. ``trace`` is a digest of everything that happened."""

    injected: Counter[str]
    probes: Counter[str]
    trace: str


@dataclass(slots=True)
class Moving:
    """A transfer beside the steps: first its bytes move, some time later it reports."""

    transfer: Transfer
    not_before: float
    result: TransferResult | None = None


@dataclass(slots=True)
class Client:
    """A request as its owner sees it."""

    prompt: list[int]
    params: SamplingParams
    request: Request
    tokens: list[int] = field(default_factory=list)
    end: Output | None = None


class Simulation:
    """One seed's world. ``run`` raises ``AssertionError`` where a rule is broken."""

    def __init__(
        self,
        seed: int,
        *,
        policy: Callable[[], EvictionPolicy] = LRU,
        world: World | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.world = world = world or World.draw(rng)
        self.faults = world.faults
        self.injected: Counter[str] = Counter()
        self.now = 0.0
        model = WitnessModel(world.groups, vocabulary=world.vocabulary)
        self.manager = OffloadManager(
            HostSlots(world.host_slots, policy()),
            world.blocks_per_chunk,
            len(world.groups),
            world.stores_max,
        )
        self.scheduler = Scheduler(_config(world, self.manager), self.manager)
        memory = WitnessMemory(model, self.scheduler.config.num_blocks, world.block_size)
        arena = Arena(world.host_slots, world.blocks_per_chunk, memory.block_bytes)
        self.faulty = FaultyMemory(world.groups, memory, arena, rng, self._strikes)
        self.executor = WitnessExecutor(model, memory, self.faulty.move)
        self.chains = invariants.Chains(model, memory, world.host_slots, world.blocks_per_chunk)
        self.traffic = Traffic(world, rng)
        self.clients: dict[str, Client] = {}
        self.to_come = world.requests
        self.submitted: deque[StepPlan] = deque()  # handed out, not run
        self.ran: deque[tuple[StepPlan, StepOutcome]] = deque()  # run, not applied
        self.moving: list[Moving] = []
        self.probes = Probes(self.scheduler, self.manager)
        self._touched = False
        self._idle = False  # the last schedule() found nothing, and nothing has happened since
        self._totals: tuple[int, ...] = ()
        self._trace = blake2b(digest_size=16)
        self._tell = tell

    # --- the loop --------------------------------------------------------------------------

    def run(self) -> Result:
        self._say(f"world: {self.world}")
        for _ in range(EVENTS_MAX):
            if self.to_come == 0 and self.faults != Faults() and self.rng.random() < 0.02:
                self._say("faults stop")
                self.faults = Faults()
            if not (self.to_come or self.scheduler.requests or self.moving or self.plans):
                break
            self._event()
            self._check()
        else:
            raise AssertionError(f"no end after {EVENTS_MAX} events: {self._state()}")
        self._check_end()
        return Result(self.injected, self.probes.hit, self._trace.hexdigest())

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
        if self.scheduler.requests and self._strikes("abort"):
            self._abort(list(self.scheduler.requests))
        if self.scheduler.loading and self._strikes("abort_loading"):
            self._abort(list(self.scheduler._loading))
        if self._strikes("reset"):
            self._reset()

    def _wait(self) -> None:
        """Nothing can happen now: then something is on its way, or something is wrong."""
        times = [m.not_before for m in self.moving]
        deadline = self.scheduler.next_deadline()
        assert times or self.plans, f"stuck: {self._state()}"
        assert (deadline is None) == (not self.scheduler.loading)
        self.now = max(self.now, min([*times, *([] if deadline is None else [deadline])]))
        self._idle = False

    def _strikes(self, fault: str) -> bool:
        probability: float = getattr(self.faults, fault)
        struck = probability > 0 and self.rng.random() < probability
        self.injected[fault] += struck
        return struck

    # --- events ----------------------------------------------------------------------------

    def _arrive(self) -> None:
        self.to_come -= 1
        request_id = f"r{self.world.requests - self.to_come}"
        prompt, params, options = self.traffic.request()
        try:
            self.scheduler.add(request_id, prompt, params, **options)
        except InputError as refusal:
            self._say(f"{request_id} refused: {refusal}")
            self.probes.count("refused: can never fit")
            return
        request = self.scheduler.requests[request_id]
        self.clients[request_id] = Client(prompt, params, request)
        self._say(f"{request_id} arrives, {len(prompt)} tokens, {params.max_tokens} to come")
        self._idle = False

    def _schedule(self) -> None:
        self.probes.before()
        late = [r for r in self.scheduler._loading.values() if r.load_deadline <= self.now]
        self.injected["late_load"] += len(late)
        plan = self.scheduler.schedule(self.now)
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
        faulty = self.faulty
        if self._strikes("bad_block"):
            faulty.spoil([faulty.any_block()])
        raises = self._strikes("step_raises")
        outcome = self.executor.run(plan)
        bad = outcome.invalid_blocks | faulty.noticed(plan)
        if self._strikes("spurious"):
            bad |= {faulty.any_block()}
        outcome = StepOutcome(outcome.tokens, invalid_blocks=bad)
        if raises:
            outcome = StepOutcome(error=RuntimeError("injected"))
            faulty.spoil_written(plan)
        self.ran.append((plan, outcome))
        self._say(f"step {plan.step} ran: raised {raises}, invalid {sorted(bad)}")

    def _apply(self) -> None:
        self._touched = True
        plan, outcome = self.ran.popleft()
        self.probes.before(outcome)
        outputs = self.scheduler.apply(plan, outcome)
        self._say(f"apply {plan.step}")
        self._hear(outputs)
        self._collect("apply")
        self.probes.after("apply")

    def _transfer(self, moving: Moving) -> None:
        """Its bytes move; it reports at once, or later."""
        self._touched = True
        if moving.result is None:
            moving.result = self.faulty.move(moving.transfer)
            if self.rng.random() < 0.5:
                return
        self.moving.remove(moving)
        self._say(f"transfer {moving.transfer.id} returns: {moving.result.error or 'ok'}")
        self.probes.before(transfer=moving.result)
        self.scheduler.transferred([moving.result])
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
        for transfer in self.scheduler.take_transfers():
            slow = self._strikes("slow_transfer")
            wait = self.rng.uniform(3, 60) if slow else 0.0
            self.moving.append(Moving(transfer, self.now + wait))
            self._say(f"  {event} starts {transfer}")
        self._idle = False

    def _hear(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            client = self.clients[output.request_id]
            assert client.end is None, f"{output.request_id} was told something after its end"
            if output.token is not None:
                client.tokens.append(output.token)
            if output.finish is not None:
                client.end = output
                self.traffic.ended(client.prompt + client.tokens)
                self._say(f"{output.request_id} ends: {output.finish.value} {output.message}")

    # --- checks ----------------------------------------------------------------------------

    def _check(self) -> None:
        scheduler, plans = self.scheduler, self.plans
        transfers = [m.transfer for m in self.moving] + [t for p in plans for t in p.loads]
        invariants.check_requests(scheduler, plans)
        invariants.check_blocks(scheduler, plans, transfers)
        invariants.check_host(self.manager, transfers)
        self._check_totals()
        if self._touched:  # bytes have moved, or names may have been given
            self._touched = False
            self.chains.learn(c.request for c in self.clients.values())
            self.chains.check_device(scheduler, self.faulty.bad_blocks)
            self.chains.check_host(self.manager, self.faulty.arena, self.faulty.bad_slots)

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
        invariants.check_drained(self.scheduler, self.manager)
        for request_id, client in self.clients.items():
            self._check_client(request_id, client)
        counters, below, injected = self.scheduler.counters, self.manager.counters, self.injected
        assert counters.failed_steps == injected["step_raises"]
        assert below.store_failed == injected["store_fails"]
        assert (
            counters.finished[FinishReason.ABORT] <= injected["abort"] + injected["abort_loading"]
        )
        lost = injected.total() - sum(
            injected[harmless] for harmless in ("abort", "abort_loading", "reset", "slow_transfer")
        )
        if not lost:
            assert not counters.recomputed_tokens[Cause.FAILED], "recomputed without a fault"
            assert not counters.finished[FinishReason.ERROR], "an error without a fault"
            assert not below.load_failed, "a failed load without a fault"

    def _check_client(self, request_id: str, client: Client) -> None:
        end, tokens = client.end, client.tokens
        assert end is not None, f"{request_id} has no end"
        assert end.report is not None
        limit = client.request.length_max - len(client.prompt)
        if client.params.max_tokens is not None:
            limit = min(client.params.max_tokens, self.world.length_max - len(client.prompt))
        truth = oracle(self.executor.model, client.prompt, client.params, limit)
        reason, count = _natural_end(truth, client.params)
        assert tokens == truth[: len(tokens)], f"{request_id}: {tokens}, the oracle says {truth}"
        if end.finish not in (FinishReason.ABORT, FinishReason.ERROR):
            assert (end.finish, len(tokens)) == (reason, count), f"{request_id} ends by {end}"
        assert len(tokens) <= count
        assert end.report.prompt_tokens == len(client.prompt)
        assert end.report.output_tokens == len(tokens)
        sources = sum(end.report.sources.values())
        assert sources == len(client.prompt) if tokens else sources <= len(client.prompt)

    # --- telling ---------------------------------------------------------------------------

    def _state(self) -> str:
        requests = list(self.scheduler.requests.values())
        return (
            f"{self.scheduler!r} {requests} moving {self.moving}, seed's injected {self.injected}"
        )

    def _say(self, line: str) -> None:
        self._trace.update(line.encode())
        self._tell(f"{self.now:8.2f} {line}")


def _natural_end(truth: Sequence[int], params: SamplingParams) -> tuple[FinishReason, int]:
    """How and after how many tokens a request ends that nobody disturbs, by the definitions."""
    for count in range(1, len(truth) + 1):
        if truth[count - 1] in params.stop_token_ids:
            return FinishReason.STOP, count
        if count == len(truth):
            return FinishReason.LENGTH, count
        rule = params.repetition
        if rule is not None:
            for size in range(1, rule.max_pattern_size + 1):
                pattern = list(truth[max(0, count - size) : count])
                said = size * rule.min_count
                if said <= count and list(truth[count - said : count]) == pattern * rule.min_count:
                    return FinishReason.REPETITION, count
    raise AssertionError("unreachable")


def _config(world: World, manager: OffloadManager) -> SchedulerConfig:
    def config(num_blocks: int) -> SchedulerConfig:
        return SchedulerConfig(
            num_blocks=num_blocks,
            block_size=world.block_size,
            groups=world.groups,
            length_max=world.length_max,
            batch_max=world.batch_max,
            step_tokens_max=world.step_tokens_max,
            overlap=world.overlap,
            sync_load_blocks_max=world.sync_load_blocks_max,
            load_deadline_s=world.load_deadline_s,
            max_step_retries=world.max_step_retries,
            fail_on_lost_kv=world.fail_on_lost_kv,
        )

    longest = Scheduler(config(1), manager).kv.blocks_needed_max(world.length_max - 1)
    return config(max(1, round(longest * (1 + world.spare))))


# --- the command -----------------------------------------------------------------------------


def simulate(seed: int, verbose: bool = False) -> tuple[str, Result | None]:
    """Run a seed. Returns how it failed ("" where it did not), and what it brought."""
    simulation = Simulation(seed, tell=print if verbose else lambda line: None)
    try:
        return "", simulation.run()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rsplit('/', 1)[-1]}:{place.lineno}"
        if verbose:
            traceback.print_exc()
        return f"{where} {type(error).__name__}: {error}"[:600], None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument(
        "--seeds", type=int, nargs=2, metavar=("A", "B"), help="run seeds A to B - 1"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="tell every event of --seed")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        failure, result = simulate(arguments.seed, arguments.verbose)
        print(
            failure or f"seed {arguments.seed} is fine: {dict(result.injected if result else {})}"
        )
        return bool(failure)
    first, last = arguments.seeds or (0, 200)
    injected: Counter[str] = Counter()
    probes: Counter[str] = Counter()
    failures = 0
    with ProcessPoolExecutor(2) as pool:
        seeds = range(first, last)
        for seed, (failure, result) in zip(
            seeds, pool.map(simulate, seeds, chunksize=8), strict=True
        ):
            if result is None:
                failures += 1
                print(f"seed {seed} failed: {failure}")
                print(f"  replay: python -m ebbtide.testing.simulator --seed {seed} -v")
            else:
                injected += result.injected
                probes += result.probes
    if arguments.verbose:
        for name, count in sorted({**injected, **probes}.items()):
            print(f"  {name}: {count}")
    print(
        f"sim: {last - first} seeds, {failures} failures, {injected.total()} faults injected, "
        f"{len(probes)} probes hit"
    )
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
