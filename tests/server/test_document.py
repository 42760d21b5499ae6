"""docs/http-api.md names everything that a request may or may not say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.server.serving import Served
from tests.server.test_metrics import samples

from ebbtide.server import messages, requests

DOCUMENT = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
FIELDS = (
    requests._COMPLETION
    | requests._CHAT
    | requests._REFUSED_COMPLETION.keys()
    | requests._REFUSED_CHAT.keys()
    | messages._REFUSED.keys()
)


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_every_field_is_documented(field: str) -> None:
    assert re.search(rf"[`\"]{field}\b", DOCUMENT)


def test_every_metric_is_documented(echo: Served) -> None:
    for sample in samples(echo):
        name = re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", sample).removeprefix("ebbtide")
        assert f"{name}`" in DOCUMENT, sample


def test_every_error_code_is_documented() -> None:
    source = Path(requests.__file__).parent
    code = re.compile(r"code=\"(\w+)\"")
    codes = {found for path in source.glob("*.py") for found in code.findall(path.read_text())}
    assert len(codes) > 10
    for name in codes:
        assert f"`{name}`" in DOCUMENT
