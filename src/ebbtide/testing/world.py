"""What a simulator seed chooses: sizes, groups, faults and requests.

Swarm style: every fault is fully off in about half of the worlds, so that no kind of fault hides
what another one would have shown.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

from ebbtide.core.groups import KVGroup
from ebbtide.offload.below import WritePolicy
from ebbtide.params import RepetitionStop, SamplingParams

NEVER_S = 1e9
GROUPS = (
    (KVGroup(),),
    (KVGroup(),),
    (KVGroup(), KVGroup(3)),
    (KVGroup(), KVGroup(17)),
    (KVGroup(), KVGroup(10), KVGroup(24)),
    (KVGroup(9),),
    (KVGroup(1), KVGroup()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities. Loads, stores: per transfer; steps and blocks: per step; poison: per request;
    tiers: per key of a call; the others per event.

    corrupt_load: it reports success, but the blocks are garbage, which the first step that reads
    them reports. bad_block, bad_slot: one turns to garbage; broken_block: always the same one.
    spurious: a sound block is reported as bad. poison: every step that samples for it fails.
    evict: other work takes all free blocks for a moment, so that KV has to come from below.
    abort_loading: of a request that loads, or is parked. reset_awaited: while somebody is parked, or
    a tier is read.
    tier_lost: it is done, but said to have failed. tier_corrupt: a read finds the chunk spoiled, or a
    write is, and is found out when it is read. tier_shared: another process removes
    chunks, or writes bad ones.
    """

    load_fails: float = 0.0
    corrupt_load: float = 0.0
    store_fails: float = 0.0
    slow_transfer: float = 0.0
    step_raises: float = 0.0
    bad_block: float = 0.0
    bad_slot: float = 0.0
    broken_block: float = 0.0
    spurious: float = 0.0
    poison: float = 0.0
    abort: float = 0.0
    abort_loading: float = 0.0
    abort_draining: float = 0.0
    evict: float = 0.0
    reset: float = 0.0
    reset_awaited: float = 0.0
    tier_fails: float = 0.0
    tier_lost: float = 0.0
    tier_corrupt: float = 0.0
    tier_full: float = 0.0
    tier_down: float = 0.0
    tier_shared: float = 0.0

    @staticmethod
    def draw(rng: random.Random, has_tiers: bool) -> Faults:
        strong = {
            "load_fails": (0.05, 0.6),
            "corrupt_load": (0.05, 0.6),
            "store_fails": (0.1, 0.5),
            "slow_transfer": (0.1, 0.5),
            "step_raises": (0.02, 0.1),
            "bad_block": (0.02, 0.1),
            "bad_slot": (0.02, 0.2),
            "broken_block": (0.1, 0.4),
            "spurious": (0.02, 0.05),
            "poison": (0.05, 0.2),
            "abort": (0.005, 0.04),
            "abort_loading": (0.05, 0.3),
            "abort_draining": (0.1, 0.5),
            "evict": (0.05, 0.4),
            "reset": (0.005, 0.03),
            "reset_awaited": (0.02, 0.1),
            "tier_fails": (0.05, 0.4),
            "tier_lost": (0.05, 0.4),
            "tier_corrupt": (0.05, 0.3),
            "tier_full": (0.1, 0.5),
            "tier_down": (0.01, 0.05),
            "tier_shared": (0.02, 0.1),
        }
        names = [f.name for f in fields(Faults)]
        if not has_tiers:
            names = [name for name in names if not name.startswith("tier_")]
        is_needed = has_tiers or rng.random() < 0.5  # so that what lies below is wanted
        evict = rng.uniform(0.03, 0.3) if is_needed else 0.0
        kind = rng.randrange(8)
        if kind == 0:
            return Faults(evict=evict)
        if kind <= 2:  # one kind of fault alone: its effects are plain to see
            name = rng.choice(names)
            return Faults(**{"evict": evict, name: strong[name][1]})
        drawn = {n: rng.choice((0.0, rng.uniform(*strong[n]))) for n in names}
        return Faults(**{**drawn, "evict": evict or drawn["evict"]})

    def lasting(self) -> Faults:
        """Those that do not stop when the world heals."""
        return Faults(poison=self.poison)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierWorld:
    """A tier below the host tier. immediate: asked for each chunk; else by lookups beside the steps.
    chunks_max: its quota. read_s: how long it takes to read a chunk, this or that."""

    immediate: bool
    policy: WritePolicy
    writes_max: int
    chunks_max: int | None
    threads: int
    read_s: tuple[float, float]

    @staticmethod
    def draw(rng: random.Random) -> TierWorld:
        policies = (WritePolicy.WRITE_THROUGH, WritePolicy.ON_EVICT)
        return TierWorld(
            immediate=rng.random() < 0.5,
            policy=WritePolicy.OFF if rng.random() < 0.1 else rng.choice(policies),
            writes_max=rng.choice((1, 8, 64, 64)),
            chunks_max=rng.choice((3, 40, None, None, None, None)),
            threads=rng.choice((1, 2)),
            read_s=rng.choice(((0.05, 0.05), (0.05, 1.0), (0.1, 4.0), (0.5, 8.0))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """``spare``: size of the pool beyond (or below) what the longest request needs. ``stops``: how
    often an owner ends its request at a token, as when a stop string is found. talkative: short prompts,
    long outputs, which outgrow the pool. compute_s: that a chunk is thought to take to be computed.
    crashes: half way, everything but the tiers below is lost, and built anew."""

    groups: tuple[KVGroup, ...]
    block_size: int
    blocks_per_chunk: int
    overlap: int
    step_tokens_max: int
    batch_max: int
    sync_load_blocks_max: int
    load_deadline_s: float
    max_step_retries: int
    fail_on_lost_kv: bool
    host_slots: int
    stores_max: int
    spare: float
    vocabulary: int
    requests: int
    waiting_max: int
    stops: float
    talkative: bool
    scattered: bool
    repetitive: bool
    company_max: int
    tiers: tuple[TierWorld, ...]
    store_after: int
    compute_s: float | None
    crashes: bool
    faults: Faults
    length_max: int = 72

    @staticmethod
    def draw(rng: random.Random) -> World:
        tiers = tuple(TierWorld.draw(rng) for _ in range(rng.choice((0, 0, 1, 2))))
        slots = (4, 12, 30, 60, 60) if tiers else (0, 10, 40, 150, 400, 400)
        return World(
            groups=rng.choice(GROUPS),
            block_size=rng.choice((1, 2, 3, 4, 8)),
            blocks_per_chunk=rng.choice((1, 2, 3, 3) if tiers else (1, 1, 2, 3)),
            overlap=rng.choice((1, 2)),
            step_tokens_max=rng.choice((2, 5, 16, 64)),
            batch_max=rng.choice((1, 3, 6, 10)),
            sync_load_blocks_max=rng.choice((0, 3, 8, 8, 20, 100)),
            load_deadline_s=rng.choice((4.0, NEVER_S)),
            max_step_retries=rng.choice((0, 2, 3, 5)),
            fail_on_lost_kv=rng.random() < 0.2,
            host_slots=rng.choice(slots),
            stores_max=rng.choice((1, 8, 64, 64)),
            spare=rng.choice((-0.3, 0.0, 0.0, 0.05, 0.2, 1.0)),
            vocabulary=rng.choice((2, 6, 50)),
            requests=rng.choice((16, 28, 28) if tiers else (6, 16, 28)),
            waiting_max=rng.choice((3, 100, 100)),
            stops=rng.choice((0.0, 0.03)),
            talkative=rng.random() < (0.15 if tiers else 0.35),
            scattered=rng.random() < 0.5,
            repetitive=rng.random() < (0.6 if tiers else 0.3),
            company_max=rng.choice((2, 6, 100, 100)),
            tiers=tiers,
            store_after=2 if rng.random() < 0.15 else 1,
            compute_s=rng.choice((None, 1.0, 3.0, 3.0)),
            crashes=bool(tiers) and rng.random() < 0.4,
            faults=Faults.draw(rng, bool(tiers)),
        )


class Traffic:
    """Prompts that share stems, are said again, or go on where another request's output ended."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._stems = [self._tokens(48) for _ in range(rng.choice((1, 3, 6)))]
        self._said: list[list[int]] = []  # prompts, with or without their outputs

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._world.vocabulary) for _ in range(count)]

    def request(self) -> tuple[list[int], SamplingParams, dict[str, Any]]:
        """Prompt, parameters, and the other arguments of ``Scheduler.add``."""
        rng = self._rng
        talkative = self._world.talkative
        prompt = self._prompt()[: rng.randrange(1, 12) if talkative else self._world.length_max - 1]
        self._said.append(prompt)
        stops = rng.sample(range(self._world.vocabulary), min(3, self._world.vocabulary // 4))
        params = SamplingParams(
            max_tokens=None if talkative else rng.choice((1, 2, rng.randrange(1, 25), 12, None)),
            seed=rng.choice((1, 2, 3)),
            temperature=0.0,
            stop_token_ids=frozenset(stops) if rng.random() < 0.4 else frozenset(),
            repetition=RepetitionStop(rng.choice((1, 3)), 2) if rng.random() < 0.3 else None,
        )
        options = {
            "priority": rng.choice((0, 0, 0, 1)),
            "cache_salt": rng.choice(("", "", "", "", "tenant", "other")),
            "fail_on_lost_kv": rng.choice((None, None, None, False, True)),
        }
        return prompt, params, options

    def ended(self, tokens: list[int]) -> None:
        self._said.append(tokens)

    def _prompt(self) -> list[int]:
        rng, world = self._rng, self._world
        kind = rng.choice((0, 1, 2, 3, 4, 8)) if world.repetitive else rng.randrange(10)
        if kind >= 8:  # like nobody else's: it pushes other KV out of the device
            return self._tokens(rng.randrange(1, 49))
        if kind < 2 and self._said:  # the same once more
            return list(rng.choice(self._said))
        if kind < 4 and self._said:  # the next turn of a conversation
            return rng.choice(self._said) + self._tokens(rng.randrange(1, 9))
        stem = rng.choice(self._stems)
        if kind == 4:  # full chunks
            chunk = world.block_size * world.blocks_per_chunk
            return stem[: max(chunk, rng.randrange(49) // chunk * chunk)] or stem[:1]
        return stem[: rng.randrange(1, 49)] + self._tokens(rng.choice((0, 0, 3)))
