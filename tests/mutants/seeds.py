"""Runs seeds of the simulator that this process imports, and tells one line per seed.

    python seeds.py CATCHES SEED...

The first line is where ``ebbtide`` was imported from; then come "SEED" or "SEED how it failed", up to
so many failures. A seed that takes too long counts as failed: a loop inside one call never comes back
to the simulator, which bounds only its events.
"""

from __future__ import annotations

import signal
import sys
import traceback
from types import FrameType

import ebbtide
from ebbtide.testing.simulator import simulate

SEED_MAX_S = 20.0  # of processor time, so that a busy machine proves nothing; most take 0.1


class TooSlow(BaseException):  # nobody on the way must catch it
    pass


def stop(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def failure_of(seed: int) -> str:
    """How the seed failed, in one line; empty where it did not."""
    signal.setitimer(signal.ITIMER_PROF, SEED_MAX_S)
    try:
        failure = simulate(seed).failure
    except TooSlow as error:
        place = traceback.extract_tb(error.__traceback__)[-2]
        failure = f"does not end: {place.filename.rsplit('/', 1)[-1]}:{place.lineno} {place.line}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return " ".join(failure.splitlines()[:1])[:160]


def main() -> None:
    catches, *seeds = map(int, sys.argv[1:])
    print(ebbtide.__file__)
    signal.signal(signal.SIGPROF, stop)
    for seed in seeds:
        failure = failure_of(seed)
        print(seed, failure, flush=True)
        catches -= bool(failure)
        if not catches:
            break


if __name__ == "__main__":
    main()
