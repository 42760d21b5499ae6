"""The envelope around every stored chunk, and its verification.

    magic  version  payload bytes  namespace  key length  key  checksum  | payload

The checksum (XXH3, 128 bit) covers all fields before it and the payload, so a chunk that was cut, mixed
up, altered, or written by another model or layout is found out. It is no protection against forgery:
whoever can write to a tier is trusted.
"""

from __future__ import annotations

import struct

import xxhash

MAGIC = b"EBBTIDE\n"
VERSION = 1
KEY_BYTES_MAX = 48
_FIELDS = struct.Struct(f"<8sII32sI{KEY_BYTES_MAX}s")
_CHECKSUM_BYTES = 16
HEADER_BYTES = 128
assert _FIELDS.size + _CHECKSUM_BYTES <= HEADER_BYTES


def header(namespace: bytes, key: bytes, payload: memoryview) -> bytes:
    """The ``HEADER_BYTES`` bytes that precede the payload."""
    assert len(namespace) == 32, f"a namespace has 32 bytes, not {len(namespace)}"
    assert 0 < len(key) <= KEY_BYTES_MAX, f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key)}"
    fields = _FIELDS.pack(MAGIC, VERSION, payload.nbytes, namespace, len(key), key)
    return (fields + _checksum(fields, payload)).ljust(HEADER_BYTES, b"\0")


def verify(head: bytes | memoryview, namespace: bytes, key: bytes, payload: memoryview) -> str:
    """What is wrong with a chunk that was read, in words; "" where nothing is."""
    if len(head) < HEADER_BYTES:
        return f"its header has {len(head)} of {HEADER_BYTES} bytes"
    raw = bytes(head[: _FIELDS.size])
    magic, version, size, space, key_length, padded = _FIELDS.unpack(raw)
    if magic != MAGIC:
        return "it is not a chunk of KV"
    if version != VERSION:
        return f"its format is version {version}; this program reads {VERSION}"
    if space != namespace:
        return "it belongs to another model or layout"
    if padded[: min(key_length, KEY_BYTES_MAX)] != key:
        return "it is another chunk than its name says"
    if size != payload.nbytes:
        return f"it has {size} bytes, not {payload.nbytes}"
    checksum = bytes(head[_FIELDS.size : _FIELDS.size + _CHECKSUM_BYTES])
    if checksum != _checksum(raw, payload):
        return "its checksum does not match its content"
    return ""


def _checksum(fields: bytes, payload: memoryview) -> bytes:
    whole = xxhash.xxh3_128(fields)
    whole.update(payload)
    return whole.digest()
