"""Sizes, shared options, and the exit codes of the command line."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import pytest

from ebbtide.cli import main as cli
from ebbtide.cli.options import _settings, parse_bytes, tier_urls, with_flags
from ebbtide.errors import InputError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512MiB", 512 << 20),
        ("512mib", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("2g", 2 * 10**9),
        ("64k", 64_000),
        ("1TiB", 1 << 40),
        ("100B", 100),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, "--kv-memory") == size


@pytest.mark.parametrize("text", ["", "x", "-1", "5x", "1e9", "GiB", "1 2", "1.2.3MiB", "5ii"])
def test_what_is_no_size_is_refused_with_what_was_said(text: str) -> None:
    with pytest.raises(InputError, match="--kv-memory must be a size"):
        parse_bytes(text, "--kv-memory")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ebbtide", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--kv-memory", "many"], "--kv-memory"),
        (["serve", "--disk", ""], "--disk is empty: name a directory"),
        (["serve", "--disk-size", "1GiB"], "--disk-size and --disk-write are for --disk"),
        (["serve", "--dtype", "int3"], "dtype must be one of auto, bfloat16, float32"),
        (["serve", "--overlap", "7"], "overlap must be one of 1, 2"),
        (["serve", "--model", "no/such/file.gguf"], "no/such/file.gguf"),
        (["serve", "--port", "123456"], "--port"),
        (["serve", "--no-such-option"], "--no-such-option"),
        (["chat", "--temperature", "nan"], "temperature must be a number"),
        (["generate", "-i", "no-such-file", "-o", "-"], "no-such-file"),
        (["generate"], "--input"),
        (["serve", "--port", "many"], "'--port': Input should be a valid integer"),
        (["serve", "--port", "many"], "got 'many'"),
        (["serve", "--port=many"], "got 'many'"),
        (["serve", "--kv-memory", "0"], "--kv-memory must be at least 1, got 0"),
        (["serve", "--max-batch", "0"], "--max-batch must be"),
        (["serve", "--max-length", "1"], "--max-length must be"),
        (["serve", "--on-lost-kv", "pray"], "--on-lost-kv must be one of recompute, fail"),
        (["serve", "--threads", "0"], "--threads must be"),
        (["chat", "--temperature", "-1"], "--temperature must be"),
        (["generate", "-i", os.devnull, "-o", "no/such/dir/x"], "cannot write no/such/dir/x"),
        (["dance"], "dance"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    assert run(monkeypatch, *arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("ebbtide: ")
    assert words in told
    assert told.count("\n") == 1


def test_only_names_of_settings_become_options() -> None:
    assert (
        with_flags("max_length is 9, and kv_bytes is 3")
        == "--max-length is 9, and --kv-memory is 3"
    )
    for plain in ("there is no model at x", "the device must be", "this model must be read"):
        assert with_flags(plain) == plain


def _options(function: Callable[..., Any]) -> list[tuple[str, inspect.Parameter]]:
    return list(inspect.signature(function, eval_str=True).parameters.items())


def test_every_option_is_documented_with_its_default() -> None:
    table = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for name, parameter in [*_options(_settings), *_options(tier_urls)]:
        row = re.search(rf"^\| `--{name.replace('_', '-')}` \| (.+?) \|", table, re.MULTILINE)
        assert row, name
        shown = get_args(parameter.annotation)[-1].show_default
        default = shown if isinstance(shown, str) else parameter.default
        if default is not None:
            assert row[1].strip("`") == ("off" if default is False else str(default))


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"ebbtide {version('ebbtide')}\n"


def test_help_and_no_command_are_fine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([], ["--help"], ["serve", "--help"], ["generate", "-h"]):
        assert run(monkeypatch, *arguments) == 0
        assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize(("piped", "words"), [(b" \n", "empty"), (b"\xff", "not UTF-8")])
def test_a_pipe_without_a_message(piped: bytes, words: str) -> None:
    command = [sys.executable, "-m", "ebbtide.cli.main", "chat"]
    done = subprocess.run(command, input=piped, capture_output=True)
    assert done.returncode == 2
    assert words in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def test_help_is_instant_because_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, ebbtide.cli.main; "
        "print([m for m in ('torch', 'fastapi', 'numpy', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
