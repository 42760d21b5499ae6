"""Reading one JSON object field by field: types are checked, and nothing is accepted and ignored.

Every function raises ``RequestError`` that names the field. ``null`` means "not said", as in the
OpenAI API.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from ebbtide.server.errors import RequestError

NAME_CHARACTERS_MAX = 60
VALUE_CHARACTERS_MAX = 60


def check_names(
    body: Mapping[str, Any],
    known: Collection[str],
    refused: Mapping[str, str] | None = None,
    where: str = "",
) -> None:
    """Refuse every field that is not in ``known``; for those in ``refused``, say why.

    ``where`` is the path of the object, for instance "messages[0].".
    """
    for name, value in body.items():
        if name in known:
            continue
        shown = where + name[:NAME_CHARACTERS_MAX]
        if refused and name in refused:
            if value is None:
                continue
            raise RequestError(
                f"{shown} is not supported: {refused[name]}", shown, code="unsupported_parameter"
            )
        near = get_close_matches(name[:NAME_CHARACTERS_MAX], known, n=1)
        hint = f"; did you mean {where}{near[0]}?" if near else ""
        raise RequestError(f"{shown} is not a field{hint}", shown, code="unknown_parameter")


def wrong_type(name: str, wanted: str, value: Any) -> RequestError:
    return RequestError(f"{name} must be {wanted}, got {shown(value)}", name, code="invalid_type")


def shown(value: Any) -> str:
    """A JSON value in a message: its type where it may be long, else itself."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = json.dumps(value, ensure_ascii=False)
    text = text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[: VALUE_CHARACTERS_MAX - 3]}..."
    return f"the string {text}" if isinstance(value, str) else text


def check_integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "an integer", value)


def check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "a number", value)


def boolean(body: Mapping[str, Any], name: str, default: bool = False, where: str = "") -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(where + name, "a boolean", value)
    return value


def string(
    body: Mapping[str, Any], name: str, default: str = "", *, most: int = 256, where: str = ""
) -> str:
    """A string of 1 to ``most`` characters."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise wrong_type(where + name, "a string", value)
    if not 1 <= len(value) <= most:
        raise RequestError(
            f"{where}{name} must have 1 to {most} characters, got {len(value)}", where + name
        )
    return value


def integer(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    check_integer(name, value)
    if not low <= value <= high:
        raise RequestError(f"{name} must be from {low} to {high}, got {value}", name)
    return value


def mapping(body: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    return value


def is_token_list(value: Any) -> bool:
    """Whether ``value`` is a list of integers and nothing else (booleans are none)."""
    return isinstance(value, list) and set(map(type, value)) <= {int}
