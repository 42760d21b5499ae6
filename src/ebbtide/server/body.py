"""From the bytes of a request to one JSON object, or to a sentence about what is wrong with them."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.requests import Request

from ebbtide.server.config import ServerConfig
from ebbtide.server.errors import RequestError

THREAD_BYTES_MIN = 1 << 20  # bodies from this size on are parsed beside the event loop
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_json(request: Request, config: ServerConfig) -> dict[str, Any]:
    """The request's body as a JSON object. Raises ``RequestError``, and starlette's
    ``ClientDisconnect`` if the client goes away while it sends."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            f"the request needs the header 'content-type: application/json', got {kind!r}",
            code="unsupported_media_type",
            status=415,
        )
    try:
        async with asyncio.timeout(config.body_timeout_s):
            data = await _read(request, config.body_bytes_max)
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {config.body_timeout_s:g} seconds",
            code="request_timeout",
            status=408,
        ) from None
    if len(data) >= THREAD_BYTES_MIN:
        return await asyncio.to_thread(parse_object, data)
    return parse_object(data)


async def _read(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > limit:
            raise _too_large(limit)
    return bytes(data)


def _too_large(limit: int) -> RequestError:
    return RequestError(
        f"the body is larger than the {limit} bytes this server accepts",
        code="body_too_large",
        status=413,
    )


def parse_object(data: bytes | str, what: str = "the body") -> dict[str, Any]:
    """Parse strict JSON: no NaN or infinity, no field twice, no half surrogate pairs, one object.

    Raises ``RequestError`` (code ``invalid_json``), whose sentence begins with ``what``.
    """
    if not data.strip():
        raise RequestError(f"{what} is empty; it must be a JSON object", code="invalid_json")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        if isinstance(value, dict):
            return value
        why = "it must be an object"
    except _NotStrict as error:
        why = str(error)
    except UnicodeEncodeError:
        why = "it holds half of a surrogate pair, which is no text"
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not valid UTF-8"
    except json.JSONDecodeError as error:
        why = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except RecursionError:
        why = "it is nested too deeply"
    except ValueError:  # Python's limit on the digits of an integer
        why = "it holds a number with too many digits"
    raise RequestError(f"{what} is not the JSON wanted here: {why}", code="invalid_json")


class _NotStrict(Exception):
    """What the standard library's parser would let pass."""


def _no_constant(name: str) -> NoReturn:
    raise _NotStrict(f"{name} is no JSON number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _NotStrict(f"the field {twice[:60]!r} stands twice")
    return fields
