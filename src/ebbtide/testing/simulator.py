"""The deterministic simulator: scheduler, offload and witness under faults, all decided by one seed.

    python -m ebbtide.testing.simulator --seed 7 -v        one seed, told step by step
    python -m ebbtide.testing.simulator --seeds 0 2000     many, on two processes

First requests arrive while faults are injected; then the faults stop and everything must converge.
After every event the rules of ``invariants`` are checked; at the end every finished request must
equal the oracle, and nothing may be left. A block's *bad* mark stands for a checksum: it travels
with the block's content, and the first step that reads a bad block reports it.

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

import numpy as np

from ebbtide.core.errors import InputError
from ebbtide.core.ledger import Cause
from ebbtide.core.output import Output
from ebbtide.core.params import SamplingParams
from ebbtide.core.plan import Direction, Row, StepOutcome, StepPlan, Transfer, TransferResult
from ebbtide.core.request import FinishReason, Request
from ebbtide.core.scheduler import Scheduler, SchedulerConfig
from ebbtide.offload.arena import Arena
from ebbtide.offload.host import HostSlots
from ebbtide.offload.manager import OffloadManager
from ebbtide.offload.mover import move
from ebbtide.offload.policies import LRU, EvictionPolicy
from ebbtide.testing import invariants
from ebbtide.testing.probes import Probes
from ebbtide.testing.witness import WitnessExecutor, WitnessMemory, WitnessModel, oracle
from ebbtide.testing.world import Faults, Traffic, World

EVENTS_MAX = 30_000
GARBAGE = np.uint64(0xBAD0BAD0BAD0BAD0)


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
        self.memory = WitnessMemory(model, self.scheduler.config.num_blocks, world.block_size)
        self.arena = Arena(world.host_slots, world.blocks_per_chunk, self.memory.block_bytes)
        self.executor = WitnessExecutor(model, self.memory, self._sync_load)
        self.chains = invariants.Chains(
            model, self.memory, world.host_slots, world.blocks_per_chunk
        )
        self.traffic = Traffic(world, rng)
        self.clients: dict[str, Client] = {}
        self.to_come = world.requests
        self.submitted: deque[StepPlan] = deque()  # handed out, not run
        self.ran: deque[tuple[StepPlan, StepOutcome]] = deque()  # run, not applied
        self.moving: list[Moving] = []
        self.bad_blocks: set[int] = set()
        self.bad_slots: set[tuple[int, int]] = set()  # (slot, block of the chunk)
        self.probes = Probes(self.scheduler, self.manager)
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
        rng, faults = self.rng, self.faults
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
        if self.scheduler.requests and self._strikes("abort", faults.abort):
            self._abort(list(self.scheduler.requests))
        if self.scheduler.loading and self._strikes("abort_loading", faults.abort_loading):
            self._abort(list(self.scheduler._loading))
        if self._strikes("reset", faults.reset):
            self._reset()

    def _wait(self) -> None:
        """Nothing can happen now: then something is on its way, or something is wrong."""
        times = [m.not_before for m in self.moving]
        deadline = self.scheduler.next_deadline()
        assert times or self.plans, f"stuck: {self._state()}"
        assert (deadline is None) == (not self.scheduler.loading)
        self.now = max(self.now, min([*times, *([] if deadline is None else [deadline])]))
        self._idle = False

    def _strikes(self, fault: str, probability: float) -> bool:
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
        plan = self.submitted.popleft()
        faults, rng = self.faults, self.rng
        if self._strikes("bad_block", faults.bad_block):
            self._spoil([rng.randrange(self.memory.words.shape[0])])
        spurious = frozenset[int]()
        if self._strikes("spurious", faults.spurious):
            spurious = frozenset((rng.randrange(self.memory.words.shape[0]),))
        raises = self._strikes("step_raises", faults.step_raises)
        outcome = self.executor.run(plan)
        for row in plan.rows:
            self.bad_blocks.difference_update(self._begun(row))
        read = {block for row in plan.rows for block in self._read(row)}
        bad = outcome.invalid_blocks | spurious | (self.bad_blocks & read)
        outcome = StepOutcome(outcome.tokens, invalid_blocks=bad)
        if raises:
            outcome = StepOutcome(error=RuntimeError("injected"))
            for row in plan.rows:
                for table in row.tables:
                    for position in range(row.start, row.end):
                        index, slot = divmod(position, self.world.block_size)
                        self.memory.words[table.blocks[index - table.first], slot] = GARBAGE
        self.ran.append((plan, outcome))
        self._say(f"step {plan.step} ran: raised {raises}, invalid {sorted(bad)}")

    def _read(self, row: Row) -> list[int]:
        """Blocks that hold earlier positions which the row can see."""
        size = self.world.block_size
        blocks: list[int] = []
        for group, (first, table) in zip(self.world.groups, row.tables, strict=True):
            begin = group.first_visible(row.start) // size
            blocks += table[begin - first : -(-row.start // size) - first]
        return blocks

    def _begun(self, row: Row) -> list[int]:
        """Blocks that the row fills from their first position on: what was there does not matter."""
        size = self.world.block_size
        begin, end = -(-row.start // size), -(-row.end // size)
        return [
            block for first, table in row.tables for block in table[begin - first : end - first]
        ]

    def _apply(self) -> None:
        plan, outcome = self.ran.popleft()
        self.probes.before(outcome)
        outputs = self.scheduler.apply(plan, outcome)
        self._say(f"apply {plan.step}")
        self._hear(outputs)
        self._collect("apply")
        self.probes.after("apply")

    def _transfer(self, moving: Moving) -> None:
        """Its bytes move; it reports at once, or later."""
        if moving.result is None:
            moving.result = self._move(moving.transfer)
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
        assert not self.scheduler.kv.pool._name and not self.manager.slots._at

    def _collect(self, event: str) -> None:
        """What every call of the scheduler may leave behind: outputs, and transfers to start."""
        self._hear(self.scheduler.take_outputs())
        for transfer in self.scheduler.take_transfers():
            slow = self._strikes("slow_transfer", self.faults.slow_transfer)
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

    # --- bytes -----------------------------------------------------------------------------

    def _sync_load(self, transfer: Transfer) -> TransferResult:
        return self._move(transfer)

    def _move(self, transfer: Transfer) -> TransferResult:
        """Move the bytes, or fail, or do harm."""
        is_load = transfer.direction is Direction.LOAD
        probability = self.faults.load_fails if is_load else self.faults.store_fails
        places = [(transfer.slot, transfer.offset + i) for i in range(len(transfer.blocks))]
        if self._strikes("load_fails" if is_load else "store_fails", probability):
            if is_load:
                self._spoil(transfer.blocks)
                self.bad_blocks.difference_update(transfer.blocks)  # it is known already
            else:
                self.arena.slot(transfer.slot, 0, len(transfer.blocks))[:] = 0xEE
            return TransferResult(transfer, "injected")
        result = move(transfer, self.arena, self.memory)
        for block, place in zip(transfer.blocks, places, strict=True):
            if is_load:
                _mark(self.bad_blocks, block, place in self.bad_slots)
            else:
                _mark(self.bad_slots, place, block in self.bad_blocks)
        if is_load and self._strikes("corrupt_load", self.faults.corrupt_load):
            self._spoil(transfer.blocks[: self.rng.randrange(len(transfer.blocks)) + 1])
        return result

    def _spoil(self, blocks: Sequence[int]) -> None:
        self.memory.words[list(blocks)] = GARBAGE
        self.bad_blocks.update(blocks)

    # --- checks ----------------------------------------------------------------------------

    def _check(self) -> None:
        scheduler, plans = self.scheduler, self.plans
        transfers = [m.transfer for m in self.moving] + [t for p in plans for t in p.loads]
        invariants.check_requests(scheduler, plans)
        invariants.check_blocks(scheduler, plans, transfers)
        invariants.check_host(self.manager, transfers)
        self.chains.learn(c.request for c in self.clients.values())
        self.chains.check_device(scheduler, self.bad_blocks)
        self.chains.check_host(self.manager, self.arena, self.bad_slots)
        self._check_totals()

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
        assert end is not None and end.report is not None, f"{request_id} has no end"
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


def _mark(bad: set, thing: object, is_bad: bool) -> None:  # type: ignore[type-arg]
    (bad.add if is_bad else bad.discard)(thing)


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
                pattern = list(truth[count - size : count]) if size <= count else None
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
