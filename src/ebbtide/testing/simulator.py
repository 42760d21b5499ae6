"""The deterministic simulator: scheduler, offload and witness under faults, all decided by one seed.

    python -m ebbtide.testing.simulator --seed 7 -v        one seed, told step by step
    python -m ebbtide.testing.simulator --seeds 0 2000     many, on two processes

First requests arrive while faults are injected; then the faults stop, but for poisonous requests, and
everything must converge. In some worlds everything but the tiers below is lost half way. After every
event the rules of ``invariants``, ``rules`` and ``tier_rules`` are checked; at the end every finished
request must equal the oracle, and nothing may be left.

To test an eviction policy or host memory of your own, see ``docs/testing.md``:

    python -m ebbtide.testing.simulator --policy my.module:MyPolicy --memory my.module:MyMemory
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ebbtide.testing.probes import NAMES
from ebbtide.testing.rig import DEFAULT_PARTS, Parts
from ebbtide.testing.simulation import Result, Simulation

__all__ = ["Parts", "Result", "Simulation", "Verdict", "simulate", "simulate_all"]

POLICY, MEMORY = "ebbtide.offload.policies:LRU", "ebbtide.offload.arena:Arena"
STANDARD_SEEDS = 2_000  # so many must come through every probe


class Verdict(NamedTuple):
    """``failure`` says how the seed failed, and is empty where it did not."""

    seed: int
    failure: str
    result: Result | None


def simulate(seed: int, parts: Parts = DEFAULT_PARTS, verbose: bool = False) -> Verdict:
    """Run a seed. A failure is part of the verdict, never raised."""
    try:
        simulation = Simulation(seed, parts=parts, tell=print if verbose else lambda line: None)
        return Verdict(seed, "", simulation.run())
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rsplit('/', 1)[-1]}:{place.lineno}"
        if verbose:
            traceback.print_exc()
        return Verdict(seed, f"{where} {type(error).__name__}: {error}"[:600], None)


def simulate_all(seeds: Iterable[int], parts: Parts = DEFAULT_PARTS) -> Iterator[Verdict]:
    """Run many seeds on two processes, in order."""
    with ProcessPoolExecutor(2) as pool:
        yield from pool.map(partial(simulate, parts=parts), seeds, chunksize=8)


def main() -> int:
    arguments = _arguments()
    parts = Parts(_named(arguments.policy), _named(arguments.memory))
    if arguments.seed is not None:
        verdict = simulate(arguments.seed, parts, arguments.verbose)
        injected = dict(+verdict.result.injected) if verdict.result else {}
        print(verdict.failure or f"seed {arguments.seed} is fine: {injected}")
        return bool(verdict.failure)
    first, last = arguments.seeds
    total: Counter[str] = Counter()
    probes: Counter[str] = Counter()
    failed: list[int] = []
    for verdict in simulate_all(range(first, last), parts):
        if verdict.result is None:
            failed.append(verdict.seed)
            print(f"seed {verdict.seed} failed: {verdict.failure}")
            print(f"  replay: {_replay(verdict.seed, arguments)}")
        else:
            total += verdict.result.injected
            probes += verdict.result.probes
    if arguments.keep and failed:
        with arguments.keep.open("a") as file:
            file.writelines(f"{seed}\n" for seed in failed)
    if arguments.verbose:
        for name, count in sorted({**total, **probes}.items()):
            print(f"  {name}: {count}")
    missed = sorted(NAMES - probes.keys()) if last - first >= STANDARD_SEEDS else []
    for name in missed:
        print(f"never seen: {name}")
    print(
        f"sim: {last - first} seeds, {len(failed)} failures, {total.total()} faults injected, "
        f"{len(probes)} probes hit"
    )
    return bool(failed or missed)


def _replay(seed: int, arguments: argparse.Namespace) -> str:
    """The command that runs this seed with the same parts."""
    command = ["python", "-m", "ebbtide.testing.simulator", "--seed", str(seed), "-v"]
    for option, default in (("policy", POLICY), ("memory", MEMORY)):
        if (said := getattr(arguments, option)) != default:
            command += [f"--{option}", said]
    return shlex.join(command)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--seed", type=int, help="run this seed only")
    add("--seeds", type=int, nargs=2, metavar=("A", "B"), default=(0, 200), help="A to B - 1")
    add("-v", "--verbose", action="store_true", help="tell every event of --seed, or all counts")
    add("--keep", type=Path, metavar="FILE", help="append the seeds that failed to this file")
    add("--policy", default=POLICY, metavar="MODULE:NAME")
    add("--memory", default=MEMORY, metavar="MODULE:NAME")
    return parser.parse_args()


def _named(path: str) -> Any:
    """The object that "module:name" says."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{path!r} names nothing that can be imported: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
