"""The file tier's settings, and how a URL says them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ebbtide.errors import InputError
from ebbtide.offload.policies import DEFAULT_POLICY, POLICIES

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


@dataclass(frozen=True, slots=True)
class FileSettings:
    """size: bytes of all files. floor: bytes of the file system that stay free. See docs/tiers.md."""

    directory: str
    size: int = 20 << 30
    floor: int = 1 << 30
    fsync: str = "never"
    policy: str = DEFAULT_POLICY
    io: str = "auto"


CHOICES = {
    "fsync": ("never", "always"),
    "policy": tuple(POLICIES),
    "io": ("auto", "direct", "buffered"),
}


def parse_url(url: str) -> FileSettings:
    """Settings of a ``file://`` URL. Raises InputError."""
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or parts.path[:1] != "/":
        raise InputError(
            f"a file tier's URL is file:///DIR?size=20GiB with a whole path, not {url!r}"
        )
    names = [field.name for field in fields(FileSettings) if field.name != "directory"]
    chosen: dict[str, Any] = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise InputError(f"the file tier has no setting {name!r}: {hint}", name)
        if name in chosen:
            raise InputError(f"the file tier's {name} is given twice", name)
        chosen[name] = _setting(name, text)
    return FileSettings(directory=unquote(parts.path), **chosen)


def _setting(name: str, text: str) -> str | int:
    if name in CHOICES:
        if text not in CHOICES[name]:
            options = " or ".join(CHOICES[name])
            raise InputError(f"the file tier's {name} is {options}, not {text!r}", name)
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in UNITS:
        raise InputError(
            f"the file tier's {name} is a size such as 512MiB or 20GiB, not {text!r}", name
        )
    return int(float(match[1]) * UNITS[match[2]])
