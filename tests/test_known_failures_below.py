"""Faults that other systems had in tiers below host memory, one test each, as in ``test_known_failures``."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ebbtide.core.plan import TransferResult
from ebbtide.offload.below import Asked, Below
from ebbtide.offload.host import HostSlots
from ebbtide.offload.manager import OffloadManager
from ebbtide.offload.tiers.base import MISSING, Status, Tier
from ebbtide.offload.tiers.file import open_file
from ebbtide.testing.tier_contract import Chunk, context
from ebbtide.testing.tiers import MemoryTier

from .engine.harness import CONTEXT, Heard, expected, params, prompt, running

MIB = 1 << 20


def file_tier(folder: Path, size: int = 64 * MIB) -> Tier:
    tier = open_file(f"file://{folder}?size={size}&floor=0", context())
    end = time.monotonic() + 20
    while tier.stats().state == "starting":
        assert time.monotonic() < end
        time.sleep(0.001)
    return tier


def keep(tier: Tier, numbers: Sequence[int]) -> list[Chunk]:
    chunks = [Chunk(number) for number in numbers]
    tier.write([c.key for c in chunks], [c.buffer for c in chunks])
    return chunks


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_a_file_with_another_chunks_content_is_not_served(tmp_path: Path) -> None:
    """LMCache #4385: a returning session gets another request's KV from disk."""
    tier = file_tier(tmp_path)
    first, second = keep(tier, [1, 2])
    at = {path.name[:64]: path for path in files(tmp_path)}
    at[first.key.hex()[:64]].write_bytes(at[second.key.hex()[:64]].read_bytes())
    assert tier.read([first.key], [Chunk.blank()])[0].status is Status.CORRUPT
    assert tier.read([first.key], [Chunk.blank()])[0] == MISSING  # once is enough
    tier.close()


def test_what_was_kept_is_of_use_after_a_restart(tmp_path: Path) -> None:
    """LMCache #1175: the disk cache is useless after a restart."""
    tier = file_tier(tmp_path)
    chunks = keep(tier, range(20))
    tier.close()
    tier = file_tier(tmp_path)
    assert tier.lookup([chunk.key for chunk in chunks]) == [True] * 20
    for chunk in chunks:
        buffer = Chunk.blank()
        assert tier.read([chunk.key], [buffer])[0].status is Status.OK
        assert buffer == chunk.buffer
    tier.close()


def test_evicting_a_file_that_is_gone_is_no_failure(tmp_path: Path) -> None:
    """LMCache #1981."""
    tier = file_tier(tmp_path, size=8 * MIB)
    keep(tier, range(400))
    for path in files(tmp_path):
        path.unlink()
    for number in range(1000, 1400):
        (result,) = tier.write([Chunk(number).key], [Chunk(number).buffer])
        assert result.status is Status.OK, result
    tier.close()


def test_the_disk_tier_does_not_grow_beyond_its_quota(tmp_path: Path) -> None:
    """vllm #54779: the disk tier grows until the disk is full."""
    size = 4 * MIB
    tier = file_tier(tmp_path, size)
    for start in range(0, 1000, 50):
        keep(tier, range(start, start + 50))
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= size
    assert tier.stats().evictions > 0
    tier.close()


def test_files_are_spread_over_directories(tmp_path: Path) -> None:
    """sglang #28653: millions of files in one directory."""
    tier = file_tier(tmp_path)
    keep(tier, range(1000))
    tier.close()
    found = files(tmp_path)
    assert len(found) == 1000
    fullest = max(len(list(folder.iterdir())) for folder in {path.parent for path in found})
    assert fullest < 40


def test_lookups_that_take_time_keep_nobody_who_runs_waiting() -> None:
    """LMCache #891, #4983: lookups of up to 655 ms on the scheduler's thread, a sleep per request."""
    gate, asking = threading.Event(), threading.Event()
    threads: set[str] = set()

    class Slow(MemoryTier):
        immediate = False

        def lookup(self, keys: Sequence[bytes]) -> list[bool]:
            threads.add(threading.current_thread().name)
            if not keys:
                return []
            asking.set()
            gate.wait(20)
            return super().lookup(keys)

    with running(heard := Heard(), tiers=[Slow(CONTEXT)], lookup_deadline_s=20) as loop:
        loop.add([("runs", prompt(1, 7), params(150))])  # too short for a chunk: nothing to ask
        heard.wait_for_token("runs")
        loop.add([("asks", prompt(2), params(3))])
        assert asking.wait(20)
        heard.wait("runs")
        assert "asks" not in heard.ends
        gate.set()
        heard.wait("asks")
    assert heard.tokens["runs"] == expected(1, 150, 7)
    assert heard.tokens["asks"] == expected(2, 3)
    assert threads == {"ebbtide-lookup-memory"}


@pytest.mark.parametrize(("read", "compute", "pays"), [(0.01, 0.02, True), (0.05, 0.02, False)])
def test_a_tier_that_is_slower_than_computing_is_left_alone(
    read: float, compute: float, pays: bool
) -> None:
    """dynamo #6101, sglang #26305: reading from disk takes longer than recomputing would."""
    tier = Below("disk", Asked(lambda keys: [True] * len(keys)), threads=2)
    manager = OffloadManager(HostSlots(8), 1, below=[tier])
    chain = [bytes([n]) * 32 for n in range(4)]
    manager.computed(1, compute)
    ((first,),) = manager.load(chain, [(0, 0, [5])])
    manager.finished(TransferResult(first, seconds=read))
    assert manager.has(0, chain, 0)  # it is in the host tier now
    assert manager.has(0, chain, 1) == pays


def test_chunks_behind_a_first_miss_count_as_seen() -> None:
    """vllm #52022: a reuse threshold never counts blocks behind the first miss."""
    manager = OffloadManager(HostSlots(8), 1, store_after=2)
    chain = [bytes([n]) * 32 for n in range(4)]
    blocks = [0, 1, 2, 3]
    assert manager.store("a", 0, chain, 4, 0, blocks) == []
    manager.end("a", chain, 4)
    assert [t.blocks for t in manager.store("b", 0, chain, 4, 0, blocks)] == [
        (0,),
        (1,),
        (2,),
        (3,),
    ]
    other = [bytes([9]) * 32, *chain[1:]]  # one of them was never seen
    assert [t.blocks for t in manager.store("c", 0, other, 4, 0, blocks)] == []
