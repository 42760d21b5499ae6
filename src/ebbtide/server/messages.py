"""The messages of a chat request, reduced to what a chat template can take."""

from __future__ import annotations

from typing import Any

from ebbtide.server import fields
from ebbtide.server.errors import RequestError

MESSAGES_MAX = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")

_KNOWN = {"role", "content"}
_NO_TOOLS = "this server does no tool calling"
_REFUSED = {
    "name": "no chat template shows it to the model",
    "tool_calls": _NO_TOOLS,
    "function_call": _NO_TOOLS,
    "tool_call_id": "it belongs to tool messages",
    "audio": "this server reads text only",
    "refusal": "give what was said as content",
    "annotations": "no chat template shows them to the model",
}


def read_messages(value: Any) -> list[dict[str, str]]:
    """``[{"role", "content"}]`` with content as one string; raises ``RequestError`` that names the
    message. "developer" is what newer clients call "system"; templates know the older word."""
    if value is None:
        raise RequestError("messages is required", "messages", code="missing_parameter")
    if not isinstance(value, list):
        raise fields.wrong_type("messages", "an array of messages", value)
    if not 1 <= len(value) <= MESSAGES_MAX:
        raise RequestError(
            f"messages must hold 1 to {MESSAGES_MAX} messages, got {len(value)}",
            "messages",
            code=None if value else "empty_prompt",
        )
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _read_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise fields.wrong_type(where, "an object", message)
    role = message.get("role")
    if role is None:
        raise RequestError(f"{where}.role is required", f"{where}.role", code="missing_parameter")
    if not isinstance(role, str):
        raise fields.wrong_type(f"{where}.role", "a string", role)
    if role not in ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(ROLES)}; got {fields.shown(role)}",
            f"{where}.role",
        )
    known = _KNOWN | {"tool_call_id"} if role == "tool" else _KNOWN
    refused = {name: why for name, why in _REFUSED.items() if name not in known}
    fields.check_names(message, known, refused, f"{where}.")
    fields.string(message, "tool_call_id", where=f"{where}.")
    content = _read_content(message.get("content"), f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.wrong_type(where, "a string or an array of text parts", content)
    return "".join(_read_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _read_part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise fields.wrong_type(where, "an object", part)
    kind = part.get("type")
    if kind != "text":
        raise RequestError(
            f"{where}.type is {str(kind)[:40]!r}, and only text parts are supported",
            f"{where}.type",
            code="unsupported_parameter",
        )
    fields.check_names(part, {"type", "text"}, where=f"{where}.")
    if not isinstance(part.get("text"), str):
        raise fields.wrong_type(f"{where}.text", "a string", part.get("text"))
    return part["text"]
