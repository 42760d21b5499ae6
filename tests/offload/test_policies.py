"""LRU against the slow model: a list of keys with the time each was last used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.offload.policies import LRU

KEYS = [bytes([i]) for i in range(5)]
operations = st.lists(
    st.tuples(st.sampled_from(["add", "touch", "remove", "victim"]), st.sampled_from(KEYS)),
    max_size=60,
)


@given(operations)
def test_lru_equals_its_definition(steps: list[tuple[str, bytes]]) -> None:
    lru = LRU()
    used: dict[bytes, int] = {}
    for time, (operation, key) in enumerate(steps):
        if operation == "add" and key not in used:
            lru.add(key)
            used[key] = time
        elif operation == "touch":
            lru.touch(key)
            if key in used:
                used[key] = time
        elif operation == "remove" and key in used:
            lru.remove(key)
            del used[key]
        elif operation == "victim":
            oldest = min(used, key=lambda k: used[k], default=None)
            assert lru.victim() == oldest
            used.pop(oldest, None)  # type: ignore[arg-type]
    left = [lru.victim() for _ in used]
    assert left == sorted(used, key=lambda k: used[k])
    assert lru.victim() is None
