"""Compiles the files in ``c`` on the machine that it is to run on, once, and loads it.

The library is kept in the user's cache folder, under a name that says which source, compiler and processor
it is of. It shares PyTorch's pool of threads: both call GNU's OpenMP, of which a process has one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCES = ("native.h", "between.c", "attention.c", "products.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno")
NEEDED = "avx512_bf16"
COMPILE_S = 120


class CannotCompile(Exception):
    """Why there are no compiled kernels here: half a sentence."""


def load() -> ctypes.CDLL:
    """The library, compiled if it was not yet. Raises CannotCompile."""
    processor = _processor()
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        raise CannotCompile("there is no C compiler (install gcc)")
    folder = files("ebbtide.models").joinpath("c")
    sources = {name: folder.joinpath(name).read_bytes() for name in SOURCES}
    said = [*sources.values(), compiler.encode(), processor.encode(), " ".join(FLAGS).encode()]
    name = hashlib.blake2b(b"\0".join(said), digest_size=16).hexdigest()
    library = _cache_folder() / f"native-{name}.so"
    try:
        if not library.exists():
            _compile(compiler, sources, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CannotCompile(f"{library} could not be made or loaded ({error})") from error


def _processor() -> str:
    """What tells processors with other instructions apart."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise CannotCompile(
            f"this is {platform.system()} on {platform.machine()}, not x86-64 Linux"
        )
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    if NEEDED not in flags.split():
        raise CannotCompile(f"this processor has no {NEEDED}")
    return flags


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ebbtide"


def _compile(compiler: str, sources: dict[str, bytes], library: Path) -> None:
    """Leaves the library where it is to be, whole, or nothing."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        for name, source in sources.items():
            (Path(folder) / name).write_bytes(source)
        code = [str(Path(folder) / name) for name in SOURCES if name.endswith(".c")]
        command = [compiler, *FLAGS, "-o", str(made), *code]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
        except subprocess.TimeoutExpired as error:
            raise CannotCompile(f"{compiler} took more than {COMPILE_S} s") from error
        if ran.returncode != 0:
            first = (ran.stderr.strip().splitlines() or ["it said nothing"])[0]
            raise CannotCompile(f"{compiler} failed: {first}")
        os.replace(made, library)
