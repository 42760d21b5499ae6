"""The planted faults: each can still be planted, and the runner says truly whether one is noticed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.mutants.mutants import MUTANTS, Mutant, StaleMutant

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src" / "ebbtide"
QUICK = (  # one for each place where a fault shows
    "published-early",
    "run-survives-a-hole",
    "counted-twice",
    "failed-store-is-served",
    "pins-kept",
    "never-tried-again",
    "no-cascade",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TESTS / "mutants" / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_can_be_planted(mutant: Mutant, tmp_path: Path) -> None:
    target = tmp_path / mutant.file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text((SOURCE / mutant.file).read_text())
    mutant.plant(tmp_path)
    compile(target.read_text(), mutant.file, "exec")
    with pytest.raises(StaleMutant, match=f"{mutant.name} is stale: {mutant.file}"):
        mutant._replace(old="no such text").plant(tmp_path)


def test_names_and_edits_are_unique() -> None:
    names = Counter(mutant.name for mutant in MUTANTS)
    edits = Counter((mutant.file, mutant.old, mutant.new) for mutant in MUTANTS)
    assert [item for item, count in (names + edits).items() if count > 1] == []


def test_quick_mutants_are_caught() -> None:
    done = run(*QUICK, "--seeds", "60", "--catches", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"mutants: {len(QUICK)}/{len(QUICK)} caught")


def test_missed_mutant_is_an_error() -> None:
    """Without a seed nothing can be caught."""
    done = run("pins-kept", "--seeds", "0")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "mutants: 0/1 caught"


def test_unknown_name_is_refused() -> None:
    done = run("no-such-mutant")
    assert done.returncode == 2
    assert "no such mutant: no-such-mutant" in done.stderr
