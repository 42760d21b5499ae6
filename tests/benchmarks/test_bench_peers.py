"""How the figures of several engines become ratios, and an engine that ends is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import bench_peers

    yield bench_peers
    sys.modules.pop("bench_peers", None)


def test_a_ratio_says_how_many_times_better_we_are(bench: Any) -> None:
    """Also where less is better; the median of the rounds' ratios, not the ratio of medians."""
    assert bench.against("prefill 128", [10.0, 30.0, 20.0], [5.0, 10.0, 20.0]) == "2.00"
    assert bench.against("start, s", [1.0, 2.0, 1.0], [4.0, 4.0, 2.0]) == "2.00"
    assert bench.against("prefill 128", [10.0], None) == "-"


def test_targets_are_told_as_reached_or_missed_and_only_those_given(bench: Any) -> None:
    """The targets are one model's; another is measured without."""
    values = {"ebbtide": (11.0, 3.0), "vllm": (10.0, 12.0)}
    cases = "prefill 1024", "turns, first token, ms"
    figures = {
        engine: bench.Figures({case: [v] for case, v in zip(cases, found, strict=True)})
        for engine, found in values.items()
    }
    told = bench.table_of("", figures, bench.TARGETS).columns[-1].cells
    assert list(told) == ["1.10 of 1.0 ok", "4.00 of 5.0 MISSED"]
    assert list(bench.table_of("", figures, {}).columns[-1].cells) == ["1.10", "4.00"]


def test_prompts_are_the_same_for_all_engines_and_new_in_each_round(bench: Any) -> None:
    assert bench.prompts(100, 2, 8, 1) == bench.prompts(100, 2, 8, 1)
    assert bench.prompts(100, 2, 8, 1) != bench.prompts(100, 2, 8, 2)


def test_an_engine_that_ends_is_told_with_its_last_words(bench: Any, tmp_path: Path) -> None:
    settings = {"model": "no/such/model.gguf", "threads": 1, "kv_bytes": 1, "host_bytes": 0}
    worker = bench.Worker("ebbtide", settings, sys.executable, tmp_path / "log")
    try:
        with pytest.raises(SystemExit, match=r"no/such/model\.gguf"):
            worker.run([([1], 1)], 1)
    finally:
        worker.close()
