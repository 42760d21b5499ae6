"""Servers for the tests: one around an echoing fake for all tests that leave it as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.server.fake import FakeEngine
from tests.server.serving import Served, served


@pytest.fixture(scope="session")
def echo() -> Iterator[Served]:
    """A server that answers every prompt with itself."""
    with served(FakeEngine()) as server:
        yield server
