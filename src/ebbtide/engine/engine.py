"""A model being served: checkpoint, device memory, host tier, scheduler and loop, put together."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.core.scheduler import Scheduler, SchedulerConfig
from ebbtide.engine.build import (
    Progress,
    build_model,
    choose_device,
    choose_dtype,
    choose_weights,
    load_weights,
)
from ebbtide.engine.config import MIB, EngineConfig
from ebbtide.engine.lookups import Chunking, Lookups
from ebbtide.engine.loop import EngineLoop
from ebbtide.engine.output import EngineStats, TierFigures
from ebbtide.engine.streams import Sink, Streams, check_token_ids, resolve
from ebbtide.engine.tiers import THREADS, OpenTiers
from ebbtide.errors import InputError, readable_bytes
from ebbtide.offload.arena import WARM_BYTES, Arena, slot_bytes_for
from ebbtide.offload.below import Below
from ebbtide.offload.host import HostSlots
from ebbtide.offload.manager import OffloadManager
from ebbtide.offload.mover import Mover, move
from ebbtide.offload.policies import make_policy
from ebbtide.offload.tiers.base import TierStats
from ebbtide.params import SamplingParams

if TYPE_CHECKING:
    from ebbtide.models.checkpoint import Checkpoint
    from ebbtide.models.kv import KVLayout

TRY_S = 0.5  # the start waits so long at most until it is known how fast the tiers are


class Engine:
    """Loads a model and serves it on a thread of its own. ``AsyncEngine`` and ``LLM`` are its faces.

    ``flush`` is called on the engine's thread after each batch of deltas. Raises InputError where
    the model, the memory asked for or the settings cannot work.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        flush: Callable[[], None] = lambda: None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        import torch

        from ebbtide.models.executor import TorchExecutor
        from ebbtide.models.kv import KVMemory, layout_for

        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device, dtype = choose_device(config.device), choose_dtype(config.dtype, config.device)
        form, weights_dtype = choose_weights(config.weights, device, dtype)
        if checkpoint is None:
            checkpoint = load_weights(config, form, weights_dtype, progress)
        self.config = config
        self.model_name = checkpoint.name
        self.tokenizer = checkpoint.tokenizer
        self.generation = dict(checkpoint.generation)
        self.max_length = _max_length(config, checkpoint)
        layout = layout_for(checkpoint.config, config.block_size, dtype)
        num_blocks = _num_blocks(config, layout, device)
        memory = KVMemory(layout, num_blocks, device)
        arena = _arena(config, layout)
        warming = arena.warm(config.host_bytes if config.populate else WARM_BYTES)
        if config.populate:
            memory.populate()
        model = build_model(config, checkpoint, layout, device, weights_dtype)
        slots = HostSlots(arena.num_slots, make_policy(config.host_policy, arena.num_slots))
        settings = _scheduler_config(config, checkpoint, layout, num_blocks, self.max_length)
        self._tiers = OpenTiers.open(config.tiers, settings.namespace, arena)
        self._offload = OffloadManager(
            slots,
            config.blocks_per_chunk,
            len(layout.groups),
            below=self._tiers.below,
            store_after=config.store_after,
        )
        self._block_bytes = layout.block_bytes
        mover = Mover(
            lambda transfer: move(transfer, arena, memory),
            lambda: self._loop.wake(),
            self._tiers.movers(arena, memory),
            threads=THREADS,
        )
        self._streams = Streams(self.tokenizer, flush)
        self._loop = EngineLoop(
            Scheduler(settings, self._offload),
            self._offload,
            TorchExecutor(model, memory, mover.move),
            mover,
            self._streams.listen,
        )
        self._loop.lookups = self._lookups(settings)
        self._names = itertools.count(1)
        gc.collect()
        gc.freeze()  # the model's objects stay: spare the collector their scan
        warming.join()  # it would make the tiers seem slow
        for tier in self._tiers.below:
            tier.try_out()
        self._loop.start()
        self._loop.wait_for_jobs(TRY_S)

    def _lookups(self, settings: SchedulerConfig) -> Lookups | None:
        """What asks the tiers that take time for an answer, where there are such."""
        if not self._tiers.slow:
            return None
        per_chunk, num_groups = self.config.blocks_per_chunk, len(settings.groups)
        chunking = Chunking(settings.namespace, settings.block_size, per_chunk, num_groups)
        deadline_s = self.config.lookup_deadline_s
        loop = self._loop
        return Lookups(self._tiers.slow, chunking, deadline_s, loop.found, loop.ready)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt. Raises InputError for an empty one or for ids out of range."""
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        check_token_ids(prompt, self.tokenizer.vocab_size, "prompt")
        if not prompt:
            raise InputError("the prompt is empty: it must have at least one token", "prompt")
        return list(prompt)

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        priority: int = 0,
        cache_salt: str = "",
        fail_on_lost_kv: bool | None = None,
    ) -> list[str]:
        """Queue ``params.n`` sequences; their deltas go to ``sink``, on the engine's thread.

        Returns the sequences' names, for ``abort``. Raises InputError, QueueFull, EngineStopped.
        """
        tokens = self.encode(prompt)
        params = resolve(params, self.tokenizer, self.generation)
        assert params.seed is not None
        name = next(self._names)
        sequences = [
            (f"{name}.{index}", tokens, replace(params, seed=(params.seed + index) % (1 << 63)))
            for index in range(params.n)
        ]
        for index, (request_id, _, each) in enumerate(sequences):
            self._streams.open(request_id, index, each, sink)
        ids = [request_id for request_id, _, _ in sequences]
        try:
            self._loop.add(
                sequences,
                priority=priority,
                cache_salt=cache_salt,
                fail_on_lost_kv=fail_on_lost_kv,
            )
        except BaseException:
            self._streams.discard(ids)
            raise
        return ids

    def abort(self, names: Sequence[str]) -> None:
        """End these sequences; their last delta says "abort". No-op for those that have ended."""
        self._loop.end(names)

    def reset(self, tiers: Sequence[str] | None = None) -> None:
        """Forget all cached KV, on the device and in every tier; or that in the tiers named ("host",
        "file", ...) only. Raises InputError for a name that is none of theirs."""
        self._loop.reset(tiers)

    def stats(self) -> EngineStats:
        return self._loop.inspect(self._stats)  # type: ignore[no-any-return]

    def _stats(self, scheduler: Scheduler) -> EngineStats:
        pool, counters = scheduler.kv.pool, scheduler.counters
        slots, moved = self._offload.slots, self._offload.counters
        return EngineStats(
            running=scheduler.running,
            waiting=scheduler.waiting,
            loading=scheduler.loading,
            kv_blocks=pool.num_blocks,
            kv_blocks_in_use=pool.num_blocks - pool.available,
            kv_blocks_cached=pool.cached,
            host_slots=slots.num_slots,
            host_slots_in_use=slots.in_use,
            steps=counters.steps,
            failed_steps=counters.failed_steps,
            preemptions=counters.preemptions,
            prompt_tokens=dict(counters.prompt_tokens),
            generated_tokens=counters.generated_tokens,
            recomputed_tokens={c.value: n for c, n in counters.recomputed_tokens.items()},
            finished_requests={reason.value: n for reason, n in counters.finished.items()},
            transfers={
                "load_ok": moved.load_ok,
                "load_failed": moved.load_failed,
                "store_ok": moved.store_ok,
                "store_failed": moved.store_failed,
                "store_dropped": moved.store_dropped,
            },
            transfer_bytes={
                "load": moved.loaded_blocks * self._block_bytes,
                "store": moved.stored_blocks * self._block_bytes,
            },
            host_evictions=slots.evictions,
            tiers={tier.name: _figures(tier, self._offload) for tier in self._offload.below},
        )

    def tier_stats(self) -> dict[str, TierStats]:
        """What each tier below the host tier says of itself. May take a tier's I/O."""
        return self._tiers.stats()

    def close(self) -> str:
        """Abort what is unfinished, let the host tier's chunks go below, and stop. Can be called twice.

        Returns a sentence per tier on what it keeps, or an empty string where there is none.
        """
        before = {tier.name: tier.counters.write_ok for tier in self._offload.below}
        self._loop.close(self.config.close_s)
        kept = self._tiers.close()
        sentences = [
            _kept(tier.name, kept.get(tier.name), tier.counters.write_ok - before[tier.name])
            for tier in self._offload.below
        ]
        sentences += [
            f"The {name} tier could not be emptied, as a reset had asked: the next server will find "
            f"what it keeps."
            for name in self._offload.uncleared
        ]
        return "\n".join(sentences)


