"""``ebbtide generate``: what a line may say, and that no line harms another."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbtide.cli.batch import checked, params_of, run_batch
from ebbtide.engine.config import MIB, EngineConfig
from ebbtide.errors import InputError
from ebbtide.params import RepetitionStop, SamplingParams
from ebbtide.server.body import parse_object

CONFIG = EngineConfig(dtype="float32", threads=1, kv_bytes=40 * MIB, host_bytes=0, max_length=512)


def read(line: str) -> dict[str, Any]:
    return checked(parse_object(line, "the line"))


def test_a_line_says_its_parameters() -> None:
    asked = read(
        '{"prompt": "x", "max_tokens": 3, "stop": "a", "stop_token_ids": [5], "seed": 1, '
        '"logit_bias": {"7": 2.5}, "repetition": {"max_pattern_size": 3, "min_count": 4}}'
    )
    assert params_of(asked) == SamplingParams(
        max_tokens=3,
        stop=("a",),
        stop_token_ids=frozenset({5}),
        seed=1,
        logit_bias={7: 2.5},
        repetition=RepetitionStop(3, 4),
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "not the JSON wanted"),
        ("[1]", "must be an object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"id": NaN, "prompt": "x"}', "NaN is no JSON number"),
        ('{"id": "\\ud800", "prompt": "x"}', "surrogate"),
        ('{"prompt": "x", "prompt": "y"}', "stands twice"),
        ("{}", "prompt or messages, and not both"),
        ('{"prompt": "x", "messages": []}', "prompt or messages, and not both"),
        ('{"prompt": "x", "temperatur": 1}', "did you mean temperature"),
        ('{"prompt": 5}', "prompt must be"),
        ('{"prompt": ["x"]}', "prompt must be"),
        ('{"messages": "hi"}', "messages must be"),
        ('{"messages": [{"role": "user"}]}', "content must be"),
        ('{"messages": [{"role": "king", "content": "x"}]}', "role must be"),
    ],
)
def test_bad_lines(line: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(line)


@pytest.mark.parametrize(
    "said",
    [
        {"stop": 5},
        {"logit_bias": {"a": 1}},
        {"logit_bias": [1]},
        {"stop_token_ids": 3},
        {"repetition": {"size": 1}},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"temperature": 10**400},
        {"max_tokens": -1},
        {"ignore_eos": "yes"},
    ],
)
def test_bad_parameters(said: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(said))}|too large"):
        params_of(said)


def test_null_means_not_said() -> None:
    asked = {"prompt": "x", "n": None, "max_tokens": None, "stop": None, "repetition": None}
    assert params_of(asked) == SamplingParams()


def test_a_file_is_completed_and_bad_lines_get_their_own_record(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"id": "a", "prompt": "The sea is", "max_tokens": 4, "temperature": 0},
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0},
        {"id": "c", "prompt": "", "colour": 1},
        {"prompt": "x", "n": 2, "max_tokens": 2, "logprobs": 1},
        {"prompt": [5] * 600},
    ]
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\nnonsense\n")
    assert run_batch(CONFIG, str(source), str(target)) == 3
    records = {r["line"]: r for r in map(json.loads, target.read_text().splitlines())}
    assert set(records) == {1, 2, 3, 4, 5, 7}
    assert records[1]["id"] == "a"
    assert records[1]["finish_reason"] == "length"
    assert len(records[1]["token_ids"]) == 4
    assert records[2]["usage"]["completion_tokens"] <= 3
    assert records[3]["id"] == "c", "also of a line that cannot be understood"
    assert "colour is not a field" in records[3]["error"]
    assert len(records[4]["completions"]) == 2
    assert "600 tokens" in records[5]["error"]
    assert "JSON" in records[7]["error"]
    with pytest.raises(InputError, match="--overwrite"):
        run_batch(CONFIG, str(source), str(target))
    with pytest.raises(InputError, match="is the input itself"):
        run_batch(CONFIG, str(target), str(target.parent / "." / target.name), overwrite=True)
    assert len(target.read_text().splitlines()) == 6  # nothing that was there is lost


# Ctrl-C after the first line was written, with an engine that takes a minute for the second.
INTERRUPTED = """
import os, signal
from ebbtide.cli import batch, main
from tests.server.fake import FakeEngine

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
engine = FakeEngine(lambda text, index: "x" * 3000)
engine.delay_s = 0.02
batch.AsyncEngine.start = lambda config, progress: engine
write = batch._Batch._write

def writing(self, record):
    write(self, record)
    if self.written == 1:
        os.kill(os.getpid(), signal.SIGINT)

batch._Batch._write = writing
main.main()
"""


def test_ctrl_c_says_how_many_lines_are_done(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = ["nonsense", '{"prompt": "x", "max_tokens": 3000}']
    source.write_text("\n".join(lines))
    command = [sys.executable, "-c", INTERRUPTED, "generate", "-i", source, "-o", target]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == f"ebbtide: stopped; 1 of 2 lines are done, in {target}\n"
    assert len(target.read_text().splitlines()) == 1


def test_no_empty_output_stays_behind(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x"}')
    with pytest.raises(InputError, match="no model"):
        run_batch(replace(CONFIG, model="/no/such.gguf"), str(source), str(target))
    assert not target.exists()
