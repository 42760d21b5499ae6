"""The simulator: it must be the same twice, find what is planted, and hit what is rare."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.core.kv_manager import KVManager
from ebbtide.core.pool import BlockPool
from ebbtide.core.request import Request
from ebbtide.core.scheduler import Scheduler
from ebbtide.offload.arena import Arena, Bytes
from ebbtide.offload.host import HostSlots
from ebbtide.offload.manager import OffloadManager
from ebbtide.testing import simulator
from ebbtide.testing.probes import NAMES
from ebbtide.testing.rig import Parts
from ebbtide.testing.simulator import Simulation, Verdict, simulate, simulate_all
from ebbtide.testing.world import Faults, World

FAILED_ONCE = Path(__file__).parent / "failed_seeds.txt"
SEEDS = 150
# Too rare to be met by so few seeds. `make sim` meets them all.
RARE = 12


@pytest.fixture(scope="module")
def results() -> list[Verdict]:
    return list(simulate_all(range(SEEDS)))


def test_standard_run_finds_nothing(results: list[Verdict]) -> None:
    assert not [verdict for verdict in results if verdict.failure]


def test_seeds_that_once_failed() -> None:
    lines = FAILED_ONCE.read_text().splitlines()
    seeds = {int(line.partition("#")[0]) for line in lines if line.partition("#")[0].strip()}
    assert seeds
    assert not [verdict for verdict in simulate_all(sorted(seeds)) if verdict.failure]


def test_standard_run_comes_by_the_rare_branches(results: list[Verdict]) -> None:
    hit: Counter[str] = Counter()
    for verdict in results:
        hit += verdict.result.probes if verdict.result else Counter()
    missed = sorted(NAMES - hit.keys())
    assert len(missed) <= RARE, f"never seen: {missed}"


def test_standard_run_injects_every_kind_of_fault(results: list[Verdict]) -> None:
    injected: Counter[str] = Counter()
    for verdict in results:
        injected += verdict.result.injected if verdict.result else Counter()
    assert set(Faults.__dataclass_fields__) <= injected.keys()


@pytest.mark.parametrize("seed", [3, 7, 11])
def test_a_seed_run_twice_ends_the_same(seed: int) -> None:
    told: list[list[str]] = []
    traces = []
    for _ in range(2):
        lines: list[str] = []
        traces.append(Simulation(seed, tell=lines.append).run().trace)
        told.append(lines)
    assert told[0] == told[1]
    assert traces[0] == traces[1]
    assert traces[0] != Simulation(seed + 1).run().trace


def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs/testing.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    (command,) = re.findall(r"python -m (ebbtide.*mine:.*)", text)
    monkeypatch.setattr("sys.argv", [*command.split(), "--seeds", "0", "20"])
    assert simulator.main() == 0


def test_memory_of_ones_own_that_is_wrong_is_noticed() -> None:
    class Forgetful(Arena):
        def slot(self, number: int, offset: int, count: int) -> Bytes:
            return super().slot(number, 0, count)

    parts = Parts(memory=Forgetful)
    assert any(simulate(seed, parts).failure for seed in range(40))


def test_a_world_of_ones_own_can_be_tested() -> None:
    drawn = World.draw(random.Random(1))
    result = Simulation(1, world=World(**{**_fields(drawn), "faults": Faults()})).run()
    assert not result.injected.total()


def _fields(world: World) -> dict[str, object]:
    return {name: getattr(world, name) for name in World.__dataclass_fields__}


def test_a_failing_seed_says_how_to_replay_it_and_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(seeds: range, parts: Parts) -> Iterator[Verdict]:
        return (Verdict(seed, "a rule was broken", None) for seed in seeds)

    monkeypatch.setattr(simulator, "simulate_all", fail)
    kept = tmp_path / "kept"
    monkeypatch.setattr("sys.argv", ["simulator", "--seeds", "5", "7", "--keep", str(kept)])
    assert simulator.main() == 1
    said = capsys.readouterr().out
    assert "python -m ebbtide.testing.simulator --seed 5 -v" in said
    assert said.endswith("sim: 2 seeds, 2 failures, 0 faults injected, 0 probes hit\n")
    assert kept.read_text() == "5\n6\n"


def test_a_standard_run_that_misses_a_probe_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hit = Counter(NAMES - {"host: evicted"})

    def pass_by(seeds: range, parts: Parts) -> Iterator[Verdict]:
        return (Verdict(seed, "", simulator.Result(Counter(), hit, "")) for seed in seeds)

    monkeypatch.setattr(simulator, "simulate_all", pass_by)
    monkeypatch.setattr("sys.argv", ["simulator", "--seeds", "0", "2000"])
    assert simulator.main() == 1
    assert "never seen: host: evicted" in capsys.readouterr().out


# --- mutants: faults of other engines, planted here; the simulator must catch each ---------


def _store_uncommitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #49285: stored up to what is scheduled, beyond the KV that was computed."""

    def store(self: KVManager, request: Request) -> None:
        committed, request.committed = request.committed, request.scheduled
        known = len(request.tokens)
        request.committed = min(request.scheduled, known)
        request.digest_upto(request.committed // self.block_size, self.block_size)
        original(self, request)
        request.committed = committed

    original = KVManager._store
    monkeypatch.setattr(KVManager, "_store", store)


def _final_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #54193: a request that ends on a block's boundary stores a slot that no step wrote."""

    def release(self: KVManager, request: Request) -> None:
        if request.finish is not None and request.tables and request.committed:
            request.committed = min(len(request.tokens), request.capacity)
            request.digest_upto(request.committed // self.block_size, self.block_size)
        original(self, request)

    original = KVManager.release
    monkeypatch.setattr(KVManager, "release", release)


def _lost_blocks_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #49250, dynamo #15079: a rejected load counts as loaded."""
    monkeypatch.setattr(Scheduler, "_lose_blocks", lambda self, bad: None)


def _abandoned_loads_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #46951, sglang #35049: a block is handed out while a transfer still writes it."""

    def abandon_loads(self: KVManager, request: Request, late: bool) -> None:
        for number in request.loads:
            flight = self._flights[number]
            self.pool.drop(flight.transfer.blocks)
            emptied = flight.transfer._replace(blocks=())
            self._flights[number] = flight._replace(transfer=emptied)
        original(self, request, late)

    original = KVManager.abandon_loads
    monkeypatch.setattr(KVManager, "abandon_loads", abandon_loads)


def _failed_store_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache #4991."""
    original = HostSlots.filled
    monkeypatch.setattr(HostSlots, "filled", lambda self, at, good: original(self, at, True))


def _failed_load_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #49176: found by the next lookup, and failing again, for ever."""

    def drop(self: HostSlots, key: bytes) -> None:
        pass

    monkeypatch.setattr(HostSlots, "drop", drop)
    monkeypatch.setattr(HostSlots, "clear", lambda self: None)


def _host_survives_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #57727."""
    monkeypatch.setattr(OffloadManager, "clear", lambda self: None)


def _pins_are_never_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache #3381."""
    monkeypatch.setattr(HostSlots, "unpin", lambda self, at: None)


def _no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #45388: parked requests are never woken when their producer gives up."""
    monkeypatch.setattr(KVManager, "_give_up", lambda self, request: None)


def _published_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #45704: visible before the compute that writes it has finished."""

    def admit(self: KVManager, request: Request, match: object, reserve: int) -> object:
        loads = original(self, request, match, reserve)  # type: ignore[arg-type]
        if loads is not None and request.tables:
            for index in range(request.published, len(request.tokens) // self.block_size):
                for group, table in enumerate(request.tables):
                    at = index - table.first
                    if at < len(table.blocks):
                        self.pool.publish(group, request.digests[index], table.blocks[at])
        return loads

    original = KVManager.admit
    monkeypatch.setattr(KVManager, "admit", admit)


def _preempted_blocks_are_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #46014: blocks are given up while a step in flight still writes them."""

    def drain(self: Scheduler, request: Request, why: object) -> None:
        request.in_flight, steps = 0, request.in_flight
        original(self, request, why)  # type: ignore[arg-type]
        request.in_flight = steps

    original = Scheduler._drain
    monkeypatch.setattr(Scheduler, "_drain", drain)


def _evicts_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #42289: what lookup found was evicted before it was used."""

    def pin(self: HostSlots, key: bytes) -> int:
        at = self._at[key]
        self._slots[at].pins += 1
        return at

    monkeypatch.setattr(HostSlots, "pin", pin)


def _content_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is taken keeps its name."""
    monkeypatch.setattr(BlockPool, "_forget", lambda self, block: self._name.pop(block))


MUTANTS = [
    _store_uncommitted,
    _final_token_counts,
    _lost_blocks_are_ignored,
    _abandoned_loads_hold_nothing,
    _failed_store_is_served,
    _failed_load_is_found_again,
    _host_survives_reset,
    _pins_are_never_dropped,
    _no_deadline,
    _published_early,
    _preempted_blocks_are_freed_at_once,
    _evicts_pinned,
    _content_is_not_forgotten,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_mutant_is_caught(mutant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)  # type: ignore[operator]
    assert any(simulate(seed).failure for seed in range(60)), "no seed of 60 notices"
