"""Chat templates: the Jinja that comes with a model, rendered in a sandbox.

Templates see what Hugging Face transformers shows them: ``messages``, ``tools``,
``add_generation_prompt``, the special tokens by name, ``raise_exception``, ``strftime_now``, a
``tojson`` that escapes no HTML, loop controls, and the ``generation`` block (which only marks text).
A template is input: it runs no code of its own, cannot change what it is given, and reads only plain
JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ebbtide.errors import InputError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

DEFAULT = "default"
TOOL_USE = "tool_use"  # some models bring a second template for conversations with tools


class ChatTemplate:
    """The templates of one model; compiled when first used."""

    def __init__(self, templates: Mapping[str, str], special_names: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_names = dict(special_names)
        self._compiled: dict[str, Template] = {}

    @property
    def available(self) -> bool:
        return DEFAULT in self._templates

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Raises ``InputError`` where there is no template, or with what the template says."""
        if not self.available:
            raise InputError(
                "this model has no chat template; send it a plain prompt instead", "messages"
            )
        from jinja2 import TemplateError

        known = {
            **self._special_names,
            **variables,
            "messages": [_plain(_without_none(message)) for message in messages],
            "tools": [_plain(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template(bool(tools)).render(known)
        except TemplateError as error:
            raise InputError(
                f"the chat template says: {error.message or error}", "messages"
            ) from None
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise InputError(
                f"the chat template cannot be applied to these messages: {error}", "messages"
            ) from None
        except RecursionError:
            raise InputError("the messages are nested too deeply", "messages") from None

    def _template(self, with_tools: bool) -> Template:
        name = TOOL_USE if with_tools and TOOL_USE in self._templates else DEFAULT
        if name not in self._compiled:
            self._compiled[name] = _environment().from_string(self._templates[name])
        return self._compiled[name]


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    """A key that is None reads as absent: many templates would print "None"."""
    if not isinstance(message, Mapping):
        raise InputError(f"a message must be an object, got {message!r}", "messages")
    return {key: value for key, value in message.items() if value is not None}


def _plain(value: Any) -> Any:
    """JSON values only, so that no object's methods reach the template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise InputError(f"a message holds a {type(value).__name__}, which JSON has not", "messages")


def _environment() -> Environment:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``: marks what a model wrote, for training; here only its content counts."""

        tags = {"generation"}  # noqa: RUF012 - the shape jinja2 asks for

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(layout: str) -> str:
        return datetime.now().strftime(layout)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
