"""What can happen to a stored envelope, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Damage = Callable[[bytes], bytes]


def flip(value: bytes) -> bytes:
    """The last bit of the payload."""
    return value[:-1] + bytes([value[-1] ^ 1])


FOUND: list[tuple[Damage, str]] = [
    (flip, "checksum"),
    (lambda value: value[:-1], "bytes"),
    (lambda value: value[:5], "header has 5"),
    (lambda value: b"", "header has 0"),
    (lambda value: value + b"x", "bytes"),
]
READ: list[tuple[Damage, str]] = [
    (flip, "checksum"),
    (lambda value: b"\0" * len(value), "not a chunk"),
    (lambda value: value[:-1], "bytes"),
    (lambda value: value[:5], "bytes"),
    (lambda value: value + b"x", "bytes"),
    (lambda value: value * 5000, "bytes"),
]
when_listed = pytest.mark.parametrize(("damage", "says"), FOUND)
when_read = pytest.mark.parametrize(("damage", "says"), READ)
