"""The engine with a real model and a tier that outlives it. Float32, so that tokens are exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.engine.config import MIB, EngineConfig
from ebbtide.engine.llm import LLM
from ebbtide.errors import InputError
from ebbtide.offload.below import Below
from ebbtide.params import SamplingParams

PROMPTS = [f"Story number {n}. " + f"Once there were {n} ships. " * 12 for n in range(2)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def open_llm(*tiers: str) -> LLM:
    return LLM(
        dtype="float32",
        threads=1,
        kv_bytes=40 * MIB,
        host_bytes=100 * MIB,
        max_length=512,
        tiers=tiers,
    )


def test_another_engine_on_the_same_directory_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading pays, however fast this machine computes just now; when it does is for tests/offload."""
    monkeypatch.setattr(Below, "pays", lambda self, key, compute_seconds: True)
    url = f"file://{tmp_path}?size=1GiB&floor=0&write=on-evict"
    with open_llm(url) as llm:
        first = llm.generate(PROMPTS, GREEDY)
    with open_llm(url) as llm:
        again = llm.generate(PROMPTS, GREEDY)
        figures = llm.stats().tiers["file"]
        llm.reset(["host", "file"])
        with pytest.raises(InputError, match="no tier 'tape': there are host, file"):
            llm.reset(["tape"])
    assert [c.token_ids for c in again] == [c.token_ids for c in first]
    for done in again:
        usage = done.usage
        assert usage is not None
        assert usage.tiers["file"] > 0.6 * usage.prompt_tokens
        assert usage.cached_tokens + usage.computed == usage.prompt_tokens
    assert figures.reads["ok"] > 0
    assert figures.reads["failed"] == 0
    assert not list(tmp_path.rglob("*.kv"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tiers": ["tape:///x"]}, "no tier is known for tape://"),
        ({"tiers": ["file:///proc/nowhere"]}, "/proc/nowhere"),
        (
            {"tiers": ["file:///tmp/x?write=never"]},
            "write must be one of write-through, on-evict, off",
        ),
        ({"tiers": ["file:///tmp/x"], "host_bytes": 0}, "need one"),
        ({"tiers": "file:///tmp/x"}, "must be a list of URLs"),
        ({"host_policy": "mru"}, "choose one of lru, arc"),
        ({"store_after": 0}, "store_after must be at least 1"),
    ],
)
def test_what_cannot_work_is_one_sentence(settings: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        LLM(**{"kv_bytes": 40 * MIB, "host_bytes": 100 * MIB, "threads": 1, **settings})


def test_tiers_can_be_given_as_any_sequence() -> None:
    assert list(EngineConfig(tiers=["a://b"]).tiers) == ["a://b"]
