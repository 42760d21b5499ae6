"""Compiles the files in ``c`` on the machine that they are to run on, once, and loads the library.

It is kept in the user's cache folder, under a name that says which sources, compiler and processor it is of,
and what its bytes are: one that was damaged is made anew. It has to share PyTorch's pool of threads, so both
must call GNU's OpenMP.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from ebbtide.models.packed import GROUP
from ebbtide.models.threads import gnu_openmp

FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno"),
    f"-DGROUP={GROUP}",
)
NEEDED = ("avx2", "fma")
COMPILE_S = 120


class NoNativeKernels(Exception):
    """Why there are no compiled kernels here: half a sentence."""


def load() -> ctypes.CDLL:
    """The library, compiled if it was not yet. Raises NoNativeKernels."""
    processor = _processor()
    if gnu_openmp() is None:
        raise NoNativeKernels("PyTorch brings another OpenMP than GNU's")
    compiler = _compiler()
    sources = {
        each.name: each.read_bytes()
        for each in sorted(files("ebbtide.models").joinpath("c").iterdir(), key=str)
    }
    said = [*sources.values(), *(text.encode() for text in (processor, *compiler, *FLAGS))]
    name = _digest(b"\0".join(said))
    try:
        folder = _cache_folder()
        library = _find(folder, name) or _compile(compiler, sources, folder, name)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoNativeKernels(f"the library could not be made or loaded ({error})") from error


def _processor() -> str:
    """What tells processors with other instructions apart."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NoNativeKernels(
            f"this is {platform.system()} on {platform.machine()}, not x86-64 Linux"
        )
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError as error:
        raise NoNativeKernels(f"what the processor can is not to be read ({error})") from error
    flags = next((line for line in lines if line.startswith("flags")), "")
    for needed in NEEDED:
        if needed not in flags.split():
            raise NoNativeKernels(f"this processor has no {needed}")
    return flags


def _compiler() -> list[str]:
    """The command, as ``CC`` says it, or gcc."""
    said = shlex.split(os.environ.get("CC", ""))
    command = said or ["gcc"]
    path = shutil.which(command[0])
    if path is None:
        missing = f"CC names {said[0]}, which is not found" if said else "there is no gcc"
        raise NoNativeKernels(f"{missing} (install gcc)")
    return [path, *command[1:]]


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise NoNativeKernels("there is no home for a cache (set HOME or XDG_CACHE_HOME)")
    return Path(base) / "ebbtide"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _find(folder: Path, name: str) -> Path | None:
    """A library of this name whose bytes are what they were; one that was damaged is removed."""
    for library in folder.glob(f"native-{name}-*.so"):
        if library.stem.endswith(_digest(library.read_bytes())):
            return library
        library.unlink()
    return None


def _compile(compiler: list[str], sources: Mapping[str, bytes], folder: Path, name: str) -> Path:
    """Leaves the library in the folder, whole, or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as work:
        for source, text in sources.items():
            (Path(work) / source).write_bytes(text)
        code = [source for source in sources if source.endswith(".c")]
        command = [*compiler, *FLAGS, "-o", "native.so", *code]
        try:
            ran = subprocess.run(
                command,
                cwd=work,
                capture_output=True,
                text=True,
                errors="replace",  # it may speak another language, in another encoding
                timeout=COMPILE_S,
            )
        except subprocess.TimeoutExpired as error:
            raise NoNativeKernels(f"{compiler[0]} took more than {COMPILE_S} s") from error
        if ran.returncode != 0:
            raise NoNativeKernels(f"{compiler[0]} failed: {_first_error(ran.stderr)}")
        made = Path(work) / "native.so"
        library = folder / f"native-{name}-{_digest(made.read_bytes())}.so"
        with made.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(made, library)
    return library


def _first_error(said: str) -> str:
    lines = said.strip().splitlines() or ["it said nothing"]
    return next((line for line in lines if "error:" in line), lines[-1])
