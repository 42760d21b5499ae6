"""Opening the tiers that the settings name: their order, how each is written to, what cannot be."""

from __future__ import annotations

import pytest

from ebbtide.engine import tiers as module
from ebbtide.engine.engine import _kept
from ebbtide.engine.tiers import OpenTiers
from ebbtide.errors import InputError
from ebbtide.offload.arena import Arena
from ebbtide.offload.below import WritePolicy
from ebbtide.offload.tiers.base import TierContext, TierStats
from ebbtide.testing.tiers import MemoryTier

ARENA = Arena(8, 2, 4096)


class Named(MemoryTier):
    """Called as its URL's scheme says; ``immediate`` but for those named slow."""

    def __init__(self, url: str, context: TierContext) -> None:
        super().__init__(context)
        self.url = url
        self.context = context
        self.name = url.partition(":")[0]
        self.immediate = self.name != "slow"
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Named]:
    opened: list[Named] = []

    def open_tier(url: str, context: TierContext) -> Named:
        if url.startswith("broken"):
            raise InputError("it cannot work")
        opened.append(Named(url, context))
        return opened[-1]

    monkeypatch.setattr(module, "open_tier", open_tier)
    return opened


def open_all(*urls: str) -> OpenTiers:
    return OpenTiers.open(urls, b"n" * 32, ARENA)


def test_they_stand_in_the_order_of_their_urls(opened: list[Named]) -> None:
    tiers = open_all("near://", "slow://", "far://")
    assert [tier.name for tier in tiers.tiers] == ["near", "slow", "far"]
    assert [below.name for below in tiers.below] == ["near", "slow", "far"]
    assert [tier.name for tier in tiers.slow] == ["slow"]
    assert opened[0].context == TierContext(b"n" * 32, ARENA.buffer(0).nbytes)
    tiers.close()
    assert all(tier.closed for tier in opened)


@pytest.mark.parametrize(
    ("url", "left", "policy"),
    [
        ("a://b", "a://b", "write-through"),
        ("a://b?x=1", "a://b?x=1", "write-through"),
        ("a://b?write=off", "a://b", "off"),
        ("a://b?x=1&write=on%2Devict&y=", "a://b?x=1&y=", "on-evict"),
        ("a:///b?write=off", "a:///b", "off"),
        ("a:///b%20c?x=%26+1&write=write-through", "a:///b%20c?x=%26+1", "write-through"),
        ("a://me:p%40ss@[::1]:3/0?write=off", "a://me:p%40ss@[::1]:3/0", "off"),
        ("a://b?x=http://c:1&write=off", "a://b?x=http://c:1", "off"),
        ("a://[b?overwrite=1", "a://[b?overwrite=1", "write-through"),
    ],
)
def test_how_it_is_written_to_is_no_business_of_the_tier(
    opened: list[Named], url: str, left: str, policy: str
) -> None:
    """All else of its URL reaches it as it was written."""
    (below,) = open_all(url).below
    assert opened[0].url == left
    assert below.policy is WritePolicy(policy)


@pytest.mark.parametrize(
    ("urls", "says"),
    [
        (["a://", "b://?write=never"], "write must be one of"),
        (["a://", "b://?write="], "write must be one of"),
        (["a://", "b://?write=off&write=off"], "'write' twice"),
        (["a://", "a://other"], "two tiers named 'a'"),
        (["a://", "host://"], "two tiers named 'host'"),
        (["a://", "device://"], "two tiers named 'device'"),
        (["a://", "computed://"], "two tiers named 'computed'"),
        (["a://", "broken://"], "it cannot work"),
    ],
)
def test_where_one_cannot_be_opened_none_stays_open(
    opened: list[Named], urls: list[str], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        open_all(*urls)
    assert opened
    assert all(tier.closed for tier in opened)


def test_without_a_host_tier_there_is_no_way_to_them() -> None:
    with pytest.raises(InputError, match="host memory is 0"):
        OpenTiers.open(["a://"], bytes(32), Arena(0, 2, 4096))
    assert OpenTiers.open([], bytes(32), Arena(0, 2, 4096)) == OpenTiers()


@pytest.mark.parametrize(
    ("stats", "says"),
    [
        (
            TierStats(chunks=9, bytes=3 << 20),
            "keeps 9 chunks (3.0 MiB), 2 of them written at the end",
        ),
        (TierStats(), "was given 2 chunks at the end"),  # it does not count
        (TierStats(state="down: no route"), "is down: no route; 2 chunks were written"),
        (None, "does not answer"),
    ],
)
def test_what_a_tier_keeps_is_told_as_far_as_it_is_known(
    stats: TierStats | None, says: str
) -> None:
    assert says in _kept("object", stats, 2)
