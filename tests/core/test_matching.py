"""The longest usable prefix against its definition, tried for every length."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.core.groups import KVGroup
from ebbtide.core.matching import longest_prefix, match
from ebbtide.core.pool import BlockPool

windows = st.one_of(st.none(), st.integers(1, 20))
worlds = st.tuples(
    st.lists(windows, min_size=1, max_size=3).map(lambda ws: [KVGroup(w) for w in ws]),
    st.integers(1, 5),  # block size
    st.integers(0, 12),  # limit
    st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=3, max_size=3),
)


def by_definition(groups: list[KVGroup], size: int, limit: int, available: list[list[bool]]) -> int:
    """The longest prefix of which every block is there that the position behind it can see."""
    for length in range(limit, 0, -1):
        position = length * size
        seen = [
            (number, seen_position // size)
            for number, group in enumerate(groups)
            for seen_position in range(position)
            if group.window is None or seen_position > position - group.window
        ]
        if all(available[number][index] for number, index in seen):
            return length
    return 0


@settings(max_examples=400, deadline=None)
@given(worlds)
def test_longest_prefix_equals_its_definition(
    world: tuple[list[KVGroup], int, int, list[list[bool]]],
) -> None:
    groups, size, limit, available = world
    found = longest_prefix(groups, size, limit, lambda group, index: available[group][index])
    assert found == by_definition(groups, size, limit, available)


def test_it_asks_for_no_block_twice_and_stops_where_full_attention_ends() -> None:
    asked: list[tuple[int, int]] = []

    def available(group: int, index: int) -> bool:
        asked.append((group, index))
        return index < 3

    groups = [KVGroup(), KVGroup(4)]
    assert longest_prefix(groups, 4, 1_000, available) == 3
    assert len(asked) == len(set(asked)) <= 2 * 4


def test_match_says_what_is_here_and_what_must_be_loaded() -> None:
    pool = BlockPool(8, num_groups=2)
    blocks = pool.take(8)
    digests = [bytes([i]) for i in range(5)]
    for index in (0, 1, 3):
        pool.publish(0, digests[index], blocks[index])
    pool.publish(1, digests[3], blocks[4])
    groups = [KVGroup(), KVGroup(window=6)]
    found = match(groups, 4, digests, 5, pool, lambda group, index: index in (2, 3))
    assert found.blocks == 4
    assert found.first == (0, 2)  # position 16 sees 11 and later: block 2
    assert found.found == ([blocks[0], blocks[1], None, blocks[3]], [None, blocks[4]])
    assert found.missing == 2
    assert found.loaded == {2}
    assert found.hits == [blocks[0], blocks[1], blocks[3], blocks[4]]


def test_a_window_that_sees_nothing_before_needs_nothing() -> None:
    assert longest_prefix([KVGroup(1)], 4, 7, lambda group, index: False) == 7


def test_first_visible() -> None:
    assert KVGroup().first_visible(9) == 0
    assert [KVGroup(3).first_visible(p) for p in (0, 1, 2, 3, 9)] == [0, 0, 0, 1, 7]
