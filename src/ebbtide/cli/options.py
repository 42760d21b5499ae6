"""Options that several commands share: the engine's settings, said once."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from ebbtide.engine.config import DEFAULT_MODEL, EngineConfig
from ebbtide.errors import InputError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
DEFAULTS = EngineConfig()


class Failure(Exception):
    """The command could not do its work. Its text is a sentence."""


def parse_bytes(text: str, name: str) -> int:
    """ "512MiB", "2GB", "1.5 gib", "0" -> bytes. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in UNITS:
        raise InputError(f"{name} must be a size such as 512MiB or 2GiB, got {text!r}", name)
    return int(float(match[1]) * UNITS[match[2]])


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine's settings as the command line said them."""

    config: EngineConfig


def _settings(
    model: Annotated[
        str, typer.Option(help="A GGUF file, a Hugging Face directory, or a hub id.")
    ] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = DEFAULTS.dtype,
    weights: Annotated[
        str, typer.Option(help="auto, packed, bfloat16, float32.")
    ] = DEFAULTS.weights,
    kernels: Annotated[str, typer.Option(help="auto, native or torch.")] = DEFAULTS.kernels,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = DEFAULTS.device,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the model.")] = None,
    kv_memory: Annotated[str, typer.Option(help="Device memory for KV, such as 2GiB.")] = "512MiB",
    host_memory: Annotated[
        str, typer.Option(help="Host memory that KV spills to; 0 turns it off.")
    ] = "1GiB",
    populate: Annotated[
        bool, typer.Option("--populate", help="Take this memory at the start, not when it is used.")
    ] = DEFAULTS.populate,
    host_policy: Annotated[
        str, typer.Option(help="Who leaves the host tier when it is full: lru, arc, s3fifo or mq.")
    ] = DEFAULTS.host_policy,
    block_size: Annotated[int, typer.Option(help="Positions per KV block.")] = DEFAULTS.block_size,
    blocks_per_chunk: Annotated[
        int, typer.Option(help="Blocks that spill together.")
    ] = DEFAULTS.blocks_per_chunk,
    max_length: Annotated[
        int | None, typer.Option(help="Longest prompt and output together; default: the model's.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Requests run together.")] = DEFAULTS.max_batch,
    max_step_tokens: Annotated[
        int, typer.Option(help="Tokens fed per step: the size of prefill chunks.")
    ] = DEFAULTS.max_step_tokens,
    overlap: Annotated[int, typer.Option(help="Steps in flight: 1 or 2.")] = DEFAULTS.overlap,
    on_lost_kv: Annotated[
        str, typer.Option(help="recompute, or fail the requests whose KV was lost.")
    ] = DEFAULTS.on_lost_kv,
    store_after: Annotated[
        int, typer.Option(help="KV is kept when so many requests have had it.")
    ] = DEFAULTS.store_after,
) -> EngineConfig:
    return EngineConfig(
        model=model,
        dtype=dtype,
        weights=weights,
        kernels=kernels,
        device=device,
        threads=threads,
        kv_bytes=parse_bytes(kv_memory, "--kv-memory"),
        host_bytes=parse_bytes(host_memory, "--host-memory"),
        populate=populate,
        host_policy=host_policy,
        block_size=block_size,
        blocks_per_chunk=blocks_per_chunk,
        max_length=max_length,
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        overlap=overlap,
        on_lost_kv=on_lost_kv,
        store_after=store_after,
    )


def tier_urls(
    disk: Annotated[
        str | None, typer.Option(help="A directory for KV that outlives the process.")
    ] = None,
    disk_size: Annotated[
        str | None, typer.Option(help="What it may take there.", show_default="20GiB")
    ] = None,
    disk_write: Annotated[
        str | None,
        typer.Option(
            help="When KV goes there: write-through, on-evict or off.",
            show_default="write-through",
        ),
    ] = None,
    valkey: Annotated[
        str | None, typer.Option(help="A Valkey or Redis server for KV: valkey://host:6379/0.")
    ] = None,
    object: Annotated[
        str | None, typer.Option(help="An object store for KV: s3://bucket/prefix, gs://, az://.")
    ] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help="Any further tier, by its URL; may be repeated.")
    ] = None,
) -> tuple[str, ...]:
    """URLs of the tiers that the options name, nearest first."""
    urls = []
    if disk == "":
        raise InputError("--disk is empty: name a directory", "disk")
    settings = {"size": disk_size, "write": disk_write}
    if disk is None and any(value is not None for value in settings.values()):
        raise InputError("--disk-size and --disk-write are for --disk: name a directory", "disk")
    if disk is not None:
        said = urlencode({name: value for name, value in settings.items() if value is not None})
        path = quote(str(Path(disk).expanduser().absolute()))
        urls.append(f"file://{path}?{said}" if said else f"file://{path}")
    if valkey is not None:
        urls.append(valkey)
    if object is not None:
        urls.append(f"object+{object}" if object.startswith("file:") else object)
    return (*urls, *(tier or ()))


FLAGS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *inspect.signature(_settings).parameters,
        *inspect.signature(tier_urls).parameters,
        *("max_tokens", "temperature", "seed"),
    )
} | {"kv_bytes": "--kv-memory", "host_bytes": "--host-memory"}
_WORDS = re.compile(rf"\b({'|'.join(name for name in FLAGS if '_' in name)})\b")
_START = re.compile(rf"\A({'|'.join(FLAGS)}) must be\b")


def with_flags(message: str) -> str:
    """A message about a setting, with the option that sets it in place of the setting's name."""
    message = _START.sub(lambda found: f"{FLAGS[found[1]]} must be", message)
    return _WORDS.sub(lambda found: FLAGS[found[1]], message)


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the engine's options; it gets them together, as ``engine``."""
    signature = inspect.signature(command, eval_str=True)
    ours = [inspect.signature(part, eval_str=True).parameters for part in (_settings, tier_urls)]
    own = [p for name, p in signature.parameters.items() if name != "engine"]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        settings, tiers = ({name: given.pop(name) for name in part} for part in ours)
        config = replace(_settings(**settings), tiers=tier_urls(**tiers))
        command(engine=EngineOptions(config), **given)

    shared = [p for part in ours for p in part.values()]
    everything = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *shared)]
    wrapped.__signature__ = signature.replace(parameters=everything)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in everything}
    return wrapped
