"""A small engine without threads: scheduler, offload and witness, driven by hand.

    h = Harness(block_size=4, overlap=2)
    h.add("a", tokens(9), max_tokens=4)
    h.step()                     # schedule, run and apply one step
    h.run()                      # until everything has ended; all transfers succeed
    h.check_drained()            # its tokens equal the oracle's, and nothing is left of it

After every call the invariants are checked. Transfers do nothing until ``move`` is called, or
``run``; plans do nothing until ``apply``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ebbtide.core.groups import KVGroup
from ebbtide.core.output import Output
from ebbtide.core.plan import Direction, StepOutcome, StepPlan, Transfer, TransferResult
from ebbtide.core.request import FinishReason, Request, State
from ebbtide.core.scheduler import Scheduler, SchedulerConfig
from ebbtide.keys import root_digest
from ebbtide.offload.arena import Arena
from ebbtide.offload.host import HostSlots
from ebbtide.offload.manager import OffloadManager
from ebbtide.offload.mover import move
from ebbtide.params import RepetitionStop, SamplingParams
from ebbtide.testing import invariants
from ebbtide.testing.witness import WitnessExecutor, WitnessMemory, WitnessModel, oracle

FULL = (KVGroup(),)
MIXED = (KVGroup(), KVGroup(window=6))
both = pytest.mark.parametrize("overlap", [1, 2])
one_and_two_groups = pytest.mark.parametrize("groups", [FULL, MIXED], ids=["full", "full+window"])


def tokens(count: int, start: int = 0) -> list[int]:
    return [(start * 7 + i * 3) % 50 for i in range(count)]


class Harness:
    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        blocks_per_chunk: int = 1,
        host_slots: int = 64,
        groups: Sequence[KVGroup] = (KVGroup(),),
        vocabulary: int = 50,
        stores_max: int = 64,
        **config: Any,
    ) -> None:
        self.groups = tuple(groups)
        self.model = WitnessModel(self.groups, vocabulary=vocabulary)
        slots = HostSlots(host_slots)
        self.manager = OffloadManager(slots, blocks_per_chunk, len(self.groups), stores_max)
        config = {"length_max": 100, "step_tokens_max": 64, "sync_load_blocks_max": 0, **config}
        self.config = SchedulerConfig(
            num_blocks=num_blocks, block_size=block_size, groups=self.groups, **config
        )
        self.scheduler = Scheduler(self.config, self.manager)
        self.memory = WitnessMemory(self.model, num_blocks, block_size)
        self.arena = Arena(host_slots, blocks_per_chunk, self.memory.block_bytes)
        self.executor = WitnessExecutor(self.model, self.memory, self._sync_load)
        self.lose_sync_load: Callable[[int], bool] = lambda place: False  # place within its step
        self.now = 0.0
        self.plans: deque[StepPlan] = deque()  # in flight
        self.moving: dict[int, Transfer] = {}
        self.stored: list[Transfer] = []  # every store ever started
        self.heard: list[Output] = []
        self.requests: dict[str, Request] = {}
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.held: set[str] = set()  # requests that are not ready
        self.steps: Counter[str] = Counter()  # that returned, per request
        self._sync_loads = 0

    # --- drive -----------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: list[int],
        *,
        max_tokens: int | None = 4,
        stop: Sequence[int] = (),
        repetition: RepetitionStop | None = None,
        **options: Any,
    ) -> Request:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            seed=1,
            stop_token_ids=frozenset(stop),
            repetition=repetition,
        )
        self.scheduler.add(name, prompt, params, **options)
        if options.get("held"):
            self.held.add(name)
        self.asked[name] = (prompt, params)
        self.requests[name] = self.scheduler.requests[name]
        self._after()
        return self.requests[name]

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.plans.append(plan)
        self._after()
        return plan

    def apply(self, *, error: str = "", invalid: Sequence[int] = ()) -> None:
        """Run the oldest plan in flight, and apply what it brought; ``invalid`` blocks turn to garbage."""
        self.memory.words[list(invalid)] = np.uint64(99)
        self._sync_loads = 0
        plan = self.plans.popleft()
        self.steps.update(row.request_id for row in plan.rows)
        outcome = self.executor.run(plan)
        bad = outcome.invalid_blocks | frozenset(invalid)
        outcome = StepOutcome(outcome.tokens, invalid_blocks=bad)
        if error:
            outcome = StepOutcome(error=RuntimeError(error))
        self.heard += self.scheduler.apply(plan, outcome)
        self._after()

    def step(self, *, error: str = "", invalid: Sequence[int] = ()) -> None:
        """Fill the pipeline with plans as the engine does, then apply the oldest."""
        self.fill()
        assert self.plans, f"nothing to run: {self.scheduler!r}"
        self.apply(error=error, invalid=invalid)

    def fill(self) -> None:
        """As many plans in flight as there may be."""
        while len(self.plans) < self.config.overlap and self.schedule() is not None:
            pass

    def drain(self) -> None:
        """All plans in flight return."""
        while self.plans:
            self.apply()

    def move(self, *transfers: Transfer, error: str = "") -> None:
        """These transfers (or all that are under way) return."""
        for transfer in transfers or list(self.moving.values()):
            if error:
                if transfer.direction is Direction.LOAD:
                    self.memory.words[list(transfer.blocks)] = np.uint64(98)
                result = TransferResult(transfer, error)
            else:
                result = move(transfer, self.arena, self.memory)
            del self.moving[transfer.id]
            self.scheduler.transferred([result])
            self._after()

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run steps, and let transfers succeed at once, until everything has ended."""
        for _ in range(1_000):
            if until():
                return
            self.move_all()
            if not (self.scheduler.requests or self.plans):
                return
            self.fill()
            if self.plans:
                self.apply()
            else:
                assert self.moving, f"stuck: {self.scheduler!r}"
        raise AssertionError(f"no end: {self.scheduler!r}")

    def move_all(self) -> None:
        while self.moving:
            self.move(next(iter(self.moving.values())))

    def end(self, name: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self.scheduler.end(name, reason)
        self._after()

    def ready(self, name: str) -> None:
        self.held.discard(name)
        self.scheduler.ready(name)
        self._after()

    def preempt(self, name: str) -> None:
        """As if the pool had run dry just now."""
        self.scheduler._preempt(self.requests[name])
        self._after()

    def reset(self) -> None:
        self.scheduler.reset()
        self._after()

    def warm(self, name: str, prompt: list[int], *, device: bool = True, **options: Any) -> None:
        """Serve a prompt, so that its KV is known on the device and below; or below alone."""
        self.add(name, prompt, max_tokens=1, **options)
        self.run()
        if not device:
            self.forget_device()

    def forget_device(self) -> None:
        """What is cached on the device is not found any more; what is below is."""
        self.scheduler.kv.pool.unpublish_all()

    # --- look ------------------------------------------------------------------------------

    @property
    def loads(self) -> list[Transfer]:
        return [t for t in self.moving.values() if t.direction is Direction.LOAD]

    @property
    def stores(self) -> list[Transfer]:
        return [t for t in self.moving.values() if t.direction is Direction.STORE]

    def output(self, name: str) -> list[int]:
        return [o.token for o in self.heard if o.request_id == name and o.token is not None]

    def finish(self, name: str) -> FinishReason | None:
        ends = [o.finish for o in self.heard if o.request_id == name and o.finish is not None]
        assert len(ends) <= 1, f"{name} ended {len(ends)} times"
        return ends[0] if ends else None

    def message(self, name: str) -> str:
        return next(o.message for o in self.heard if o.request_id == name and o.finish)

    def report(self, name: str) -> dict[str, int]:
        """Token counts of an ended request: by source, and recomputed by cause."""
        report = next(o.report for o in self.heard if o.request_id == name and o.report)
        counts = dict(report.sources)
        return counts | {cause.value: count for cause, count in report.recomputed.items()}

    def sources(self, name: str) -> tuple[int, int, int]:
        """Where an ended request's prompt came from, in tokens: (device, host, computed)."""
        report = self.report(name)
        return report["device"], report["host"], report["computed"]

    def blocks(self, name: str, group: int = 0) -> list[int]:
        """The device blocks that a request holds."""
        return list(self.requests[name].tables[group].blocks)

    def state(self, name: str) -> State:
        return self.requests[name].state

    def truth(self, name: str, count: int = 40) -> list[int]:
        prompt, params = self.asked[name]
        return oracle(self.model, prompt, params, count)

    def foretell(self, prompt: list[int], count: int) -> list[int]:
        """What the model says after ``prompt``."""
        return oracle(self.model, prompt, SamplingParams(seed=1), count)

    def check(self, *names: str) -> None:
        """The outputs so far are what the oracle says."""
        for name in names or self.asked:
            output = self.output(name)
            assert output == self.truth(name, len(output)), f"{name} has wrong tokens"

    def check_drained(self) -> None:
        """All have ended as they should: tokens, lengths, accounts, bytes, and nothing is left."""
        self.check()
        for name, (prompt, params) in self.asked.items():
            report, length = self.report(name), len(self.output(name))
            assert min(report.values()) >= 0
            known = sum(self.sources(name))
            assert known == len(prompt) if length else known <= len(prompt), f"{name}: {report}"
            if self.finish(name) is FinishReason.LENGTH and params.max_tokens is not None:
                assert length == min(params.max_tokens, self.config.length_max - len(prompt))
        invariants.check_drained(self.scheduler, self.manager)
        self._check_content()

    def _check_content(self) -> None:
        """Whatever could be found now, on the device or below, is what its name stands for."""
        per_chunk = self.manager.blocks_per_chunk
        chains = invariants.Chains(self.model, self.memory, self.manager.slots.num_slots, per_chunk)
        chains.learn(self.requests.values())
        chains.check_device(self.scheduler, ())
        chains.check_host(self.manager, self.arena, ())

    def chunks_below(self, sequence: Sequence[int], group: int = 0, salt: str = "") -> list[int]:
        """Which chunks of this token sequence the host tier has."""
        chunk = self.config.block_size * self.manager.blocks_per_chunk
        root = root_digest(b"", {"salt": salt})
        probe = Request("", list(sequence), SamplingParams(), 10_000, root, 0, 0, False)
        size = self.config.block_size
        chain = probe.digest_upto(len(sequence) // size, size)
        per_chunk = self.manager.blocks_per_chunk
        return [
            number
            for number in range(len(sequence) // chunk)
            if self.manager.has(group, chain, number * per_chunk)
        ]

    def all_chunks_below(self, sequence: Sequence[int]) -> list[list[int]]:
        """``chunks_below`` of every group."""
        return [self.chunks_below(sequence, group) for group in range(len(self.groups))]

    def _sync_load(self, transfer: Transfer) -> TransferResult:
        self._sync_loads += 1
        if self.lose_sync_load(self._sync_loads - 1):
            self.memory.words[list(transfer.blocks)] = np.uint64(97)
            return TransferResult(transfer, "lost")
        return move(transfer, self.arena, self.memory)

    def _after(self) -> None:
        self.heard += self.scheduler.take_outputs()
        for transfer in self.scheduler.take_transfers():
            self.moving[transfer.id] = transfer
            if transfer.direction is Direction.STORE:
                self.stored.append(transfer)
        plans = list(self.plans)
        transfers = [*self.moving.values(), *(load for plan in plans for load in plan.loads)]
        invariants.check_requests(self.scheduler, plans, self.held)
        invariants.check_blocks(self.scheduler, plans, transfers)
        invariants.check_host(self.manager, transfers)
