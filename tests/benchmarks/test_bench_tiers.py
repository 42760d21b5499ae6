"""``make bench-tiers`` on a small scale: what it measures is there, and adds up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "bench_tiers.py"
SMALL = "--sizes-kib 256 --round-mib 1 --rounds 2 --batch 2 --threads 2 --chunks 100 --files 300"


def measured(folder: Path, *parts: str, **environment: str) -> tuple[str, dict[str, Any]]:
    command = [sys.executable, str(PROGRAM), *SMALL.split(), "--only", *parts]
    command += ["--dir", str(folder), "--json", str(folder / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / "out.json").read_text())
    (folder / "out.json").unlink()
    assert not list(folder.iterdir()), "something is left behind"
    return done.stdout, results


def test_host_file_index_and_start(tmp_path) -> None:
    text, results = measured(tmp_path, "host", "file", "index", "start")
    assert [row["action"] for row in results["host"]] == ["store", "load"]
    assert [row["action"] for row in results["file"]] == ["store", "load", "replace"]
    for row in results["host"] + results["file"]:
        assert row["shape"]["chunks"] == 4
        assert len(row["tier_s"]) == len(row["limit_s"]) == 2
        assert min(row["tier_s"] + row["limit_s"]) > 0
    assert set(results["index"]) == {"lru", "arc", "s3fifo", "mq"}
    assert all(250 < cost["bytes"] < 1000 for cost in results["index"].values())
    assert len(results["start"]) == 3
    assert all(start["opened"] <= start["loaded"] for start in results["start"])
    assert "300 files" in text


@pytest.mark.skipif(not shutil.which("redis-server"), reason="needs redis-server")
def test_valkey(tmp_path) -> None:
    _, results = measured(tmp_path, "valkey")
    assert [row["action"] for row in results["valkey"]] == ["store", "load"]


def test_what_cannot_be_measured_is_skipped_with_a_reason(tmp_path) -> None:
    text, results = measured(tmp_path, "valkey", "start", "--files", str(10**12), PATH="/nowhere")
    assert "valkey: skipped" in text
    assert "apt-get install redis-server" in text
    assert "start: skipped" in text
    assert "use fewer (--files)" in text
    assert set(results) == {"load"}
