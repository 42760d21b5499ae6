"""The optimum that policies are compared with is one, and the figures known of the traces are checked."""

from __future__ import annotations

import random
import re
import sys
from functools import cache
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import pytest

from ebbtide.offload.host import HostSlots
from ebbtide.offload.policies import POLICIES


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import bench_policies

    yield bench_policies
    sys.modules.pop("bench_policies", None)


def chains(seed: int) -> list[list[bytes]]:
    """Requests that go down a tree, so that equal blocks have equal prefixes."""
    rng = random.Random(seed)
    requests = []
    for _ in range(7):
        path = "".join(rng.choice("ab") for _ in range(rng.randint(1, 3)))
        requests.append([path[: end + 1].encode() for end in range(len(path))])
    return requests


def best_by_trying(requests: list[list[bytes]], capacity: int) -> int:
    """The most prefix hits that any cache can have that keeps some of what it held and was given."""

    @cache
    def hits_from(number: int, held: frozenset[bytes]) -> int:
        if number == len(requests):
            return 0
        request = requests[number]
        found = sum(1 for _ in takewhile(held.__contains__, request))
        there = held.union(request)
        kept = combinations(sorted(there), min(capacity, len(there)))
        return found + max(hits_from(number + 1, frozenset(some)) for some in kept)

    return hits_from(0, frozenset())


@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
def test_no_cache_has_more_hits_than_the_optimum_and_one_has_as_many(bench, capacity) -> None:
    for seed in range(25):
        requests = chains(seed)
        total = sum(map(len, requests))
        expected = 100 * best_by_trying(requests, capacity) / total
        assert bench.optimum_rate(capacity, requests) == pytest.approx(expected)


@pytest.mark.parametrize("name", POLICIES)
def test_an_unbounded_cache_misses_each_block_once(bench, name) -> None:
    requests = chains(1)
    blocks, total = len({b for request in requests for b in request}), sum(map(len, requests))
    expected = 100 * (total - blocks) / total
    assert bench.policy_rate(POLICIES[name], blocks, requests) == pytest.approx(expected)
    assert bench.optimum_rate(blocks, requests) == pytest.approx(expected)
    assert bench.rate_below_host(POLICIES[name], blocks, requests) == pytest.approx(expected)


def test_a_tier_below_makes_up_for_what_the_host_tier_evicts(bench, monkeypatch) -> None:
    monkeypatch.setattr(bench, "HOST_BLOCKS", 2)
    requests = [[b"a"], [b"b"], [b"c"], [b"d"], [b"a"]]
    assert bench.rate_below_host(POLICIES["lru"], 4, requests) == pytest.approx(20)
    assert bench.rate_below_host(POLICIES["lru"], 2, requests) == 0


def test_another_trace_is_noticed(bench) -> None:
    with pytest.raises(SystemExit, match="another trace"):
        bench.check_lru("synthetic", chains(1), 10)


def test_the_example_of_the_documentation_is_first_in_first_out(bench) -> None:
    text = (Path(__file__).parents[2] / "docs/eviction.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(example, scope)
    slots = HostSlots(3, scope["FIFO"]())
    for key in (b"a", b"b", b"c"):
        slots.filled(slots.reserve(key), good=True)
    slots.pin(b"a")
    slots.touch(b"b")
    slots.touch(b"elsewhere")
    slots.reserve(b"d")
    assert [slots.has(key) for key in (b"a", b"b", b"c")] == [True, False, True]
    slots.drop(b"c")
    assert slots.take_victim() is None  # what is there is pinned, or not filled yet
    assert 0 <= bench.policy_rate(scope["FIFO"], 3, chains(1)) <= 100
