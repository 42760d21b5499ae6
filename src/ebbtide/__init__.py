"""Ebbtide: an LLM inference engine whose KV cache is larger than the device's memory.

>>> from ebbtide import LLM, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide.engine.async_engine import AsyncEngine
    from ebbtide.engine.config import EngineConfig
    from ebbtide.engine.llm import LLM, Completion
    from ebbtide.engine.output import Delta, Usage
    from ebbtide.errors import EngineStopped, InputError, QueueFull
    from ebbtide.params import RepetitionStop, SamplingParams

_HOME = {
    "AsyncEngine": "ebbtide.engine.async_engine",
    "Completion": "ebbtide.engine.llm",
    "Delta": "ebbtide.engine.output",
    "EngineConfig": "ebbtide.engine.config",
    "EngineStopped": "ebbtide.errors",
    "InputError": "ebbtide.errors",
    "LLM": "ebbtide.engine.llm",
    "QueueFull": "ebbtide.errors",
    "RepetitionStop": "ebbtide.params",
    "SamplingParams": "ebbtide.params",
    "Usage": "ebbtide.engine.output",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "Completion",
    "Delta",
    "EngineConfig",
    "EngineStopped",
    "InputError",
    "QueueFull",
    "RepetitionStop",
    "SamplingParams",
    "Usage",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``import ebbtide`` alone is instant."""
    if name not in _HOME:
        raise AttributeError(f"module 'ebbtide' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
