"""``ebbtide chat``: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from typing import Any

from rich.console import Console

from ebbtide.cli.progress import loading
from ebbtide.engine.async_engine import AsyncEngine
from ebbtide.engine.config import EngineConfig
from ebbtide.engine.output import Usage
from ebbtide.errors import InputError
from ebbtide.params import SamplingParams

HELP = "/reset starts a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
Messages = list[dict[str, Any]]


def run_chat(config: EngineConfig, params: SamplingParams, system: str | None) -> None:
    """Chat until the user leaves; from a pipe, answer one message. Raises InputError."""
    message = None if sys.stdin.isatty() else _piped()
    with loading() as progress:
        engine = AsyncEngine.start(config, progress)
    try:
        conversation = _Conversation(engine, params, system)
        if message is None:
            _converse(conversation)
        else:
            asyncio.run(conversation.answer(message))
    finally:
        asyncio.run(engine.close())


def _piped() -> str:
    try:
        message = sys.stdin.buffer.read().decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"the message is not UTF-8 text: byte {error.start} is not") from None
    if not message:
        raise InputError("there is no message to answer: the pipe is empty")
    return message


def _converse(conversation: _Conversation) -> None:
    console = conversation.notes
    console.print(f"[dim]{HELP}[/dim]", highlight=False)
    while True:
        try:
            text = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            console.print(f"[dim]{HELP}[/dim]", highlight=False)
        elif text:
            try:
                asyncio.run(conversation.answer(text))
            except InputError as error:
                console.print(f"[red]{error}[/red]", highlight=False)


class _Conversation:
    def __init__(self, engine: AsyncEngine, params: SamplingParams, system: str | None) -> None:
        self.notes = Console(stderr=True)
        self._engine = engine
        self._params = params
        self._system = system
        self._messages: Messages = []
        self.reset()

    def reset(self) -> None:
        self._messages = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})

    async def answer(self, text: str) -> None:
        """Print the answer as it comes. Ctrl-C stops it; what was said so far stays."""
        asked = [*self._messages, {"role": "user", "content": text}]
        tokens = self._engine.tokenizer.encode_chat(asked)
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        said: list[str] = []
        try:
            await self._stream(tokens, said)
        except asyncio.CancelledError:
            task.uncancel()
            self.notes.print("\n[dim]stopped[/dim]")
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    async def _stream(self, tokens: list[int], said: list[str]) -> None:
        start = time.perf_counter()
        first = None
        usage = None
        async for delta in self._engine.generate(tokens, self._params):
            first = first or time.perf_counter()
            said.append(delta.text)
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            if delta.error:
                raise InputError(delta.error)
            usage = delta.usage or usage
        sys.stdout.write("\n")
        if usage is not None and first is not None and self.notes.is_terminal:
            self.notes.print(f"[dim]{_note(usage, start, first)}[/dim]", highlight=False)


def _note(usage: Usage, start: float, first: float) -> str:
    """How the answer came about, in one line."""
    end = time.perf_counter()
    tiers = "".join(f"{count:,} {name} + " for name, count in usage.tiers.items())
    rate = (usage.completion_tokens - 1) / max(end - first, 1e-9)
    return (
        f"first token {1000 * (first - start):,.0f} ms, {rate:.0f} tokens/s; "
        f"prompt {usage.prompt_tokens:,} = {usage.device:,} device + {usage.host:,} host "
        f"+ {tiers}{usage.computed:,} computed"
    )
