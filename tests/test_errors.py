"""Sizes in messages."""

from __future__ import annotations

import pytest

from ebbtide.errors import readable_bytes


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (360 << 10, "360 KiB"),
        (3 << 29, "1.5 GiB"),
        (900 << 40, "900 TiB"),
        (5 << 60, "5120 PiB"),
    ],
)
def test_sizes_are_read_at_a_glance(size: int, text: str) -> None:
    assert readable_bytes(size) == text