def _kept(name: str, stats: TierStats | None, written: int) -> str:
    """What a tier keeps at the end, of which ``written`` chunks are new. Not all count what they keep."""
    if stats is None:
        return f"The {name} tier does not answer, and was left behind."
    if stats.state.startswith("down"):
        return f"The {name} tier is {stats.state}; {written} chunks were written at the end."
    if stats.chunks < written or not stats.chunks:
        return f"The {name} tier was given {written} chunks at the end."
    size = f"{stats.chunks} chunks ({stats.bytes / MIB:.1f} MiB)"
    return f"The {name} tier keeps {size}, {written} of them written at the end."


def _figures(tier: Below, offload: OffloadManager) -> TierFigures:
    counters = tier.counters
    return TierFigures(
        reads={"ok": counters.read_ok, "failed": counters.read_failed},
        writes={
            "ok": counters.write_ok,
            "failed": counters.write_failed,
            "dropped": counters.write_dropped,
        },
        left_alone=counters.left_alone,
        chunk_seconds=tier.chunk_seconds,
        compute_seconds=offload.compute_seconds,
    )


def _max_length(config: EngineConfig, checkpoint: Checkpoint) -> int:
    trained = checkpoint.config.max_length
    if config.max_length is None:
        return trained
    if config.max_length > trained:
        raise InputError(
            f"max_length is {config.max_length}, but the model was trained for {trained} positions",
            "max_length",
        )
    return config.max_length


