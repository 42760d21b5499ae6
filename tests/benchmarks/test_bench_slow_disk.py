"""What the benchmark of slow tiers asks for, compares and calls too slow."""

from __future__ import annotations

import mmap
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ebbtide.offload.tiers.base import OK, TierContext

OURS = ("bench_slow_disk", "conversations", "tier_sides")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import bench_slow_disk

    yield bench_slow_disk
    for name in OURS:
        sys.modules.pop(name, None)


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_turns_go_on_where_the_turn_before_ended(bench) -> None:
    texts = bench.streams(encode, 8, random.Random(1))
    asked = bench.prompts(texts, random.Random(1))
    assert len(asked) == 8 * bench.TURNS
    assert {len(prompt) for prompt in asked[-8:]} == {bench.LENGTHS[1]}
    assert min(map(len, asked)) >= bench.LENGTHS[0]
    for text in texts:
        turns = [prompt for prompt in asked if prompt == text[: len(prompt)]]
        assert len(turns) == bench.TURNS
        assert sorted(map(len, turns)) == [len(turn) for turn in turns]


def test_chunks_that_conversations_share_are_counted_once(bench) -> None:
    texts = [[1] * 64 + [2] * 70, [1] * 64 + [3] * 70]
    assert bench.BLOCK * bench.PER_CHUNK == 32
    assert bench.chunks_of(texts) == 2 + 2 * 2


def answer(bench: Any, asked_s: float, ttft_s: float, tokens: list[int], gap: float = 1.0) -> Any:
    return bench.Answer(
        asked_s, asked_s + ttft_s, asked_s + ttft_s + 1, tokens, [gap] * len(tokens)
    )


def life(bench: Any, ttfts: list[float], tokens: int = 7, gap: float = 1.0) -> Any:
    return bench.Life([answer(bench, 0.0, t, [tokens], gap) for t in ttfts], {0})


def test_the_verdict(bench) -> None:
    none = life(bench, [9.0] + [1.0] * 100)
    assert bench.verdict({"none": [none], "a": [life(bench, [60.0] + [1.1] * 100)]}) == []
    slow = bench.verdict({"none": [none], "a": [life(bench, [1.0] * 95 + [1.3] * 6)]})
    assert slow == ["a: p99 is 1.30 times that of no tier, not 1.2"]
    other = bench.verdict({"none": [none], "a": [life(bench, [1.0] * 101, tokens=8)]})
    assert other == ["a: 101 answers have other tokens than with no tier"]


def test_a_token_that_hangs_on_a_hair_is_no_difference(bench) -> None:
    expected = [answer(bench, 0, 1, [7], gap=1e-5)]
    assert bench.differences(expected, [answer(bench, 0, 1, [8])]) == (0, 1)


def test_reads_are_slow_from_the_switch_on_until_it_is_let_go(bench, tmp_path) -> None:
    switch = bench.Switch(60.0)
    tier = switch.open(f"file://{tmp_path}?floor=0", TierContext(bytes(32), 4096))
    key, buffer = bytes(34), memoryview(mmap.mmap(-1, 4096))
    while tier.stats().state == "starting":
        time.sleep(0.01)
    assert tier.write([key], [buffer]) == [OK]
    assert tier.read([key], [buffer]) == [OK]
    switch.on()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(tier.read([key], [buffer])))
    thread.start()
    time.sleep(0.05)
    assert not results
    switch.let_go()
    thread.join(10)
    assert results == [OK]
    tier.close()
