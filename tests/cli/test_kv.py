"""``ebbtide kv``: what people and programs see of what is stored, and what is removed."""

from __future__ import annotations

import io
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli import main as cli
from ebbtide.cli import stored
from ebbtide.cli.kv import parse_age, readable_age
from ebbtide.errors import InputError
from ebbtide.offload.tiers.base import Entry
from ebbtide.offload.tiers.file import FileTier
from ebbtide.offload.tiers.file_io import HEAD_BYTES
from ebbtide.offload.tiers.file_settings import FileSettings
from ebbtide.testing.tier_contract import Chunk, assert_ok, buffers, context, keys
from ebbtide.testing.tiers import MemoryTier

FILE = HEAD_BYTES + mmap.PAGESIZE
HOUR_S, DAY_S = 3600, 86400
Run = Callable[..., tuple[int, str, str]]
Store = Callable[..., list[Path]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``ebbtide kv ARGUMENTS``: its exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ebbtide", "kv", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(disk: Path) -> Store:
    """Stores chunks of one namespace, last used so many seconds ago: their files, in order."""

    def store(*ages_s: float, space: int = 1) -> list[Path]:
        settings = FileSettings(str(disk), floor=0, io="buffered")
        tier = FileTier(settings, context(space=space))
        tier.refresh()
        chunks = [Chunk(number) for number in range(len(ages_s))]
        assert_ok(tier.write(keys(chunks), buffers(chunks)))
        tier.close()
        paths = []
        for chunk, age_s in zip(chunks, ages_s, strict=True):
            key = chunk.key.hex()
            path = disk / context(space=space).namespace.hex() / key[:2] / f"{key}.kv"
            os.utime(path, (time.time() - age_s,) * 2)
            paths.append(path)
        return paths

    return store


def tiers(run: Run, *arguments: object) -> list[dict[str, Any]]:
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    found: list[dict[str, Any]] = json.loads(out)["tiers"]
    return found


def there(paths: list[Path]) -> list[bool]:
    return [path.exists() for path in paths]


# stat


def test_stat_counts_by_tier_and_namespace(run: Run, store: Store, disk: Path) -> None:
    store(10, 2 * HOUR_S, 3 * DAY_S)
    store(5 * HOUR_S, space=2)
    (tier,) = tiers(run, "stat", "--disk", disk)
    assert tier["tier"] == str(disk)
    assert (tier["chunks"], tier["bytes"]) == (4, 4 * FILE)
    assert time.time() - tier["oldest_use"] == pytest.approx(3 * DAY_S, abs=60)
    assert time.time() - tier["newest_use"] == pytest.approx(10, abs=60)
    by_name = {each["namespace"]: each for each in tier["namespaces"]}
    assert by_name.keys() == {context(space=space).namespace.hex() for space in (1, 2)}
    other = by_name[context(space=2).namespace.hex()]
    assert (other["chunks"], other["bytes"]) == (1, FILE)
    assert other["oldest_use"] == other["newest_use"]


def test_stat_is_read_by_people(run: Run, store: Store, disk: Path) -> None:
    store(3 * DAY_S, 2.2 * HOUR_S)
    store(10 * DAY_S, space=2)
    code, out, _ = run("stat", "--disk", disk)
    assert code == 0
    rows = [" ".join(line.split()) for line in out.splitlines()]
    mine, theirs = (context(space=space).namespace.hex()[:12] for space in (1, 2))
    assert any(row.endswith(f"{mine} 2 16 KiB 3 d 2 h") for row in rows)
    assert f"{theirs} 1 8 KiB 10 d 10 d" in rows
    assert "all 3 24 KiB 10 d 2 h" in rows
    assert any(str(disk) in row for row in rows), "a path is on one line, however long"


def test_several_tiers_at_once(run: Run, store: Store, disk: Path, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    store(1, 2)
    folder = tmp_path / "objects"
    folder.mkdir()
    arguments = ("--disk", disk, "--object", f"file://{folder}")
    local, remote = tiers(run, "stat", *arguments)
    assert (local["chunks"], remote["chunks"]) == (2, 0)
    assert remote["tier"] == f"object+file://{folder}"
    assert [tier["removed"] for tier in tiers(run, "clear", "--yes", *arguments)] == [2, 0]


def test_settings_that_a_server_was_given_are_fine(run: Run, store: Store, disk: Path) -> None:
    store(1)
    (tier,) = tiers(run, "stat", "--tier", f"file://{disk}?write=off&size=1GiB")
    assert tier["chunks"] == 1


# verify


def test_verify_finds_what_is_corrupt_and_removes_it_when_told(
    run: Run, store: Store, disk: Path
) -> None:
    paths = store(HOUR_S, HOUR_S, HOUR_S)
    assert run("verify", "--disk", disk)[0] == 0
    used_at = [os.stat(path).st_mtime for path in paths]
    with open(paths[1], "r+b") as file:
        file.seek(HEAD_BYTES + 100)
        file.write(b"x")
    code, out, _ = run("verify", "--disk", disk)
    assert code == 1
    assert "checksum" in out
    assert "2 chunks (16 KiB) intact, 1 corrupt (--remove removes them)" in out
    assert there(paths) == [True] * 3
    assert [os.stat(path).st_mtime for path in paths][::2] == used_at[::2]

    code, out, _ = run("verify", "--disk", disk, "--remove", "--json")
    assert code == 1
    (tier,) = json.loads(out)["tiers"]
    assert (tier["intact"], tier["corrupt"], tier["failed"], tier["removed"]) == (2, 1, 0, 1)
    (problem,) = tier["problems"]
    assert problem["namespace"] == context().namespace.hex()
    assert (problem["key"], problem["status"]) == (paths[1].stem, "corrupt")
    assert there(paths) == [True, False, True]
    assert run("verify", "--disk", disk)[0] == 0


def test_what_cannot_be_read_is_bad_but_not_removed(
    run: Run, store: Store, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = store(1)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    code, out, _ = run("verify", "--disk", disk, "--remove")
    assert code == 1
    assert "1 could not be read" in out
    assert there(paths) == [True]


# prune


def test_prune_by_age(run: Run, store: Store, disk: Path) -> None:
    paths = store(HOUR_S, 29 * DAY_S, 31 * DAY_S)
    arguments = ("prune", "--disk", disk, "--older-than", "30d")
    code, out, _ = run(*arguments, "--dry-run")
    assert (code, out) == (0, f"{disk}: 1 chunk (8 KiB) would be removed\n")
    assert there(paths) == [True] * 3
    assert run(*arguments) == (0, f"{disk}: 1 chunk (8 KiB) removed\n", "")
    assert there(paths) == [True, True, False]


def test_prune_by_namespace(run: Run, store: Store, disk: Path) -> None:
    mine, theirs = store(1, 2), store(1, 2, space=2)
    digits = context(space=2).namespace.hex()
    (tier,) = tiers(run, "prune", "--disk", disk, "--namespace", digits[:12].upper())
    assert (tier["removed"], tier["removed_bytes"]) == (2, 2 * FILE)
    assert there(mine + theirs) == [True, True, False, False]


def test_prune_to_a_size_takes_the_oldest(run: Run, store: Store, disk: Path) -> None:
    mine, theirs = store(50, 10, 30), store(40, 20, space=2)
    arguments = ("prune", "--disk", disk, "--to", 2 * FILE + 1)
    assert tiers(run, *arguments, "--dry-run")[0]["removed"] == 3
    (tier,) = tiers(run, *arguments)
    assert (tier["removed"], tier["dry_run"]) == (3, False)
    assert there(mine + theirs) == [False, True, False, False, True]
    assert tiers(run, *arguments)[0]["removed"] == 0


def test_prune_takes_what_meets_all_that_is_said(run: Run, store: Store, disk: Path) -> None:
    mine, theirs = store(3 * HOUR_S, HOUR_S), store(4 * HOUR_S, space=2)
    namespace = context(space=1).namespace.hex()
    run("prune", "--disk", disk, "--namespace", namespace, "--older-than", "2h")
    assert there(mine + theirs) == [False, True, True]
    run("prune", "--disk", disk, "--namespace", namespace, "--to", 0)
    assert there(mine + theirs) == [False, False, True]


def entry(number: int, used_at: float | None, bytes: int = 10) -> Entry:
    return Entry(b"n" * 32, number.to_bytes(2, "big"), bytes, used_at)


@pytest.mark.parametrize(
    ("to_bytes", "gone"),
    [(60, []), (50, [0]), (41, [0, 1]), (30, [0, 1, 2]), (20, [0, 1, 2, 3]), (0, list(range(6)))],
)
def test_chunks_of_the_same_second_and_of_unknown_age(to_bytes: int, gone: list[int]) -> None:
    entries = [entry(n, at) for n, at in enumerate((0.0, 7.5, 7.1, 9.0, None, None))]
    rule = stored.Rule(to_bytes=to_bytes)
    assert list(stored.chosen(lambda: entries, rule)) == [entries[number] for number in gone]
    assert not list(stored.chosen(lambda: entries, stored.Rule(used_before=0.0)))


# clear


def test_clear_removes_all_chunks_and_nothing_else(run: Run, store: Store, disk: Path) -> None:
    paths = store(1, 2) + store(3, space=2)
    others = [
        disk / "notes.kv",
        disk / "writing" / "0.1.part",
        paths[0].with_name("notes.kv"),
        paths[0].with_name(paths[0].name.upper()),
        paths[0].with_name(f"{paths[0].name}.bak"),
        paths[0].with_name("00" + paths[0].name[2:]),  # not where a chunk of this name would be
        disk / "ab" / paths[0].name,
    ]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    directory = paths[0].with_name(f"{paths[0].stem}00.kv")
    directory.mkdir()
    assert run("clear", "--disk", disk, "--yes") == (0, f"{disk}: 3 chunks (24 KiB) removed\n", "")
    assert there(paths) == [False] * 3
    assert there([*others, directory]) == [True] * 8
    assert tiers(run, "stat", "--disk", disk)[0]["chunks"] == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "code", "kept"), [("n\n", 1, True), ("y\n", 0, False)])
def test_clear_asks(
    run: Run,
    store: Store,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    kept: bool,
) -> None:
    paths = store(1, 2)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    ended, _, err = run("clear", "--disk", disk)
    assert ended == code
    assert f"Remove 2 chunks (16 KiB) in {disk}?" in err
    assert there(paths) == [kept] * 2


def test_what_could_not_be_removed_is_said(
    run: Run, store: Store, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, unlink = store(1, 2), os.unlink

    def fail(path: str) -> None:
        if path == str(paths[0]):
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", fail)
    code, out, _ = run("clear", "--disk", disk, "--yes")
    assert code == 1
    assert f"1 chunk (8 KiB) removed, 1 could not be: Operation not permitted ({paths[0]})" in out


# What cannot be done


@pytest.mark.parametrize("command", ["stat", "verify", "prune --to 0", "clear --yes"])
@pytest.mark.parametrize("url", ["{}", "object+file://{}"])
def test_a_directory_that_is_not_there(run: Run, tmp_path: Path, command: str, url: str) -> None:
    path = tmp_path / "no such"
    option = "--tier" if ":" in url else "--disk"
    code, out, err = run(*command.split(), option, url.format(path))
    assert (code, out, err) == (2, "", f"ebbtide: there is no directory {path}\n")
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("stat", "say where KV is stored: --disk"),
        ("stat --tier ftp://x", "no tier is known for ftp://"),
        ("prune --disk .", "say what is to be removed: --older-than"),
        ("prune --disk . --older-than 3y", "--older-than must be an age such as"),
        ("prune --disk . --to many", "--to must be a size such as"),
        ("prune --disk . --namespace xyz", "--namespace must be up to 64 hexadecimal"),
        ("clear --disk .", "add --yes"),
        ("dance", "dance"),
    ],
)
def test_bad_input_is_one_sentence(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: str, words: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


class Opaque:
    """A tier that cannot list what it has."""

    def __init__(self, is_closed: list[bool]) -> None:
        self.close = lambda: is_closed.append(True)


def test_a_tier_that_cannot_be_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(
        "ebbtide.offload.tiers.registry.open_tier", lambda url, context: Opaque(closed)
    )
    code, _, err = run("stat", "--tier", "mine://me:secret@place/x?token=secret")
    assert code == 2
    assert "what is stored in mine://place/x cannot be listed" in err
    assert "secret" not in err
    assert closed == [True]


class Down(MemoryTier):
    def entries(self) -> Iterator[Entry]:
        raise OSError("the server is down")


def test_a_tier_that_is_down(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ebbtide.offload.tiers.registry.open_tier", lambda url, context: Down(context)
    )
    for command in ("stat", "verify", "prune --to 0", "clear --yes"):
        code, out, err = run(*command.split(), "--valkey", "valkey://place")
        assert (code, out) == (1, "")
        assert err == "ebbtide: valkey://place could not be listed: the server is down\n"


def test_help_without_a_command(run: Run) -> None:
    code, out, _ = run()
    assert code == 0
    assert "prune" in out


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30d", 30 * DAY_S), ("12 H", 12 * HOUR_S), ("1.5m", 90), ("0s", 0), ("2w", 14 * DAY_S)],
)
def test_ages_are_read(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1e9d", "1y", "1 d d"])
def test_what_is_no_age_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--older-than must be an age"):
        parse_age(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "just now"), (3, "3 s"), (90, "2 min"), (5400, "90 min"), (7200, "2 h"), (1e6, "12 d")],
)
def test_ages_are_told(seconds: float, text: str) -> None:
    assert readable_age(seconds) == text


def test_nothing_heavy_is_imported(disk: Path, store: Store) -> None:
    store(1)
    code = (
        "import sys; from ebbtide.cli import main; "
        f"sys.argv = ['ebbtide', 'kv', 'verify', '--disk', {str(disk)!r}, '--json']\n"
        "try: main.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print([m for m in ('torch', 'numpy', 'tokenizers', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
