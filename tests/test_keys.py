"""Digests: equal for equal KV, different for everything else, and the same in every process."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.keys import block_digest, chunk_key, root_digest

texts = st.text(alphabet="ab\0=;", max_size=4)
tags = st.dictionaries(st.sampled_from(["salt", "adapter", "namespace"]), texts, max_size=3)


@given(st.lists(st.tuples(texts, tags), max_size=20))
def test_different_fields_have_different_roots(fields: list[tuple[str, dict[str, str]]]) -> None:
    meant = {}
    for namespace, given_tags in fields:
        said = (namespace, tuple(sorted((k, v) for k, v in given_tags.items() if v)))
        meant.setdefault(root_digest(namespace.encode(), given_tags), set()).add(said)
    assert all(len(meanings) == 1 for meanings in meant.values())


def test_no_field_can_be_taken_for_another() -> None:
    roots = [
        root_digest(b"x", {}),
        root_digest(b"", {"salt": "x"}),
        root_digest(b"", {"adapter": "x"}),
        root_digest(b"", {"namespace": "x"}),
        root_digest(b"", {"salt": "ab", "adapter": "c"}),
        root_digest(b"", {"salt": "a", "adapter": "bc"}),
        root_digest(b"", {"salt": "abc"}),
        root_digest(b"salt", {"salt": "x"}),
    ]
    assert len(set(roots)) == len(roots)
    assert root_digest(b"n", {"salt": ""}) == root_digest(b"n", {})
    assert root_digest(b"n", {"a": "1", "b": "2"}) == root_digest(b"n", {"b": "2", "a": "1"})


def test_a_block_is_named_by_everything_before_it() -> None:
    root = root_digest(b"", {})
    first = block_digest(root, [1, 2])
    names = {
        first,
        block_digest(root, [2, 1]),
        block_digest(root, [1, 2, 0]),
        block_digest(root, [1, 2 + 256]),
        block_digest(first, [1, 2]),
        block_digest(block_digest(root, [9, 9]), [1, 2]),
        block_digest(root_digest(b"", {"salt": "s"}), [1, 2]),
    }
    assert len(names) == 7


def test_groups_have_chunks_of_their_own() -> None:
    digest = block_digest(root_digest(b"", {}), [1])
    assert len({chunk_key(digest, group) for group in range(300)}) == 300


def test_equal_in_a_fresh_process() -> None:
    """Whatever the process's hash seed is (LMCache #1139)."""
    code = (
        "from ebbtide.keys import *;"
        "r = root_digest(b'n', {'salt': 's', 'adapter': 'a'});"
        "print(chunk_key(block_digest(r, [1, 2, 3]), 7).hex())"
    )
    command = [sys.executable, "-c", code]
    said = {
        subprocess.run(
            command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    root = root_digest(b"n", {"salt": "s", "adapter": "a"})
    assert said == {chunk_key(block_digest(root, [1, 2, 3]), 7).hex() + "\n"}


def test_a_salt_may_be_any_string_that_json_can_say() -> None:
    assert root_digest(b"", {"salt": "\ud800"}) != root_digest(b"", {"salt": "\ud801"})
