"""The sketch never counts too low before it ages, seldom too high, and forgets in time."""

from __future__ import annotations

import random
from collections import Counter
from hashlib import blake2b

from ebbtide.keys import chunk_key
from ebbtide.offload.sketch import COUNT_MAX, FrequencySketch


def key(number: int, group: int = 0) -> bytes:
    return chunk_key(blake2b(number.to_bytes(8, "little"), digest_size=32).digest(), group)


def test_counts_are_exact_while_there_is_room_and_stop_at_the_most() -> None:
    sketch = FrequencySketch(1 << 10)
    for count in range(1, 5):
        assert [sketch.add(key(n)) for n in range(20)] == [count] * 20
    for _ in range(20):
        sketch.add(key(1))
    assert sketch.count(key(1)) == COUNT_MAX
    assert sketch.count(key(99)) == 0


def test_groups_of_one_block_are_counted_apart() -> None:
    sketch = FrequencySketch(1 << 10)
    sketch.add(key(1, 0))
    assert sketch.count(key(1, 1)) == 0
    assert sketch.count(key(1, 0)) == 1


def test_never_too_low_and_seldom_too_high() -> None:
    rng = random.Random(1)
    sketch, truth = FrequencySketch(1 << 12), Counter[int]()
    for _ in range(4000):
        number = min(int(rng.expovariate(0.002)), 3000)
        truth[number] += 1
        sketch.add(key(number))
    said = {number: sketch.count(key(number)) for number in truth}
    assert all(said[n] >= min(truth[n], COUNT_MAX) for n in truth)
    assert sum(said[n] > truth[n] for n in truth) < 0.02 * len(truth)


def test_old_counts_fade() -> None:
    sketch = FrequencySketch(1 << 8)
    for _ in range(4):
        sketch.add(key(1))
    for number in range(10, 10 + 3 * (1 << 8)):
        sketch.add(key(number))
    assert sketch.count(key(1)) < 4
