"""What the demo prints, for turns that were not played."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ebbtide.cli import demo, demo_restart
from ebbtide.cli.options import Failure
from ebbtide.engine.output import Usage


@pytest.mark.parametrize(("width", "has_answers"), [(80, False), (114, False), (115, True)])
def test_a_turn_takes_one_whole_line_at_any_width(width: int, has_answers: bool) -> None:
    answer = "On day 3, Dalia was on duty, and Emre helped them."
    turn = demo.Turn("observatory", 3, 61.992, answer, Usage(1_031, 20, 1_016, 1_976, 2_039))
    table = demo._turn_table("KV", width >= demo.WIDTH_FOR_ANSWERS, "host")
    demo._add_row(table, turn)
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (row,) = [line for line in lines if "observatory" in line]
    for cell in ("61,992 ms", "1,031", "1,016", "1,976", "2,039"):
        assert f" {cell} " in row
    assert any("conversation" in line and "computed" in line for line in lines)
    assert any("On day 3" in line for line in lines) == has_answers


def test_a_server_that_cannot_start_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"did not start: ebbtide: .*no/such\.gguf"):
        demo_restart.Server(["--model", "no/such.gguf"], tmp_path / "log")


def test_the_usage_of_a_tier_is_read_back() -> None:
    said = {
        "prompt_tokens": 100,
        "completion_tokens": 5,
        "prompt_tokens_details": {
            "cached_tokens": 90,
            "device": 10,
            "host": 30,
            "file": 50,
            "computed": 10,
        },
    }
    assert demo_restart._usage(said) == Usage(100, 5, 10, 30, 10, tiers={"file": 50})


def test_a_demo_that_is_told_to_end_takes_its_server_along(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By SIGTERM, as by Ctrl-C."""
    killed: list[str] = []

    class Started:
        def __init__(self, arguments: list[str], log: Path) -> None:
            self.folder = log.parent

        def kill(self) -> None:
            killed.append(str(self.folder))

    monkeypatch.setattr(demo_restart, "Server", Started)
    before = signal.getsignal(signal.SIGTERM)
    folders: list[Path] = []

    def play() -> None:
        with demo_restart.lives([]) as servers:
            folders.append(next(servers).folder)  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()

    with pytest.raises(SystemExit) as ended:
        play()
    assert ended.value.code == 128 + signal.SIGTERM
    assert killed == list(map(str, folders))
    assert not folders[0].exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_server_that_is_still_starting_is_taken_along_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[0]

    def told_to_end(_: float) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(demo_restart.time, "sleep", told_to_end)
    with pytest.raises(SystemExit):
        demo_restart.Server([], tmp_path / "log")
    assert started[0].poll() == -signal.SIGKILL
