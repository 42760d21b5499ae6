"""The simulator's second mode: the real threads of engine loop, mover, lookups and executor, with delays.

    python -m ebbtide.testing.threaded --seeds 0 200

A seed decides the world, the requests, the faults and how long things take. What happens when is up
to the operating system; so only the end is checked, and that it comes: every request has ended once
with the oracle's tokens, nothing is left, and all threads have stopped.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from ebbtide.core.output import Output
from ebbtide.core.plan import StepOutcome, StepPlan, Transfer, TransferResult
from ebbtide.engine.lookups import Lookups
from ebbtide.engine.loop import EngineLoop
from ebbtide.errors import InputError, QueueFull
from ebbtide.offload.below import Job, JobResult
from ebbtide.offload.mover import Mover
from ebbtide.testing.beside import chunking
from ebbtide.testing.rig import DEFAULT_PARTS, Client, Parts, Rig
from ebbtide.testing.world import NEVER_S, Traffic, World

PATIENCE_S = 30.0  # a healthy run takes a fraction of a second
DEADLINE_S = 0.01  # of a load
LATE_S = 0.03
LOOKUP_S = 0.001


class _SlowExecutor:
    """``core.plan.Executor``: runs plans on a thread of its own, with faults, as a device would."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self._rig = rig
        self._rng = rng
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ebbtide-step")

    def submit(self, plan: StepPlan) -> Future[StepOutcome]:
        return self._worker.submit(self._run, plan)

    def close(self) -> None:
        self._worker.shutdown(wait=True)

    def _run(self, plan: StepPlan) -> StepOutcome:
        time.sleep(self._rng.choice((0, 0, 0.0002, 0.001)))
        return self._rig.run_step(plan)


class _SlowTier:
    """``offload.mover.TierMoves``: one after the other, with faults and delays."""

    def __init__(self, simulation: ThreadedSimulation) -> None:
        self._simulation = simulation

    def read(self, transfers: Sequence[Transfer]) -> list[TransferResult]:
        return [self._simulation.move(transfer) for transfer in transfers]

    def do(self, jobs: Sequence[Job]) -> list[JobResult]:
        return [self._simulation.do(job) for job in jobs]


class ThreadedSimulation:
    """One seed's world on real threads. ``run`` raises ``AssertionError`` where the end is wrong."""

    def __init__(self, seed: int, *, parts: Parts = DEFAULT_PARTS) -> None:
        self._rng = rng = random.Random(seed)
        world = World.draw(rng)
        late = world.load_deadline_s != NEVER_S
        self.world = world = replace(world, load_deadline_s=DEADLINE_S if late else PATIENCE_S)
        # the threads draw from generators of their own
        self.rig = Rig(world, random.Random(seed + 1), parts)
        self._moves = random.Random(seed + 2)
        self._words = random.Random(seed + 3)
        self.rig.injected["late_load"] += late  # a busy machine makes loads late by itself
        self.clients: dict[str, Client] = {}
        self._ends = threading.Semaphore(0)
        self._failure: BaseException | None = None

    def run(self) -> Counter[str]:
        """Returns the faults that were injected."""
        before = set(threading.enumerate())
        tiers = {tier.name: _SlowTier(self) for tier in self.rig.tiers}
        mover = Mover(self.move, lambda: loop.wake(), tiers)
        executor = _SlowExecutor(self.rig, random.Random(self._rng.random()))
        loop = EngineLoop(self.rig.scheduler, self.rig.manager, executor, mover, self._listen)
        slow = [tier.tier for tier in self.rig.tiers if not tier.world.immediate]
        if slow:
            deadline_s = self._rng.choice((LOOKUP_S, PATIENCE_S))
            loop.lookups = Lookups(slow, chunking(self.world), deadline_s, loop.found, loop.ready)
        loop.start()
        with _eager_threads():
            self._talk(loop)
            in_time = all(self._ends.acquire(timeout=PATIENCE_S) for _ in self.clients)
            assert in_time, f"requests that never end: {self.rig.scheduler!r}"
            closing = threading.Thread(target=loop.close, daemon=True)
            closing.start()
            closing.join(PATIENCE_S)
            assert not closing.is_alive(), f"it never closes: {self.rig.scheduler!r}"
        assert self._failure is None, f"in a callback: {self._failure!r}"
        for result in mover.take_results():
            if isinstance(result, JobResult):
                self.rig.manager.done(result)
            else:
                self.rig.scheduler.transferred([result])
        self.rig.check_end(list(self.clients.values()))
        left = set(threading.enumerate()) - before
        assert not left, f"threads left: {left}"
        return self.rig.injected

    def _talk(self, loop: EngineLoop) -> None:
        """Be the clients: send requests, abort some, reset now and then; then the faults stop."""
        traffic, rng = Traffic(self.world, self._rng), self._rng
        for number in range(self.world.requests):
            time.sleep(rng.choice((0, 0, 0.0005, 0.002)))
            name = f"r{number}"
            prompt, params, options = traffic.request()
            poisoned = self.rig.strikes("poison")
            self.rig.poisoned |= {name} if poisoned else set()
            try:
                length_max = self.rig.scheduler.length_max(len(prompt), params.max_tokens)
            except InputError:
                continue  # it can never fit
            self.clients[name] = Client(name, prompt, params, length_max, poisoned)
            try:
                loop.add([(name, prompt, params)], **options)
            except QueueFull:
                del self.clients[name]
                continue
            traffic.ended(prompt)
            if rng.random() < 4 * self.world.faults.abort:
                self.rig.injected["abort"] += 1
                loop.end([rng.choice(list(self.clients))])
            if rng.random() < self.world.faults.reset:
                loop.reset()
            if self.rig.places and self.rig.strikes("tier_shared"):
                rng.choice(self.rig.places).harm(rng)
        self.rig.faults = self.world.faults.lasting()

    def move(self, transfer: Transfer) -> TransferResult:
        """On a thread of the mover."""
        time.sleep(self._moves.choice((0, 0, 0, 0.0005)))
        result = self.rig.faulty.move(transfer)
        self._dawdle()
        return result

    def do(self, job: Job) -> JobResult:
        """On a thread of the mover."""
        result = self.rig.faulty.do(job)
        self._dawdle()
        return result

    def _dawdle(self) -> None:
        if self.rig.strikes("slow_transfer"):
            time.sleep(self._moves.choice((0.002, LATE_S)))

    def _listen(self, outputs: Sequence[Output]) -> Iterable[str]:
        """On the engine's thread. Some requests end here, as by a stop string that was found."""
        stopped = []
        for output in outputs:
            client = self.clients[output.request_id]
            try:
                client.hear(output)
            except AssertionError as error:
                self._failure = error
            if output.finish is not None:
                self._ends.release()
            elif self._words.random() < 0.02:
                client.stopped = True
                stopped.append(client.name)
        return stopped


@contextmanager
def _eager_threads() -> Iterator[None]:
    """Threads take turns a hundred times more often than usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 100)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("A", "B"), default=(0, 200))
    first, last = parser.parse_args().seeds
    injected: Counter[str] = Counter()
    failures = 0
    for seed in range(first, last):
        try:
            injected += ThreadedSimulation(seed).run()
        except AssertionError as error:
            failures += 1
            print(f"seed {seed} failed: {error}"[:600])
    total = injected.total()
    print(f"threads: {last - first} seeds, {failures} failures, {total} faults injected")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
