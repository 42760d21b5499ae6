"""Who opens which URL, and what is said where nobody can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.cli.options import tier_urls
from ebbtide.errors import InputError
from ebbtide.offload.tiers import object_store, registry, valkey
from ebbtide.offload.tiers.base import TierContext
from ebbtide.offload.tiers.file import open_file
from ebbtide.testing.tier_contract import context
from ebbtide.testing.tiers import MemoryTier

Register = Callable[[str, object], None]


class FakePoint:
    """An entry point of a package that is not installed. ``load`` returns ``opener``, or raises it."""

    def __init__(self, name: str, opener: object) -> None:
        self.name, self.value, self._opener = name, "their_package:open_theirs", opener

    def load(self) -> object:
        if isinstance(self._opener, Exception):
            raise self._opener
        return self._opener


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    def register(scheme: str, opener: object) -> None:
        point = FakePoint(scheme, opener)
        monkeypatch.setattr(registry, "entry_points", lambda group: [point])

    return register


def refused(url: str) -> str:
    with pytest.raises(InputError) as error:
        registry.open_tier(url, context())
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("schemes", "opener"),
    [
        (("file",), open_file),
        (valkey.SCHEMES, valkey.open_valkey),
        (object_store.SCHEMES, object_store.open_object),
    ],
)
def test_our_tiers_are_registered_for_all_their_schemes(schemes, opener) -> None:
    for scheme in schemes:
        assert registry.find(f"{scheme}://x") is opener
        assert registry.find(f"{scheme.upper()}://x") is opener


def test_a_folder_is_a_file_tier_or_an_object_store_as_the_option_says(tmp_path: Path) -> None:
    urls = tier_urls(f"{tmp_path}/a", "1GiB", "off", None, f"file://{tmp_path}/b", ())
    found = [registry.find(url) for url in urls]
    assert found == [open_file, object_store.open_object]


def test_a_package_brings_a_tier(register: Register) -> None:
    register("theirs", lambda url, context: MemoryTier(context))
    assert registry.open_tier("theirs://host", context()).name == "memory"


@pytest.mark.parametrize(
    "url", ["fiel:///x", "ftp://me:secret@host/x?token=secret", "http://[secret"]
)
def test_a_scheme_that_nobody_has(url: str) -> None:
    said = refused(url)
    assert f"no tier is known for {url.partition(':')[0]}://" in said
    assert "file://, gs://" in said
    assert "secret" not in said


@pytest.mark.parametrize("url", ["", "/var/cache/kv", "file", "file:x"])
def test_what_is_no_url(url: str) -> None:
    assert refused(url).startswith("a tier is given by its URL: it must begin with one of az://")


def test_no_tier_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    assert refused("file:///x") == "no tier is known for file://: no package brings any"


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (ImportError("No module named 'theirs'"), "ImportError: No module named 'theirs'"),
        (AttributeError("line\nand line"), "AttributeError: line and line"),
        (RuntimeError(), "RuntimeError"),
        ("no function", "cannot be called"),
    ],
)
def test_a_package_whose_entry_point_is_broken(register: Register, broken, says: str) -> None:
    register("theirs", broken)
    said = refused("theirs://me:secret@host")
    assert "theirs:// is in their_package:open_theirs" in said
    assert says in said
    assert "secret" not in said


def test_a_package_whose_opener_raises_what_it_should_not(register: Register) -> None:
    def opener(url: str, context: TierContext) -> MemoryTier:
        raise OSError("the host\nis not there")

    register("theirs", opener)
    said = refused("theirs://me:secret@host")
    assert said == "the tier for theirs:// cannot be opened: OSError: the host is not there"


def test_what_an_opener_says_and_our_own_bugs_come_through(register: Register) -> None:
    def refuses(url: str, context: TierContext) -> MemoryTier:
        raise InputError("it has no such table", "table")

    register("theirs", refuses)
    with pytest.raises(InputError, match=r"\Ait has no such table\Z") as error:
        registry.open_tier("theirs://x", context())
    assert error.value.field == "table"

    def asserts(url: str, context: TierContext) -> MemoryTier:
        raise AssertionError("a bug")

    register("theirs", asserts)
    with pytest.raises(AssertionError, match="a bug"):
        registry.open_tier("theirs://x", context())


@pytest.mark.parametrize(
    ("url", "rest", "said"),
    [
        ("a://h/p", "a://h/p", None),
        ("a://h/p?x=1&x=2", "a://h/p?x=1&x=2", None),
        ("a:///p?write=off", "a:///p", "off"),
        ("a:///p%20q?x=%26&write=on-evict&y", "a:///p%20q?x=%26&y", "on-evict"),
        ("a://?write=", "a://", ""),
        ("a://?rewrite=off", "a://?rewrite=off", None),
    ],
)
def test_a_setting_is_taken_out_and_the_rest_stays_as_it_is(url: str, rest: str, said: str) -> None:
    assert registry.take_setting(url, "write") == (rest, said)
