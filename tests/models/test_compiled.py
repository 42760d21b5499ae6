"""How the compiled kernels come to be, and what is said where they cannot."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ebbtide.models import compiled
from ebbtide.models.compiled import NoNativeKernels

from .test_native import needs_native


@pytest.fixture
def empty_cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_processor", lambda: "flags")
    return tmp_path


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@needs_native
def test_a_library_is_compiled_once(empty_cache, monkeypatch):
    calls = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: calls.append(a) or run(*a, **k))
    compiled.load()
    compiled.load()
    assert len(calls) == 1
    (library,) = (empty_cache / "cache" / "ebbtide").iterdir()
    damaged = library.read_bytes()[:4096]
    library.unlink()  # not in place: this process has it in its memory
    library.write_bytes(damaged)
    compiled.load()
    assert len(calls) == 2, "one that was damaged is made anew"
    monkeypatch.setattr(compiled, "_processor", lambda: "another processor")
    compiled.load()
    assert len(calls) == 3


def test_a_compiler_that_fails_leaves_nothing(empty_cache, monkeypatch):
    monkeypatch.setenv(
        "CC",
        compiler(
            empty_cache,
            "echo In file included from x.h >&2; echo 'a.c:1: error: no room' >&2; exit 1",
        ),
    )
    with pytest.raises(NoNativeKernels, match=r"compiler failed: a\.c:1: error: no room"):
        compiled.load()
    assert not list((empty_cache / "cache" / "ebbtide").iterdir())


def test_a_compiler_that_hangs_is_given_up(empty_cache, monkeypatch):
    monkeypatch.setattr(compiled, "COMPILE_S", 0.2)
    monkeypatch.setenv("CC", compiler(empty_cache, "exec sleep 60"))
    with pytest.raises(NoNativeKernels, match=r"took more than 0\.2 s"):
        compiled.load()


def test_a_library_that_does_not_load_or_cannot_be_kept(empty_cache, monkeypatch):
    monkeypatch.setenv(
        "CC", compiler(empty_cache, 'while [ "$1" != -o ]; do shift; done; echo no > "$2"')
    )
    with pytest.raises(NoNativeKernels, match="could not be made or loaded"):
        compiled.load()
    (empty_cache / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty_cache / "file"))
    with pytest.raises(NoNativeKernels, match="could not be made or loaded"):
        compiled.load()


def test_a_compiler_that_is_not_there_is_named(empty_cache, monkeypatch):
    monkeypatch.setenv("CC", "gcc-0 -m64")
    with pytest.raises(NoNativeKernels, match="CC names gcc-0, which is not found"):
        compiled.load()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoNativeKernels, match=r"there is no gcc \(install gcc\)"):
        compiled.load()


def test_a_compiler_may_have_arguments(empty_cache, monkeypatch):
    path = compiler(
        empty_cache, '[ "$1" = --yes ] || exit 1; echo "a.c: error: it got --yes" >&2; exit 2'
    )
    monkeypatch.setenv("CC", f"{path} --yes")
    with pytest.raises(NoNativeKernels, match="it got --yes"):
        compiled.load()


@needs_native
def test_what_a_compiler_says_may_be_in_any_encoding(empty_cache, monkeypatch):
    monkeypatch.setenv("CC", compiler(empty_cache, "printf '\\351\\n' >&2; exec gcc \"$@\""))
    compiled.load()


def test_no_home_is_no_crash(empty_cache, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(NoNativeKernels, match="no home for a cache"):
        compiled.load()


def test_another_openmp_is_refused(empty_cache, monkeypatch):
    monkeypatch.setattr(compiled, "gnu_openmp", lambda: None)
    with pytest.raises(NoNativeKernels, match="another OpenMP"):
        compiled.load()


def test_other_machines_are_told(monkeypatch):
    monkeypatch.setattr(compiled.platform, "machine", lambda: "arm64")
    with pytest.raises(NoNativeKernels, match="not x86-64 Linux"):
        compiled.load()
    monkeypatch.undo()
    if os.uname().sysname == "Linux" and os.uname().machine == "x86_64":
        monkeypatch.setattr(compiled, "NEEDED", ("avx2", "avx1024"))
        with pytest.raises(NoNativeKernels, match="this processor has no avx1024"):
            compiled.load()
