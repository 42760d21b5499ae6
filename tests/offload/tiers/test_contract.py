"""The contract of all tiers, for those that ship with us and for the one that the documentation shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.offload.tiers.base import Tier, TierContext
from ebbtide.offload.tiers.file import open_file
from ebbtide.testing.tier_contract import TierContract
from ebbtide.testing.tiers import FaultyTier, MemoryPlace, MemoryTier

Open = Callable[[TierContext], Tier]
QUOTA = 24 << 20
DOCUMENT = Path(__file__).parents[3] / "docs/tiers.md"


class TestMemoryTier(TierContract):
    @pytest.fixture
    def open_tier(self) -> Open:
        place = MemoryPlace(QUOTA)
        return lambda context: MemoryTier(context, place)


class TestMemoryOfOneTier(TierContract):
    is_persistent = False

    @pytest.fixture
    def open_tier(self) -> Open:
        return MemoryTier


class TestFaultyTierWithoutFaults(TierContract):
    @pytest.fixture
    def open_tier(self) -> Open:
        place = MemoryPlace(QUOTA)
        return lambda context: FaultyTier(MemoryTier(context, place))


@pytest.mark.parametrize("io", ["auto", "buffered"])
@pytest.mark.parametrize("fsync", ["never", "always"])
class TestFileTier(TierContract):
    @pytest.fixture
    def open_tier(self, tmp_path: Path, io: str, fsync: str) -> Open:
        url = f"file://{tmp_path}/kv?size={QUOTA}&floor=0&io={io}&fsync={fsync}"
        return lambda context: open_file(url, context)
