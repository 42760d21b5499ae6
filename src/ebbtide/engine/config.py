"""The engine's settings: one frozen value, validated when built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from ebbtide.errors import InputError
from ebbtide.offload.policies import DEFAULT_POLICY

DEFAULT_MODEL = "smollm2-135m-instruct"
MIB = 1 << 20
THREADS_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes are in bytes where a name says so. Raises ``InputError`` for values that cannot work.

    model: a GGUF file, a Hugging Face directory, a hub id, or the default model's name.
    dtype: of KV and activations: "bfloat16", "float32", or "auto" (bfloat16 where the CPU computes in it).
    weights: "packed" (4-bit integers, as a GGUF file has them), "bfloat16", "float32", or "auto": in
    ``dtype``, and beside that packed, for steps of few tokens, where that is faster and the file allows it.
    kernels: "native", compiled on this machine when it first starts, for x86-64: in float32 with AVX2, in
    bfloat16 with AVX-512 BF16 and heads of a multiple of 64; "torch"; or "auto": native where that is
    possible, and there is gcc.
    kv_bytes: device memory for KV blocks. host_bytes: host tier below it; 0 turns it off.
    populate: take all of both from the system at the start, not as it is first used. That can make a start
    take seconds longer, and the first requests faster: on a virtual machine whose host gives memory late.
    max_length: positions per request at most (None: what the model was trained for).
    blocks_per_chunk: a prefix comes back from the host tier in steps of this many blocks, so small
    ones waste less of it; large ones cost fewer copies.
    overlap: plans in flight. With 2, the host's work hides behind the device's; what it costs is one
    row per request, fed in vain after its end.
    sync_load_bytes_max: loads up to this size run inside the step, larger ones beside it.
    host_policy: who leaves the host tier when it is full: lru, arc, s3fifo or mq (docs/eviction.md).
    tiers: URLs of the tiers below the host tier, nearest first (docs/tiers.md), such as
    "file:///var/cache/kv?size=20GiB&write=write-through".
    store_after: KV leaves the device when so many requests have had it; 2 keeps prompts that are seen
    once out of all tiers.
    lookup_deadline_s: a request waits so long at most to hear what remote tiers have of its prompt.
    close_s: the end takes so long at most, for what is in flight and what is to be kept.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    weights: str = "auto"
    kernels: str = "auto"
    device: str = "auto"
    threads: int | None = None
    block_size: int = 16
    blocks_per_chunk: int = 2
    kv_bytes: int = 512 * MIB
    host_bytes: int = 1024 * MIB
    populate: bool = False
    max_length: int | None = None
    max_batch: int = 256
    max_step_tokens: int = 512
    max_waiting: int = 4096
    overlap: int = 2
    sync_load_bytes_max: int = 8 * MIB
    load_deadline_s: float = 30.0
    max_step_retries: int = 3
    on_lost_kv: str = "recompute"
    host_policy: str = DEFAULT_POLICY
    tiers: Sequence[str] = ()
    store_after: int = 1
    lookup_deadline_s: float = 0.1
    close_s: float = 10.0

    def __post_init__(self) -> None:
        choices = {
            "dtype": ("auto", "bfloat16", "float32"),
            "weights": ("auto", "packed", "bfloat16", "float32"),
            "kernels": ("auto", "native", "torch"),
            "on_lost_kv": ("recompute", "fail"),
            "overlap": (1, 2),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                options = ", ".join(map(str, allowed))
                raise InputError(
                    f"{name} must be one of {options}; got {getattr(self, name)!r}", name
                )
        minimum = {
            "block_size": 1,
            "blocks_per_chunk": 1,
            "kv_bytes": 1,
            "host_bytes": 0,
            "max_batch": 1,
            "max_step_tokens": 1,
            "max_waiting": 1,
            "sync_load_bytes_max": 0,
            "max_step_retries": 0,
            "store_after": 1,
            "max_length": 2,
            "threads": 1,
        }
        for name, low in minimum.items():
            value = getattr(self, name)
            if value is None and name in ("max_length", "threads"):
                continue
            if not isinstance(value, Integral):
                raise InputError(f"{name} must be an integer, got {value!r}", name)
            if value < low:
                raise InputError(f"{name} must be at least {low}, got {value}", name)
        if self.threads is not None and self.threads > THREADS_MAX:
            raise InputError(
                f"threads must be {THREADS_MAX} at most, got {self.threads}", "threads"
            )
        if isinstance(self.tiers, str):
            raise InputError(f"tiers must be a list of URLs, got one text: {self.tiers!r}", "tiers")
        for name in ("load_deadline_s", "lookup_deadline_s", "close_s"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 < value <= 1e6:
                raise InputError(f"{name} must be above 0, and 1e6 at most, got {value!r}", name)
