"""A tier of the simulated world: where its chunks lie, the faults before it, and what works with it."""

from __future__ import annotations

import random
from collections.abc import Callable

from ebbtide.offload.arena import ChunkMemory
from ebbtide.offload.below import Asked, Below, Hints
from ebbtide.offload.mover import DeviceMemory
from ebbtide.offload.tier_moves import TierMover
from ebbtide.offload.tiers.base import TierContext
from ebbtide.testing.tiers import GARBAGE, Fault, FaultyTier, MemoryPlace, MemoryTier
from ebbtide.testing.world import TierWorld

BLOCKS_PER_CHUNK_MAX = 8
FAULTS = {
    "tier_fails": Fault.FAIL,
    "tier_lost": Fault.LOST,
    "tier_corrupt": Fault.CORRUPT,
    "tier_full": Fault.FULL,
    "tier_down": Fault.DOWN,
}


class Place(MemoryPlace):
    """Outlives a crash. ``bad``: the blocks of its chunks that are marked (see ``faulty``). ``doing``:
    what is being done there, and so what ``took`` chunks away that had been there."""

    def __init__(self, bytes_max: int | None) -> None:
        super().__init__(bytes_max)
        self.bad: dict[bytes, frozenset[int]] = {}
        self.doing = ""
        self.took: dict[bytes, str] = {}
        self.left: frozenset[bytes] = frozenset()  # by the life before

    def drop(self, id: bytes) -> None:
        if id in self.chunks:
            self.took[id] = self.doing
        super().drop(id)

    def harm(self, rng: random.Random) -> None:
        """Another process that uses the place writes a chunk that is bad, or removes one, or all."""
        self.doing = "another process"
        with self.lock:
            ids = list(self.chunks)
            some = rng.sample(ids, min(1, len(ids)))
            if rng.random() < 0.4:
                for id in some:
                    self.chunks[id] = bytes([GARBAGE]) * len(self.chunks[id])
                    self.bad[id] = frozenset(range(BLOCKS_PER_CHUNK_MAX))
                return
            for id in some if rng.random() < 0.9 else ids:
                self.drop(id)


class LowerTier:
    """``tier`` with its faults; ``below`` decides, ``mover`` acts. It takes no time: ``read_s`` is told."""

    def __init__(
        self,
        name: str,
        world: TierWorld,
        blocks_per_chunk: int,
        place: Place,
        rng: random.Random,
        strikes: Callable[[str], bool],
        kind: type[Below] = Below,
    ) -> None:
        self.name = name
        self.world = world
        self.place = place
        self._blocks_per_chunk = blocks_per_chunk
        self._rng = rng
        self._strikes = strikes
        self._spent = 0.0
        memory = MemoryTier(TierContext(b"", 0), place)
        memory.name, memory.immediate = name, world.immediate
        self.tier = FaultyTier(memory, self._fault, down_keys=5)
        self.hints = Hints()  # empty where the tier is asked each time
        self.below = kind(
            name,
            Asked(self.tier.lookup) if world.immediate else self.hints,
            world.policy,
            threads=world.threads,
            writes_max=world.writes_max,
        )
        self.mover: TierMover

    def attach(self, arena: ChunkMemory, device: DeviceMemory, block_bytes: int) -> None:
        count = self._blocks_per_chunk
        self.mover = TierMover(self.tier, arena, device, count, block_bytes, self._clock)

    def _clock(self) -> float:
        return self._spent

    def is_found(self, key: bytes) -> bool:
        """What ``below.has`` would say if nothing went wrong with the lookup."""
        below, place = self.below, self.place
        known = key in place.chunks if self.world.immediate else key in self.hints
        barred = below._uncleared or key in below._barred or key in below._late
        return known and not barred

    def serves(self, key: bytes) -> bool:
        """Whether a request would get the chunk from here."""
        return key in self.place.chunks and self.is_found(key)

    def _fault(self, method: str, key: bytes) -> Fault | None:
        if method == "read":
            self._spent += self._rng.choice(self.world.read_s)
        if method == "lookup":
            return Fault.FAIL if self._rng.random() < 0.2 and self._strikes("tier_fails") else None
        return next((fault for name, fault in FAULTS.items() if self._strikes(name)), None)
