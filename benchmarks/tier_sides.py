"""What ``bench_tiers`` times: for each tier, what it does with chunks, and the same without the tier."""

from __future__ import annotations

import mmap
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ebbtide.core.groups import KVGroup
from ebbtide.core.plan import Direction, Transfer
from ebbtide.errors import InputError
from ebbtide.models.kv import KVLayout, KVMemory
from ebbtide.offload.arena import Arena
from ebbtide.offload.mover import move
from ebbtide.offload.tiers.base import Result, Status, Tier, TierContext
from ebbtide.offload.tiers.envelope import HEADER_BYTES
from ebbtide.offload.tiers.file import FileTier
from ebbtide.offload.tiers.file_io import DIRECT, HEAD_BYTES
from ebbtide.offload.tiers.file_scan import directory_path
from ebbtide.offload.tiers.file_settings import FileSettings

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
NAMESPACE = bytes(32)
BLOCK_SIZE = 16
HEAD_DIM = 64
KEY_BYTES = 34

Batch = Sequence[int]  # numbers of chunks, which are also those of their slots
Act = Callable[[Batch], object]


class Skipped(Exception):
    """Why a tier cannot be measured here."""


@dataclass(frozen=True)
class Shape:
    """What one round moves: ``chunks`` in all, by ``threads`` that pass ``batch`` per call."""

    chunk_bytes: int
    chunks: int
    threads: int
    batch: int
    blocks_per_chunk: int

    def batches(self) -> list[list[Batch]]:
        """Of each thread: its calls."""
        share = self.chunks // self.threads
        return [
            [range(at, at + self.batch) for at in range(first, first + share, self.batch)]
            for first in range(0, share * self.threads, share)
        ]


@dataclass(frozen=True)
class Action:
    """One row of a table. ``prepare`` runs before each timing of either side, untimed."""

    name: str
    tier: Act
    limit: Act
    prepare: Callable[[], None] = lambda: None
    note: str = ""


