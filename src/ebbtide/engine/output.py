"""What a request's owner receives: a stream of deltas, the last of which says how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from ebbtide.core.plan import TokenLogprob


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one completion. ``cached_tokens + computed == prompt_tokens`` always.

    device: prompt tokens whose KV was found on the device. host: loaded from the host tier. tiers:
    loaded from the tiers below it, by tier. computed: computed for this request. The recomputed ones come
    on top: positions computed once more after a preemption or after a failure.
    """

    prompt_tokens: int
    completion_tokens: int
    device: int
    host: int
    computed: int
    recomputed_preempted: int = 0
    recomputed_failed: int = 0
    tiers: dict[str, int] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        return self.device + self.host + sum(self.tiers.values())


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of completion ``index`` (0 .. n-1) of a request.

    text: new text, never part of a stop string and never half a character. Tokens and text may
    come in different deltas, since text is held back until it is certain. On the last delta of
    a completion ``finish_reason`` (stop, length, repetition, abort, error) and ``usage`` are set;
    ``error`` is a sentence where the reason is "error".
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TierFigures:
    """A tier below the host tier, in chunks since the start. left_alone: blocks that it had, but that
    were computed, since reading them was slower: ``chunk_seconds`` is what one of its threads takes to
    read a chunk, ``compute_seconds`` what computing one takes (None: not measured yet)."""

    reads: dict[str, int]  # ok, failed
    writes: dict[str, int]  # ok, failed, dropped
    left_alone: int
    chunk_seconds: float | None
    compute_seconds: float | None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's gauges and counters at one moment. Counters never go down."""

    # gauges
    running: int
    waiting: int
    loading: int
    kv_blocks: int
    kv_blocks_in_use: int
    kv_blocks_cached: int  # free, but still holding reusable KV
    host_slots: int
    host_slots_in_use: int
    # counters
    steps: int
    failed_steps: int
    preemptions: int
    prompt_tokens: dict[str, int]  # by source: device, host, computed, and the tiers by name
    generated_tokens: int
    recomputed_tokens: dict[str, int]  # by cause: preempted, failed
    finished_requests: dict[str, int]  # by reason
    transfers: dict[str, int]  # load_ok, load_failed, store_ok, store_failed, store_dropped
    transfer_bytes: dict[str, int]  # load, store
    host_evictions: int
    tiers: dict[str, TierFigures] = field(default_factory=dict)
