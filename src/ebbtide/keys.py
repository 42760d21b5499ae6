"""Names for KV content: chained digests of everything that the bytes of a block depend on.

A block's digest covers the namespace, the salt and all tokens up to the block's end, so equal
digests mean equal KV. They are the same in every process and on every machine.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


def root_digest(namespace: bytes, tags: Mapping[str, str]) -> bytes:
    """The parent of a chain's first block.

    Every field is written with its name and its length, so that no two fields can be taken for
    each other; an empty field and an absent one are the same.
    """
    root = blake2b(digest_size=DIGEST_BYTES)
    text = {name: value.encode("utf-8", "surrogatepass") for name, value in tags.items() if value}
    fields = [("namespace", namespace), *sorted(text.items())]
    for name, value in fields:
        label = name.encode()
        root.update(struct.pack("<II", len(label), len(value)) + label + value)
    return root.digest()


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of the block that holds ``tokens`` and follows the block named ``parent``."""
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    return blake2b(parent + packed, digest_size=DIGEST_BYTES).digest()


def chunk_key(digest: bytes, group: int) -> bytes:
    """Key of the chunk of ``group`` whose last block has ``digest``."""
    return digest + group.to_bytes(2, "little")
