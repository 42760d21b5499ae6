"""The contract of all tiers, for those that ship with us and for the one that the documentation shows."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.errors import InputError
from ebbtide.offload.tiers.base import Inventory, Status, Tier, TierContext
from ebbtide.offload.tiers.file import open_file
from ebbtide.testing.tier_contract import Chunk, TierContract, context, opened
from ebbtide.testing.tiers import FaultyTier, MemoryPlace, MemoryTier

Open = Callable[[TierContext], Tier]
QUOTA = 24 << 20
DOCUMENT = Path(__file__).parents[3] / "docs/tiers.md"


class TestMemoryTier(TierContract):
    @pytest.fixture
    def open_tier(self) -> Open:
        place = MemoryPlace(QUOTA)
        return lambda context: MemoryTier(context, place)

    def test_it_is_an_inventory(self, open_tier: Open) -> None:
        """Else the contract's tests of one would pass by."""
        with opened(open_tier) as tier:
            assert isinstance(tier, Inventory)


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


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert code.count("\n") < 60
    module = types.ModuleType("ebbtide_sqlite")
    exec(compile(code, str(DOCUMENT), "exec"), module.__dict__)
    return module


class TestTheExampleOfTheDocumentation(TierContract):
    @pytest.fixture
    def open_tier(self, tmp_path: Path, example: types.ModuleType) -> Open:
        return lambda context: example.SQLiteTier(f"sqlite://{tmp_path}/kv.db", context)

    def test_what_was_altered_is_corrupt_and_gone(self, open_tier: Open) -> None:
        with opened(open_tier) as tier:
            chunk = Chunk(1)
            tier.write([chunk.key], [chunk.buffer])
            tier.run("UPDATE chunks SET chunk = CAST(substr(chunk, 1, 900) AS BLOB)")
            assert tier.read([chunk.key], [Chunk.blank()])[0].status is Status.CORRUPT
            assert tier.read([chunk.key], [Chunk.blank()])[0].status is Status.MISSING

    def test_a_place_that_cannot_work_is_one_sentence(self, example: types.ModuleType) -> None:
        with pytest.raises(InputError, match="cannot open the database /no/such"):
            example.SQLiteTier("sqlite:///no/such/kv.db", context())
