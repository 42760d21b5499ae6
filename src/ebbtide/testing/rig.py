"""What both modes of the simulator are made of: an engine's parts with the witness as its model.

A ``Rig`` builds scheduler, offload, witness and faulty memory for a world; ``Client`` is a request
as its owner sees it, and knows what it must have heard in the end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ebbtide.core.ledger import Cause
from ebbtide.core.output import Output
from ebbtide.core.plan import StepOutcome, StepPlan
from ebbtide.core.request import FinishReason
from ebbtide.core.scheduler import SUSPECT, Scheduler, SchedulerConfig
from ebbtide.offload.arena import Arena, ChunkMemory, slot_bytes_for
from ebbtide.offload.host import SlotState
from ebbtide.offload.manager import OffloadManager
from ebbtide.offload.policies import LRU, EvictionPolicy
from ebbtide.params import SamplingParams
from ebbtide.testing import invariants
from ebbtide.testing.faulty import FaultyMemory
from ebbtide.testing.lower_tier import LowerTier, Place
from ebbtide.testing.rules import WatchedManager
from ebbtide.testing.tier_rules import WatchedBelow, WatchedSlots
from ebbtide.testing.witness import WitnessExecutor, WitnessMemory, WitnessModel, oracle
from ebbtide.testing.world import World

# nothing is lost by these
HARMLESS = (
    "abort",
    "abort_loading",
    "abort_draining",
    "evict",
    "reset",
    "reset_awaited",
    "slow_transfer",
)


class Parts(NamedTuple):
    """What a user of the simulator may replace by something of their own.

    policy: makes an eviction policy. memory: makes the memory of the host tier, from the number of
    slots, the blocks per chunk and the bytes per block.
    """

    policy: Callable[[], EvictionPolicy] = LRU
    memory: Callable[[int, int, int], ChunkMemory] = Arena


DEFAULT_PARTS = Parts()
TIER_NAMES = ("near", "far")


class Rig:
    """``places``: what the tiers below have, where they outlived another rig."""

    def __init__(
        self,
        world: World,
        rng: random.Random,
        parts: Parts,
        places: Sequence[Place] | None = None,
    ) -> None:
        self.world = world
        self.rng = rng
        self.faults = world.faults
        self.injected: Counter[str] = Counter()
        self.poisoned: set[str] = set()  # every step that samples for one of these fails
        self.model = model = WitnessModel(world.groups, vocabulary=world.vocabulary)
        per_chunk = world.blocks_per_chunk
        self.places = _places(world, model) if places is None else places
        self.tiers = [
            LowerTier(name, tier, per_chunk, place, rng, self.strikes, WatchedBelow)
            for name, tier, place in zip(TIER_NAMES, world.tiers, self.places, strict=False)
        ]
        self.slots = WatchedSlots(world.host_slots, parts.policy())
        self.manager = WatchedManager(
            self.slots,
            per_chunk,
            len(world.groups),
            world.stores_max,
            below=[tier.below for tier in self.tiers],
            store_after=world.store_after,
        )
        self.manager.compute_seconds = world.compute_s
        self.scheduler = Scheduler(_config(world, self.manager), self.manager)
        num_blocks = self.scheduler.config.num_blocks
        memory = WitnessMemory(model, num_blocks, world.block_size)
        self.arena = parts.memory(world.host_slots, per_chunk, memory.block_bytes)
        self.faulty = FaultyMemory(
            world.groups, memory, self.arena, rng, self.strikes, self.tiers, self._note
        )
        self.executor = WitnessExecutor(model, memory, self.faulty.move)
        self._broken = self.faulty.any_block()

    def strikes(self, fault: str) -> bool:
        """Whether the named fault happens now."""
        probability: float = getattr(self.faults, fault)
        struck = probability > 0 and self.rng.random() < probability
        self.injected[fault] += struck
        return struck

    def _note(self, what: str) -> None:
        self.injected[what] += 1

    def run_step(self, plan: StepPlan) -> StepOutcome:
        """Run a plan on the witness, or do it harm."""
        faulty = self.faulty
        if self.strikes("bad_block"):
            faulty.spoil([faulty.any_block()])
        if self.strikes("broken_block"):
            faulty.spoil([self._broken])
        ready = [n for n, s in enumerate(self.slots._slots) if s.state is SlotState.READY]
        if ready and self.strikes("bad_slot"):
            count = self.rng.randrange(self.world.blocks_per_chunk) + 1
            faulty.spoil_slot(self.rng.choice(ready), count)
        raises = self.strikes("step_raises")
        sampled = {row.request_id for row in plan.rows if row.sampling is not None}
        if not raises and self.poisoned & sampled:
            self.injected["poisoned_step"] += 1
            raises = True
        outcome = self.executor.run(plan)
        bad = outcome.invalid_blocks | faulty.noticed(plan)
        bad |= self._reported()
        if raises:
            faulty.spoil_written(plan)
            return StepOutcome(error=RuntimeError("injected"))
        return StepOutcome(outcome.tokens, invalid_blocks=bad)

    def _reported(self) -> set[int]:
        """Sound blocks that the step is to report as bad: more often while a request drains or loads,
        and then one of its blocks."""
        if not self.faults.spurious:
            return set()
        draining = self.scheduler._draining.values()
        blocks = [block for r in draining for table in r.tables for block in table.blocks]
        for r in self.scheduler._loading.values():  # what lies before what it loads, or all
            end = self.rng.choice((r.committed, r.capacity)) // self.world.block_size
            blocks += [b for first, held in r.tables for b in held[: max(0, end - first)]]
        if blocks and self.rng.random() < 0.3:
            self.injected["spurious"] += 1
            return {self.rng.choice(blocks)}
        return {self.faulty.any_block()} if self.strikes("spurious") else set()

    def check_end(self, clients: Sequence[Client]) -> None:
        """Everything has ended: nothing is left, and nothing has happened without a cause."""
        invariants.check_drained(self.scheduler, self.manager)
        for client in clients:
            client.check(self.model, self.world)
        counters, below, injected = self.scheduler.counters, self.manager.counters, self.injected
        assert counters.failed_steps == injected["step_raises"] + injected["poisoned_step"]
        assert below.store_failed == injected["store_fails"]
        errors = [c for c in clients if c.end and c.end.finish is FinishReason.ERROR]
        harm = injected.total() - sum(injected[fault] for fault in HARMLESS)
        if not harm:
            assert not counters.recomputed_tokens[Cause.FAILED], "recomputed without a fault"
            assert not below.load_failed, "a failed load without a fault"
            failed = [tier.counters.write_failed for tier in self.manager.below]
            assert not any(failed), "a failed write without a fault"
            assert not errors, "an error without a fault"
        harm -= injected["poison"] + injected["poisoned_step"]
        if not harm and self.world.max_step_retries >= SUSPECT:
            ends = [c.end.message for c in errors if c.end and not c.poisoned]
            assert not ends, f"errors of requests that did no harm: {ends}"


@dataclass(slots=True)
class Client:
    """A request as its owner sees it."""

    name: str
    prompt: list[int]
    params: SamplingParams
    length_max: int
    poisoned: bool
    stopped: bool = False  # by its owner, at a moment of its own
    tokens: list[int] = field(default_factory=list)
    end: Output | None = None

    def hear(self, output: Output) -> None:
        assert self.end is None, f"{self.name} was told something after its end"
        if output.token is not None:
            self.tokens.append(output.token)
        if output.finish is not None:
            self.end = output

    def check_so_far(self, model: WitnessModel) -> None:
        """What it has heard is right, as far as it goes."""
        truth = oracle(model, self.prompt, self.params, len(self.tokens))
        assert self.tokens == truth, f"{self.name}: {self.tokens}, the oracle says {truth}"

    def check(self, model: WitnessModel, world: World) -> None:
        """It has heard what the oracle says, up to the end that it had to come to."""
        end, tokens, name = self.end, self.tokens, self.name
        assert end is not None, f"{name} has no end"
        assert end.report is not None
        limit = self.length_max - len(self.prompt)
        if self.params.max_tokens is not None:
            limit = min(self.params.max_tokens, world.length_max - len(self.prompt))
        truth = oracle(model, self.prompt, self.params, limit)
        reason, count = _natural_end(truth, self.params)
        assert tokens == truth[: len(tokens)], f"{name}: {tokens}, the oracle says {truth}"
        if not self.stopped and end.finish not in (FinishReason.ABORT, FinishReason.ERROR):
            assert (end.finish, len(tokens)) == (reason, count), f"{name} ends by {end}"
        assert len(tokens) <= count
        assert end.report.prompt_tokens == len(self.prompt)
        assert end.report.output_tokens == len(tokens)
        sources = sum(end.report.sources.values())
        assert sources == len(self.prompt) if tokens else sources <= len(self.prompt)


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


def _places(world: World, model: WitnessModel) -> list[Place]:
    chunk = slot_bytes_for(world.block_size * model.slices * 8, world.blocks_per_chunk)
    return [
        Place(None if tier.chunks_max is None else tier.chunks_max * chunk) for tier in world.tiers
    ]


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
            waiting_max=world.waiting_max,
        )

    longest = Scheduler(config(1), manager).kv.blocks_needed_max(world.length_max - 1)
    return config(max(1, round(longest * (1 + world.spare))))
