"""Options that several commands share: the engine's settings, said once."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

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
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = DEFAULTS.device,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the model.")] = None,
    kv_memory: Annotated[str, typer.Option(help="Device memory for KV, such as 2GiB.")] = "512MiB",
    host_memory: Annotated[
        str, typer.Option(help="Host memory that KV spills to; 0 turns it off.")
    ] = "1GiB",
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
) -> EngineConfig:
    return EngineConfig(
        model=model,
        dtype=dtype,
        device=device,
        threads=threads,
        kv_bytes=parse_bytes(kv_memory, "--kv-memory"),
        host_bytes=parse_bytes(host_memory, "--host-memory"),
        block_size=block_size,
        blocks_per_chunk=blocks_per_chunk,
        max_length=max_length,
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        overlap=overlap,
        on_lost_kv=on_lost_kv,
    )


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the engine's options; it gets them together, as ``engine``."""
    signature = inspect.signature(command, eval_str=True)
    shared = inspect.signature(_settings, eval_str=True).parameters
    own = [p for name, p in signature.parameters.items() if name != "engine"]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        config = _settings(**{name: given.pop(name) for name in shared})
        command(engine=EngineOptions(config), **given)

    everything = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *shared.values())]
    wrapped.__signature__ = signature.replace(parameters=everything)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in everything}
    return wrapped
