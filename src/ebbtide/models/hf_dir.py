"""A Hugging Face model directory: safetensors (in one file or several), JSON, a chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ebbtide.errors import InputError
from ebbtide.models.checkpoint import Checkpoint
from ebbtide.models.config import ModelConfig
from ebbtide.models.generation import from_hugging_face
from ebbtide.models.hf_config import model_config, text_part
from ebbtide.models.tokenizer import Spelling, Tokenizer
from ebbtide.models.weights import (
    as_floating,
    check_names,
    check_shape,
    is_norm,
    weight_shapes,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
# Of a model that also sees images: its other half, and how newer and older files name the rest.
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
LANGUAGE_PARTS = (("model.language_model.", "model."), ("language_model.", ""))
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")

Json = dict[str, Any]
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a weight is: a file, and its name there."""

    file: Path
    name: str


def load_directory(
    name: str, directory: Path, dtype: torch.dtype, progress: Progress
) -> Checkpoint:
    """Raises ``InputError`` for anything missing, damaged or not supported."""
    raw = read_json(directory / "config.json")
    config = model_config(raw, directory / "config.json")
    generation = read_json(directory / "generation_config.json", optional=True)
    progress("reading tokenizer", 0.0)
    tokenizer = read_tokenizer(directory, generation, raw)
    digest = hashlib.blake2b(json.dumps(raw, sort_keys=True).encode(), digest_size=32)
    places = _language_model(_locate(directory), text_part(raw) is not raw)
    config = replace(config, tied_embeddings=config.tied_embeddings and _really_tied(places))
    weights = _read_weights(directory, places, config, dtype, progress, digest.update)
    return Checkpoint(
        name, config, weights, tokenizer, from_hugging_face(generation), digest.digest()
    )


def read_json(path: Path, optional: bool = False) -> Json:
    """The object in a JSON file; an empty one where it is optional and not there."""
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InputError(f"there is no {path.name} in {path.parent}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}; download it again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _read_weights(
    directory: Path,
    places: Mapping[str, Place],
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Progress,
    hash_bytes: Callable[[bytes], None],
) -> dict[str, torch.Tensor]:
    """Copies, never views of the mapped file: a file written over later must not change a running
    model, whose KV is stored under the identity that was read here."""
    expected = weight_shapes(config)
    found = {name for name in places if not name.endswith("rotary_emb.inv_freq")}
    if config.tied_embeddings:
        found.discard(OUTPUT)  # a second copy of the embedding
    check_names(expected, found, directory)
    weights: dict[str, torch.Tensor] = {}
    by_file: dict[Path, list[str]] = {}
    for name in sorted(found):
        by_file.setdefault(places[name].file, []).append(name)
    digests: dict[str, bytes] = {}
    for path, names in by_file.items():
        with _open(path) as file:
            for name in names:
                tensor = file.get_tensor(places[name].name)
                check_shape(name, tuple(tensor.shape), expected[name], path)
                kept = torch.float32 if is_norm(name) else dtype
                weights[name] = as_floating(name, tensor, kept, path)
                if is_norm(name) and config.architecture == "gemma3":
                    weights[name] += 1
                digests[name] = _digest(name, tensor)
                progress("reading weights", len(weights) / len(found))
    for name in sorted(digests):
        hash_bytes(digests[name])
    return weights


def _language_model(located: Mapping[str, Path], sees_images: bool) -> dict[str, Place]:
    """The weights that read and write text, by the names they have in a model that does only that."""
    places = {}
    for name, file in located.items():
        ours = name
        if sees_images:
            if name.removeprefix("model.").startswith(OTHER_PARTS):
                continue
            for theirs, plain in LANGUAGE_PARTS:
                if name.startswith(theirs):
                    ours = plain + name.removeprefix(theirs)
                    break
        places[ours] = Place(file, name)
    return places


def _really_tied(places: Mapping[str, Place]) -> bool:
    """False where the file has an output matrix of its own, whatever its configuration says: like
    transformers, which then unties the two."""
    if not {EMBEDDING, OUTPUT} <= places.keys():
        return True
    first, second = places[EMBEDDING], places[OUTPUT]
    with _open(first.file) as inputs, _open(second.file) as outputs:
        return torch.equal(inputs.get_tensor(first.name), outputs.get_tensor(second.name))


def _digest(name: str, tensor: torch.Tensor) -> bytes:
    label = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return hashlib.blake2b(content, digest_size=32, key=hashlib.blake2b(label).digest()).digest()


def _locate(directory: Path) -> dict[str, Path]:
    """Weight name -> the file it is in, as the index says or as the only file lists."""
    if (directory / INDEX).is_file():
        index = read_json(directory / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise InputError(f"{directory / INDEX} has no weight_map; download it again")
        places = {name: directory / Path(str(file)).name for name, file in index.items()}
        held = {path: _names(path) for path in sorted(set(places.values()))}
        for name, path in places.items():
            if name not in held[path]:
                raise InputError(f"{path} lacks {name}, which {INDEX} says it holds")
        return places
    return _all_in(_single_file(directory))


def _single_file(directory: Path) -> Path:
    if (directory / SINGLE).is_file():
        return directory / SINGLE
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise InputError(f"{directory} holds {len(files)} safetensors files and no {INDEX}")
    pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
    hint = "; .bin and .pth files can run code when loaded and are not read: convert them"
    raise InputError(f"there is no {SINGLE} in {directory}{hint if pickled else ''}")


def _all_in(path: Path) -> dict[str, Path]:
    return dict.fromkeys(_names(path), path)


def _names(path: Path) -> set[str]:
    with _open(path) as file:
        return set(file.keys())


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InputError(f"there is no {path.name} in {path.parent}, which {INDEX} refers to")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise InputError(
            f"{path} is truncated or damaged ({path.stat().st_size} bytes): {error}; "
            "download it again"
        ) from None


def read_tokenizer(directory: Path, generation: Json, config: Json) -> Tokenizer:
    """From ``tokenizer.json``, whose post-processor says what goes around a text (not the flags in
    ``tokenizer_config.json``, which transformers ignores as well); the latter names the special tokens."""
    path = directory / "tokenizer.json"
    backend = _backend(path)
    settings = read_json(directory / "tokenizer_config.json", optional=True)
    special = {name: _content(settings.get(name)) for name in SPECIAL_NAMES}
    names = {name: content for name, content in special.items() if content is not None}
    backend.add_special_tokens([t for t in names.values() if backend.token_to_id(t) is not None])
    bos, eos = (backend.token_to_id(names.get(name, "")) for name in ("bos_token", "eos_token"))
    if bos is None and isinstance(config.get("bos_token_id"), int):
        bos = config["bos_token_id"]
    prefix, suffix = _surroundings(backend)
    ends = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    return Tokenizer(
        backend,
        Spelling.of(backend.decoder, path),
        bos_id=bos,
        eos_ids=[*ends, *([] if eos is None else [eos])],
        prefix=prefix,
        suffix=suffix,
        templates=_templates(directory, settings),
        special_names=names,
    )


def _backend(path: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    if not path.is_file():
        raise InputError(
            f"there is no tokenizer.json in {path.parent}; save it with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise InputError(f"{path} cannot be read: {error}; download it again") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _surroundings(backend: Backend) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer's post-processor puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _content(token: object) -> str | None:
    """A special token, written as a string or as an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _templates(directory: Path, settings: Json) -> dict[str, str]:
    file = directory / "chat_template.jinja"
    given = file.read_text("utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        named = [entry for entry in given if isinstance(entry, dict)]
        return {str(e["name"]): str(e["template"]) for e in named if {"name", "template"} <= set(e)}
    return {}