def filled_arena(shape: Shape) -> Arena:
    """Random bytes, so that nobody can compress them; all pages are there."""
    arena = Arena(shape.chunks, 1, shape.chunk_bytes)
    noise = np.frombuffer(random.Random(1).randbytes(shape.chunk_bytes), np.uint8)
    for number in range(shape.chunks):
        arena.slot(number, 0, 1)[:] = noise
        arena.slot(number, 0, 1)[0, :8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
    return arena


def keys_for(shape: Shape, generation: int = 0) -> list[bytes]:
    rng = random.Random(generation)
    return [rng.randbytes(KEY_BYTES) for _ in range(shape.chunks)]


def check(results: Sequence[Result]) -> None:
    bad = [result for result in results if result.status is not Status.OK]
    if bad:
        raise SystemExit(f"the tier failed: {bad[0].status.value}, {bad[0].message}")


# --- host ------------------------------------------------------------------------------------


@contextmanager
def host_actions(shape: Shape, folder: Path) -> Iterator[Sequence[Action]]:
    """Blocks of a chunk lie anywhere on the device; the limit copies each chunk in one piece."""
    count, per_chunk = shape.chunks, shape.blocks_per_chunk
    layout = _layout(shape.chunk_bytes // per_chunk)
    device = KVMemory(layout, count * per_chunk, "cpu")
    device.blocks.view(torch.uint8).fill_(1)
    arena = Arena(count, per_chunk, layout.block_bytes)
    places = list(range(count * per_chunk))
    random.Random(1).shuffle(places)
    store, load = (
        [
            Transfer(n, way, key, n, 0, tuple(places[n * per_chunk : (n + 1) * per_chunk]))
            for n, key in enumerate(keys_for(shape))
        ]
        for way in (Direction.STORE, Direction.LOAD)
    )
    whole = list(device.blocks.view(count, -1).view(torch.uint8).numpy())
    slots = [np.frombuffer(arena.buffer(n), np.uint8)[: shape.chunk_bytes] for n in range(count)]

    def tier(transfers: Sequence[Transfer], batch: Batch) -> None:
        for n in batch:
            done = move(transfers[n], arena, device)
            assert not done.error, done.error

    def limit(sources: Sequence[Any], targets: Sequence[Any], batch: Batch) -> None:
        for n in batch:
            np.copyto(targets[n], sources[n])

    yield [
        Action("store", partial(tier, store), partial(limit, whole, slots)),
        Action("load", partial(tier, load), partial(limit, slots, whole)),
    ]


def _layout(block_bytes: int) -> KVLayout:
    """A block of that size: one layer for each 64 values of key and value at each position."""
    per_layer = 2 * HEAD_DIM * BLOCK_SIZE * torch.bfloat16.itemsize
    layers, rest = divmod(block_bytes, per_layer)
    if rest:
        raise InputError(f"a block of {block_bytes} bytes is not a multiple of {per_layer}")
    layout = KVLayout(
        (KVGroup(None),), (tuple(range(layers)),), 1, HEAD_DIM, BLOCK_SIZE, torch.bfloat16
    )
    assert layout.block_bytes == block_bytes
    return layout


# --- file ------------------------------------------------------------------------------------


@contextmanager
def file_actions(shape: Shape, folder: Path) -> Iterator[Sequence[Action]]:
    """The quota is one round's chunks: ``store`` makes new files, ``replace`` takes those of victims: all
    that are there, in order, which not every policy would do."""
    size = shape.chunks * (HEAD_BYTES + shape.chunk_bytes)
    tier = FileTier(
        FileSettings(str(folder / "tier"), size, floor=0, policy="lru"),
        TierContext(NAMESPACE, shape.chunk_bytes),
    )
    for first in range(256):  # as in a directory that has been in use
        os.makedirs(directory_path(str(folder / "tier"), NAMESPACE + bytes([first])))
    tier.refresh()
    raw = RawFiles(folder / "raw", shape, tier.is_direct)
    keys = keys_for(shape)
    generation = 0

    def write(batch: Batch) -> None:
        check(tier.write([keys[n] for n in batch], [raw.buffers[n] for n in batch]))

    def read(batch: Batch) -> None:
        check(tier.read([keys[n] for n in batch], [raw.buffers[n] for n in batch]))

    def make_new() -> None:
        check(tier.delete(keys))
        raw.remove()

    def make_old() -> None:
        nonlocal generation
        generation += 1
        keys[:] = keys_for(shape, generation)

    note = "direct I/O" if tier.is_direct else "buffered: through the page cache"
    try:
        yield [
            Action("store", write, partial(raw.write, os.O_CREAT | os.O_EXCL), make_new, note),
            Action("load", read, raw.read),
            Action("replace", write, partial(raw.write, 0), make_old),
        ]
    finally:
        tier.close()


class RawFiles:
    """Files as long as the tier's: a page and a payload."""

    def __init__(self, folder: Path, shape: Shape, is_direct: bool) -> None:
        folder.mkdir()
        arena = filled_arena(shape)
        self.buffers = [arena.buffer(number) for number in range(shape.chunks)]
        self._paths = [str(folder / f"{number}.raw") for number in range(shape.chunks)]
        self._flags = os.O_CLOEXEC | (DIRECT if is_direct else 0)
        self._page = mmap.mmap(-1, HEAD_BYTES)
        self._size = HEAD_BYTES + shape.chunk_bytes

    def write(self, flags: int, batch: Batch) -> None:
        for n in batch:
            descriptor = os.open(self._paths[n], os.O_WRONLY | self._flags | flags, 0o600)
            count = os.pwritev(descriptor, [self._page, self.buffers[n]], 0)
            os.close(descriptor)
            assert count == self._size, f"only {count} of {self._size} bytes were written"

    def read(self, batch: Batch) -> None:
        for n in batch:
            descriptor = os.open(self._paths[n], os.O_RDONLY | self._flags)
            count = os.preadv(descriptor, [self._page, self.buffers[n]], 0)
            os.close(descriptor)
            assert count == self._size, f"only {count} of {self._size} bytes were read"

    def remove(self) -> None:
        for path in self._paths:
            with suppress(FileNotFoundError):
                os.unlink(path)


# --- valkey, object --------------------------------------------------------------------------


@contextmanager
def valkey_actions(shape: Shape, folder: Path) -> Iterator[Sequence[Action]]:
    try:
        import valkey

        from ebbtide.offload.tiers.valkey import BATCH_BYTES, open_valkey
    except ImportError as error:
        raise Skipped(f"{error.name} is not installed: pip install 'ebbtide[valkey]'") from None
    with running_server("redis_server", folder) as server:
        context = TierContext(NAMESPACE, shape.chunk_bytes)
        tier = open_valkey(f"valkey://127.0.0.1:{server.port}?timeout=60", context)
        client = valkey.Valkey("127.0.0.1", server.port)
        buffers, whole = _remote_buffers(shape)
        per_trip = max(1, BATCH_BYTES // (HEADER_BYTES + shape.chunk_bytes))

        def put(batch: Batch) -> None:
            for at in range(0, len(batch), per_trip):
                pipeline = client.pipeline(transaction=False)
                for n in batch[at : at + per_trip]:
                    pipeline.set(f"raw:{n}", whole[n])
                assert all(pipeline.execute())

        def get(batch: Batch) -> None:
            for at in range(0, len(batch), per_trip):
                pipeline = client.pipeline(transaction=False)
                for n in batch[at : at + per_trip]:
                    pipeline.get(f"raw:{n}")
                assert all(len(value) == len(whole[0]) for value in pipeline.execute())

        yield _remote_actions(tier, shape, buffers, put, get)
        tier.close()


@contextmanager
def object_actions(shape: Shape, folder: Path) -> Iterator[Sequence[Action]]:
    try:
        import obstore
        from obstore.store import S3Store

        from ebbtide.offload.tiers.object_store import ObjectConfig, open_object
    except ImportError as error:
        raise Skipped(f"{error.name} is not installed: pip install 'ebbtide[object]'") from None
    with running_server("s3_server", folder) as server, ExitStack() as pools:
        from tests.offload.tiers.servers import BUCKET, S3_CREDENTIALS

        endpoint, region = f"http://127.0.0.1:{server.port}", "us-east-1"
        names = {name.removeprefix("AWS_").lower(): v for name, v in S3_CREDENTIALS.items()}
        given = "&".join(f"{name}={value}" for name, value in names.items())
        url = f"s3://{BUCKET}/bench?endpoint={endpoint}&region={region}&timeout=60&{given}"
        tier = open_object(url, TierContext(NAMESPACE, shape.chunk_bytes))
        options: Any = {"allow_http": True, "timeout": "60s"}
        store = S3Store(BUCKET, endpoint=endpoint, region=region, client_options=options, **names)
        buffers, whole = _remote_buffers(shape)
        concurrency = ObjectConfig.__dataclass_fields__["concurrency"].default
        pool = pools.enter_context(ThreadPoolExecutor(concurrency))

        def put_one(n: int) -> None:
            obstore.put(store, f"raw/{n}", whole[n], use_multipart=False)

        def get_one(n: int) -> None:
            assert len(obstore.get(store, f"raw/{n}").bytes()) == len(whole[n])

        yield _remote_actions(
            tier,
            shape,
            buffers,
            lambda batch: list(pool.map(put_one, batch)),
            lambda batch: list(pool.map(get_one, batch)),
        )
        tier.close()


def _remote_buffers(shape: Shape) -> tuple[list[memoryview], list[bytes]]:
    """The tier's buffers, and values as long as what it sends."""
    arena = filled_arena(shape)
    buffers = [arena.buffer(number) for number in range(shape.chunks)]
    return buffers, [bytes(HEADER_BYTES) + bytes(buffer) for buffer in buffers]


def _remote_actions(
    tier: Tier,
    shape: Shape,
    buffers: Sequence[memoryview],
    put: Callable[[Batch], object],
    get: Callable[[Batch], object],
) -> list[Action]:
    keys = keys_for(shape)

    def write(batch: Batch) -> None:
        check(tier.write([keys[n] for n in batch], [buffers[n] for n in batch]))

    def read(batch: Batch) -> None:
        check(tier.read([keys[n] for n in batch], [buffers[n] for n in batch]))

    return [Action("store", write, put), Action("load", read, get)]


@contextmanager
def running_server(name: str, folder: Path, *options: str) -> Iterator[Any]:
    """A server that the tests know how to start, and stop. Raises Skipped where it is not installed."""
    sys.path.insert(0, str(ROOT))
    try:
        import pytest
        from tests.offload.tiers import servers
    except ImportError as error:
        raise Skipped(f"{error.name} is not installed: it starts the server") from None
    finally:
        sys.path.remove(str(ROOT))
    with ExitStack() as running:
        try:
            server = running.enter_context(getattr(servers, name)(folder, *options))
        except pytest.skip.Exception as reason:
            raise Skipped(str(reason)) from None
        yield server
