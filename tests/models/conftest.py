from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ebbtide.models import compiled

AMX = torch.cpu._is_amx_tile_supported()
# For the compiler: kernels for AMX where there is none, and for none where there is.
OTHER = (
    "-mno-amx-bf16" if AMX else f"-include {shlex.quote(str(Path(__file__).with_name('amx.h')))}"
)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=["", OTHER], ids=["as built", "without AMX" if AMX else "with AMX"])
def kinds_of_processor(
    request: pytest.FixtureRequest, own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled kernels are those for AMX, then those for none, on any machine that has the latter."""
    monkeypatch.setenv("CC", f"gcc {request.param}")
    assert compiled.load().has_amx() == (AMX if request.param == "" else not AMX)
