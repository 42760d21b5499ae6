"""What is under way beside the simulated steps: transfers, jobs of the tiers, lookups in them.

Each is first carried out, and reports some time later; in any order.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ebbtide.core.plan import Transfer, TransferResult
from ebbtide.engine.lookups import Chunking
from ebbtide.offload.below import Job, JobResult
from ebbtide.offload.mover import CALLED_BACK
from ebbtide.testing.rig import Rig
from ebbtide.testing.world import World


class Lookup(NamedTuple):
    """A question to a tier: which of a prompt's chunks it has."""

    request_id: str
    tier: str
    keys: tuple[bytes, ...]


class Answer(NamedTuple):
    lookup: Lookup
    found: list[bytes]


@dataclass(slots=True)
class Moving:
    item: Transfer | Job | Lookup
    not_before: float
    result: TransferResult | JobResult | Answer | None = None


def chunking(world: World) -> Chunking:
    return Chunking(b"", world.block_size, world.blocks_per_chunk, len(world.groups))


class Beside:
    """``held``: the requests that wait for lookups."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self.moving: list[Moving] = []
        self.held: set[str] = set()
        self._rig = rig
        self._rng = rng
        self._slow = [tier for tier in rig.tiers if not tier.world.immediate]
        self._chunking = chunking(rig.world)

    @property
    def transfers(self) -> list[Transfer]:
        return [m.item for m in self.moving if isinstance(m.item, Transfer)]

    @property
    def jobs(self) -> list[Job]:
        return [m.item for m in self.moving if isinstance(m.item, Job)]

    def due(self, now: float) -> list[Moving]:
        return [m for m in self.moving if m.not_before <= now]

    def start(self, items: Iterable[Transfer | Job | Lookup], now: float) -> None:
        for item in items:
            wait_s = 0.0
            if self._rig.strikes("slow_transfer"):
                wait_s = self._rng.uniform(3, 60)
            elif isinstance(item, Transfer) and item.tier:
                wait_s = self._rng.choice((0.0, 4.0))
            self.moving.append(Moving(item, now + wait_s))

    def call_back(self, loads: Sequence[int], now: float) -> list[Transfer]:
        """Of those loads, most that have not begun come back untried."""
        back = []
        for moving in self.moving:
            item = moving.item
            is_one = isinstance(item, Transfer) and item.id in loads and moving.result is None
            if is_one and self._rng.random() < 0.7:
                moving.result = TransferResult(item, CALLED_BACK, tried=False)
                moving.not_before = now
                back.append(item)
        return back

    def look_up(self, request_id: str, prompt: Sequence[int], salt: str, now: float) -> bool:
        """Ask the tiers that take time. Whether the request is to wait for their answers."""
        if not self._slow:
            return False
        keys = tuple(self._chunking.keys(prompt, salt))
        self.start((Lookup(request_id, tier.name, keys) for tier in self._slow), now)
        if self._rng.random() < 0.1:
            return False  # they are behind with others
        self.held.add(request_id)
        return True

    def answered(self, request_id: str) -> bool:
        """Whether a request that is held waits for no lookup any more."""
        if request_id not in self.held:
            return False
        lookups = [m.item for m in self.moving if isinstance(m.item, Lookup)]
        return all(lookup.request_id != request_id for lookup in lookups)

    def carry_out(self, item: Transfer | Job | Lookup) -> TransferResult | JobResult | Answer:
        if isinstance(item, Transfer):
            return self._rig.faulty.move(item)
        if isinstance(item, Job):
            return self._rig.faulty.do(item)
        tier = self._rig.faulty.tiers[item.tier].tier
        has = tier.lookup(item.keys)
        return Answer(item, [key for key, there in zip(item.keys, has, strict=True) if there])

    def crash(self) -> None:
        """Of the jobs under way, some are still carried out."""
        for moving in self.moving:
            if isinstance(moving.item, Job) and moving.result is None and self._rng.random() < 0.5:
                self._rig.faulty.do(moving.item)
        for place in self._rig.places:
            place.left = frozenset(place.chunks)
