"""Opens the tiers below the host tier that the settings name, and puts together what works with them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.core.ledger import COMPUTED, DEVICE, HOST
from ebbtide.errors import InputError
from ebbtide.offload.arena import Arena
from ebbtide.offload.below import Asked, Below, Hints, WritePolicy
from ebbtide.offload.mover import DeviceMemory
from ebbtide.offload.tier_moves import TierMover
from ebbtide.offload.tiers.base import Tier, TierContext, TierStats
from ebbtide.offload.tiers.registry import open_tier, take_setting

log = logging.getLogger(__name__)

THREADS = 2  # per tier
CLOSE_S = 10.0  # that tiers have to let go of what they hold
TAKEN = (DEVICE, HOST, COMPUTED)  # other places that a prompt's KV comes from, in usage and metrics


@dataclass(frozen=True, slots=True)
class OpenTiers:
    """The tiers, nearest first, as decisions see them, and as those that move bytes do."""

    tiers: tuple[Tier, ...] = ()
    below: tuple[Below, ...] = ()

    @staticmethod
    def open(urls: Sequence[str], namespace: bytes, arena: Arena) -> OpenTiers:
        """Raises InputError where a URL or its place cannot work; then none stays open.

        Each URL may have the setting ``write``: write-through, on-evict or off.
        """
        if urls and not arena.num_slots:
            raise InputError(
                "tiers below the host tier need one, but host memory is 0: give it some"
            )
        context = TierContext(namespace, arena.buffer(0).nbytes)
        tiers: list[Tier] = []
        below: list[Below] = []
        try:
            for url in urls:
                url, written = take_setting(url, "write")
                policy = (
                    WritePolicy.WRITE_THROUGH if written is None else WritePolicy.named(written)
                )
                tier = open_tier(url, context)
                tiers.append(tier)
                if tier.name in (*TAKEN, *(other.name for other in below)):
                    raise InputError(f"there are two tiers named {tier.name!r}: one is the most")
                known = Asked(tier.lookup) if tier.immediate else Hints()
                writes_max = max(1, min(64, arena.num_slots // 4))
                below.append(
                    Below(tier.name, known, policy, threads=THREADS, writes_max=writes_max)
                )
        except BaseException:
            OpenTiers(tuple(tiers)).close()
            raise
        return OpenTiers(tuple(tiers), tuple(below))

    def movers(self, arena: Arena, device: DeviceMemory) -> dict[str, TierMover]:
        return {
            tier.name: TierMover(tier, arena, device, arena.blocks_per_chunk, arena.block_bytes)
            for tier in self.tiers
        }

    @property
    def slow(self) -> list[Tier]:
        """Those whose lookups take time."""
        return [tier for tier in self.tiers if not tier.immediate]

    def stats(self) -> dict[str, TierStats]:
        """What each says of itself. May take I/O."""
        return {tier.name: _stats(tier) for tier in self.tiers}

    def close(self, patience_s: float = CLOSE_S) -> dict[str, TierStats]:
        """Close all. Returns what each keeps that was closed in time; one that hangs is left behind."""
        kept: dict[str, TierStats] = {}

        def close(tier: Tier) -> None:
            stats = _stats(tier)
            try:
                tier.close()
            except Exception:  # somebody else's code
                log.exception("the tier %s could not be closed", tier.name)
            kept[tier.name] = stats

        threads = [threading.Thread(target=close, args=(t,), daemon=True) for t in self.tiers]
        until = time.monotonic() + patience_s
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return dict(kept)


def _stats(tier: Tier) -> TierStats:
    try:
        stats = tier.stats()
        if not isinstance(stats, TierStats):
            raise TypeError("its stats are none")
    except Exception as error:  # somebody else's code
        return TierStats(state=f"down: {type(error).__name__}: {error}")
    return stats