def _num_blocks(config: EngineConfig, layout: KVLayout, device: Any) -> int:
    num_blocks = config.kv_bytes // layout.block_bytes
    if num_blocks < 2 * len(layout.groups):
        raise InputError(
            f"kv_bytes is {readable_bytes(config.kv_bytes)}, and one KV block takes "
            f"{readable_bytes(layout.block_bytes)}: ask for at least "
            f"{readable_bytes(2 * len(layout.groups) * layout.block_bytes)}",
            "kv_bytes",
        )
    asked = config.kv_bytes + (config.host_bytes if device.type == "cpu" else 0)
    available = _available_bytes(device)
    if available is not None and asked > available:
        what = "kv_bytes and host_bytes together ask" if device.type == "cpu" else "kv_bytes asks"
        raise InputError(
            f"{what} for {readable_bytes(asked)}, but {readable_bytes(available)} of memory are "
            f"available: ask for less",
            "kv_bytes",
        )
    return num_blocks


def _available_bytes(device: Any) -> int | None:
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None  # not Linux: the system will say no when it must
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _arena(config: EngineConfig, layout: KVLayout) -> Arena:
    slot_bytes = slot_bytes_for(layout.block_bytes, config.blocks_per_chunk)
    if 0 < config.host_bytes < slot_bytes:
        raise InputError(
            f"host_bytes is {readable_bytes(config.host_bytes)}, but one chunk takes "
            f"{readable_bytes(slot_bytes)}: give it more, or 0 to turn it off",
            "host_bytes",
        )
    return Arena(config.host_bytes // slot_bytes, config.blocks_per_chunk, layout.block_bytes)


def _scheduler_config(
    config: EngineConfig,
    checkpoint: Checkpoint,
    layout: KVLayout,
    num_blocks: int,
    length_max: int,
) -> SchedulerConfig:
    meaning = f"{layout.describe()} chunk={config.blocks_per_chunk}".encode()
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=config.block_size,
        groups=layout.groups,
        length_max=length_max,
        batch_max=min(config.max_batch, config.max_step_tokens),  # so that all decode in a step
        step_tokens_max=config.max_step_tokens,
        waiting_max=config.max_waiting,
        overlap=config.overlap,
        sync_load_blocks_max=config.sync_load_bytes_max // layout.block_bytes,
        load_deadline_s=config.load_deadline_s,
        max_step_retries=config.max_step_retries,
        fail_on_lost_kv=config.on_lost_kv == "fail",
        namespace=blake2b(checkpoint.identity + meaning, digest_size=32).digest(),
    )
