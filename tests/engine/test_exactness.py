"""The conversations of ``benchmarks/exactness.py``, a few of them, on small random models."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.models import tiny_files

from ebbtide.engine.config import EngineConfig
from ebbtide.engine.llm import LLM

SHARP = {
    "initializer_range": 0.3,  # so that wrong KV changes tokens
    "max_position_embeddings": 2048,
    "vocab_size": len(tiny_files.byte_level_vocabulary()),  # every token can be said again
}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 33,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": WINDOWS}  # one KV group, and four


@pytest.fixture(scope="module")
def exactness() -> Iterator[ModuleType]:
    directory = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, directory)
    import exactness

    yield exactness
    sys.path.remove(directory)


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory, exactness):  # type: ignore[no-untyped-def]
    """What to give ``run_all``: the reference's conversations, and the settings of the engines."""
    torch.set_num_threads(1)
    made = tiny_files.model(request.param, **SHARP, **MODELS[request.param])
    path = tiny_files.write_directory(tmp_path_factory.mktemp(request.param), made)
    plain = {
        "model": str(path),
        "dtype": "float32",
        "device": "cpu",
        "max_length": 2048,
        "block_size": 4,
    }
    traffic = exactness.Traffic(
        conversations=14, turns=(1, 2), rules=(0, 0), max_tokens=(24, 48), stems=3
    )
    with LLM(**plain, overlap=1, host_bytes=0, max_step_tokens=2048) as llm:
        conversations = exactness.reference(llm, traffic, random.Random(3), steady_only=True)
        memory = exactness.too_little_memory(llm, conversations, engines=2, spare=6)
    if MODELS[request.param]:
        memory["kv_bytes"] = memory["kv_bytes"] * 2 // 3  # a window's groups hold less
    config = EngineConfig(**plain, **memory, max_step_tokens=32, load_deadline_s=0.2)  # type: ignore[arg-type]
    return conversations, config


RATES = {"load_late": 0.02, "step_before": 0.01, "step_after": 0.01, "slow": 0.02, "abort": 0.2}
MET = (  # whatever the threads' timing
    "prompt_tokens.device",
    "prompt_tokens.host",
    "transfers.load_ok",
    "transfers.store_failed",
    "failed_steps",
    "recomputed_tokens.failed",
    "finished_requests.abort",
    "host_evictions",
)


def test_tokens_are_the_same_whatever_fails(exactness: ModuleType, served) -> None:  # type: ignore[no-untyped-def]
    conversations, config = served
    rates = exactness.Rates(**RATES)
    tally, _ = exactness.run_all(conversations, config, (0, 1 << 20), rates, random.Random(3))
    assert tally.problems == []
    assert tally.turns == 2 * sum(map(len, conversations))
    assert all(tally.counters[name] for name in MET), tally.counters


def test_garbage_that_nobody_reports_is_found(exactness: ModuleType, served, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    conversations, config = served
    monkeypatch.setattr(exactness, "blocks_read", lambda *_: [])
    rates = exactness.Rates(load_garbage=0.9, load_error=0.01, slow=0.02)
    tally, faults = exactness.run_all(conversations, config, (1 << 20,), rates, random.Random(3))
    assert faults["load_garbage"] > 0
    assert tally.differences > 0


def test_a_run_that_has_not_met_a_fault_says_so(exactness: ModuleType) -> None:
    tally = exactness.Tally()
    _, problems = exactness.verdict(tally, tally.counters)
    assert any("load_garbage" in problem for problem in problems)
    assert any("recomputed_tokens.preempted" in problem for problem in problems)
