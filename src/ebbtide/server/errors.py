"""Errors as the OpenAI API shapes them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from ebbtide.errors import EngineStopped, InputError, QueueFull

MESSAGE_CHARACTERS_MAX = 500
RETRY_AFTER_S = 1


class RequestError(InputError):
    """A request that the HTTP layer itself refuses, with the status and the code to say it with."""

    def __init__(
        self, message: str, field: str | None = None, *, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message, field)
        self.code = code
        self.status = status


class ServerFailure(Exception):
    """A request that was fine and still got no full answer; ``status`` if nothing was sent yet."""

    def __init__(self, message: str, *, code: str, status: int = 500) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


def error_object(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error. Long messages, which quote what was sent, are cut."""
    if len(message) > MESSAGE_CHARACTERS_MAX:
        message = message[: MESSAGE_CHARACTERS_MAX - 3] + "..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and extra headers that tell a client about ``error``."""
    if isinstance(error, QueueFull):
        body = error_object(str(error), "rate_limit_error", code="queue_full")
        return 429, body, {"retry-after": str(RETRY_AFTER_S)}
    if isinstance(error, InputError):
        code = getattr(error, "code", None)
        body = error_object(str(error), "invalid_request_error", error.field, code)
        return getattr(error, "status", 400), body, {}
    if isinstance(error, EngineStopped):
        error = ServerFailure(str(error), code="engine_error", status=503)
    if isinstance(error, ServerFailure):
        headers = {"retry-after": str(RETRY_AFTER_S)} if error.status == 503 else {}
        return error.status, error_object(str(error), "server_error", code=error.code), headers
    body = error_object("the server failed on this request; its log says why", "server_error")
    return 500, body, {}


def json_response(
    content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json.dumps(content), status, headers, "application/json")


def error_response(error: Exception) -> Response:
    status, content, headers = describe(error)
    return json_response(content, status, headers)
