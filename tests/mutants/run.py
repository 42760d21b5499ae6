"""Plants each fault of ``mutants`` in a copy of the source, and counts the seeds that notice it.

    python tests/mutants/run.py                       all of them, two at a time
    python tests/mutants/run.py NAME... --seeds 60    only these, 60 seeds each at most

A mutant's seeds end with its second catch (--catches), so the rate is catches / seeds run. Exit code 1
where a mutant is missed, or where a seed that caught one also fails without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from mutants import MUTANTS, Mutant

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src" / "ebbtide"
SEEDS_MAX = 400
CATCHES = 2  # more make a better estimate of the rate, and take as many times as long
WALL_CLOCK_MAX_S = 900


class Finding(NamedTuple):
    mutant: Mutant
    seeds: int  # run
    caught: dict[int, str]  # seed -> how

    @property
    def rarity(self) -> float:
        """One seed in so many notices."""
        return self.seeds / len(self.caught)


def hunt(mutant: Mutant, source: Path, seeds_max: int, catches_max: int) -> Finding:
    """Run seeds on a copy with the mutant. Raises RuntimeError where the copy is not what runs."""
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy(source, folder)
        mutant.plant(copy)
        verdicts = dict(_verdicts(Path(folder), range(seeds_max), catches_max))
    return Finding(mutant, len(verdicts), {seed: how for seed, how in verdicts.items() if how})


def check_control(source: Path, seeds: Iterable[int]) -> None:
    """Without a mutant none of these seeds may fail, else their catches prove nothing."""
    with tempfile.TemporaryDirectory() as folder:
        _copy(source, folder)
        for seed, failure in _verdicts(Path(folder), seeds, 1):
            if failure:
                raise SystemExit(f"without any mutant, seed {seed} fails: {failure}")


def _copy(source: Path, folder: str) -> Path:
    copy = Path(folder, "ebbtide")
    return shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))


def _verdicts(folder: Path, seeds: Iterable[int], catches_max: int) -> Iterator[tuple[int, str]]:
    """(seed, failure) of each seed that was run, from a process that imports ``folder``."""
    command = [sys.executable, str(HERE / "seeds.py"), *map(str, (catches_max, *seeds))]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WALL_CLOCK_MAX_S,
    )
    imported, *lines = run.stdout.splitlines() or [""]
    if run.returncode or Path(imported) != folder / "ebbtide" / "__init__.py":
        raise RuntimeError(f"the mutant did not run, {imported!r} did: {run.stdout[-2000:]}")
    for line in lines:
        seed, _, failure = line.partition(" ")
        yield int(seed), failure


def tell(finding: Finding, number: int, total: int) -> None:
    """Progress, for who waits."""
    said = f"{len(finding.caught)} catches in {finding.seeds} seeds"
    print(f"{number}/{total} {finding.mutant.name}: {said}", file=sys.stderr, flush=True)


def report(findings: list[Finding], console: Console) -> int:
    """Print what was found. Returns how many mutants were missed."""
    table = Table("mutant", "file", "first seed", "1 seed in", "how")
    for finding in findings:
        mutant = finding.mutant
        if finding.caught:
            first, how = next(iter(finding.caught.items()))
            seen = (str(first), f"{finding.rarity:.1f}", how)
        else:
            seen = ("missed", f"> {finding.seeds}", mutant.fault)
        table.add_row(mutant.name, mutant.file, *seen)
    for column in table.columns[:4]:
        column.no_wrap = True
    console.print(table, markup=False)
    caught = [finding for finding in findings if finding.caught]
    end = f"mutants: {len(caught)}/{len(findings)} caught"
    if caught:
        rarest = max(caught, key=lambda finding: finding.rarity)
        end += f", rarest 1 seed in {rarest.rarity:.0f} ({rarest.mutant.name})"
    console.print(end, markup=False, highlight=False, soft_wrap=True)
    return len(findings) - len(caught)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; all if none is named")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX, help="seeds per mutant at most")
    parser.add_argument("--catches", type=int, default=CATCHES, help="enough, then stop")
    arguments = parser.parse_args()
    known = {mutant.name: mutant for mutant in MUTANTS}
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no such mutant: {', '.join(unknown)}")
    chosen = [known[name] for name in arguments.names] or list(MUTANTS)
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        source = _copy(SOURCE, folder)  # once, so that edits meanwhile make no difference
        limits = (source, arguments.seeds, arguments.catches)
        tasks = [pool.submit(hunt, mutant, *limits) for mutant in chosen]
        for task in tasks:
            findings.append(task.result())
            tell(findings[-1], len(findings), len(tasks))
        missed = report(findings, Console(width=None if sys.stdout.isatty() else 160))
        check_control(source, sorted({seed for finding in findings for seed in finding.caught}))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
