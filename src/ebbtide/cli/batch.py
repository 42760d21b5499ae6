"""``ebbtide generate``: many prompts from a file, all together.

Input: one JSON object a line, with ``prompt`` (text or token ids) or ``messages``, an optional ``id``,
and any sampling parameters under their names. Output: one JSON object a line, in the order in which
they finish, each with its input's ``line`` (from 1) and ``id``. A line that cannot be completed gives a
record with ``error``, and stops nobody else.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.progress import Progress

from ebbtide.cli.options import Failure
from ebbtide.cli.progress import loading
from ebbtide.engine.async_engine import AsyncEngine
from ebbtide.engine.config import EngineConfig
from ebbtide.engine.llm import Completion
from ebbtide.errors import InputError, QueueFull
from ebbtide.params import SamplingParams
from ebbtide.server.body import parse_object
from ebbtide.server.fields import check_names, is_token_list
from ebbtide.server.messages import read_messages
from ebbtide.server.requests import read_sampling

SAMPLING = tuple(field.name for field in fields(SamplingParams))
KNOWN = ("id", "prompt", "messages", *SAMPLING)
AT_ONCE = 512  # lines that are with the engine at a time
Record = dict[str, Any]


def run_batch(config: EngineConfig, source: str, target: str, overwrite: bool = False) -> int:
    """Complete every line of ``source``; returns how many could not be. Raises InputError, Failure.

    When interrupted, says how many lines are done, and raises KeyboardInterrupt.
    """
    if overwrite and _are_one_file(source, target):
        raise InputError(f"{target} is the input itself: give the output another name")
    lines = _read(source)
    with _open(target, overwrite) as out:
        batch = _Batch(out)
        try:
            with loading() as progress:
                engine = AsyncEngine.start(config, progress)
            try:
                return asyncio.run(batch.run(engine, lines))
            finally:
                asyncio.run(engine.close())
        except KeyboardInterrupt:
            where = "on standard output" if target == "-" else f"in {target}"
            done = f"{batch.written} of {len(lines)} lines are done"
            typer.echo(f"ebbtide: stopped; {done}{f', {where}' if batch.written else ''}", err=True)
            raise


def _are_one_file(source: str, target: str) -> bool:
    with suppress(OSError):  # one of them is not there, or no file
        return Path(source).samefile(target)
    return False


@contextmanager
def _open(target: str, overwrite: bool) -> Iterator[TextIO]:
    if target == "-":
        yield sys.stdout
        return
    path = Path(target)
    try:
        out = path.open("w" if overwrite else "x", encoding="utf-8")
    except FileExistsError:
        raise InputError(f"{target} exists: choose another name, or pass --overwrite") from None
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}") from None
    try:
        with out:
            yield out
    except BaseException:
        if path.is_file() and not path.stat().st_size:
            path.unlink()  # an empty one would only be in the way of the next try
        raise


def _read(source: str) -> list[tuple[int, str]]:
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text("utf-8")
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 text: byte {error.start} is not") from None
    return [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]


class _Batch:
    def __init__(self, out: TextIO) -> None:
        self.written = 0
        self._out = out
        self._failed = 0

    async def run(self, engine: AsyncEngine, lines: list[tuple[int, str]]) -> int:
        """Work through the lines with a bounded number of them in the engine; how many failed."""
        console = Console(stderr=True)
        waiting = iter(lines)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("completing", total=len(lines))

            async def worker() -> None:
                for number, line in waiting:
                    self._write(await self._complete(engine, number, line))
                    progress.advance(bar)

            await asyncio.gather(*(worker() for _ in range(min(AT_ONCE, len(lines)))))
        return self._failed

    async def _complete(self, engine: AsyncEngine, number: int, line: str) -> Record:
        record: Record = {"line": number}
        try:
            asked = parse_object(line, "the line")
            if "id" in asked:
                record["id"] = asked["id"]
            asked = checked(asked)
            params = params_of(asked)
            prompt = asked.get("prompt")
            if "messages" in asked:
                prompt = engine.tokenizer.encode_chat(asked["messages"])
            completions = await self._generate(engine, prompt, params)
        except InputError as error:
            return {**record, "error": str(error)}
        errors = [c.error for c in completions if c.error]
        if errors:
            record["error"] = errors[0]
        results = [dict(_result(completion)) for completion in completions]
        return {**record, **results[0]} if params.n == 1 else {**record, "completions": results}

    async def _generate(
        self, engine: AsyncEngine, prompt: Any, params: SamplingParams
    ) -> list[Completion]:
        completions = [Completion() for _ in range(params.n)]
        while True:
            try:
                stream = engine.generate(prompt, params)
                break
            except QueueFull:
                await asyncio.sleep(0.05)
        async for delta in stream:
            completions[delta.index].add(delta)
        return completions

    def _write(self, record: Record) -> None:
        """At once and flushed: what is finished is never lost."""
        try:
            self._out.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise Failure(f"cannot write a result: {error.strerror}") from None
        self._failed += "error" in record
        self.written += 1


def checked(asked: Record) -> Record:
    """One input line. Raises InputError."""
    check_names(asked, KNOWN)
    if ("prompt" in asked) == ("messages" in asked):
        raise InputError("a line must have prompt or messages, and not both", "prompt")
    if "messages" in asked:
        return {**asked, "messages": read_messages(asked["messages"])}
    if not isinstance(asked["prompt"], str) and not is_token_list(asked["prompt"]):
        raise InputError("prompt must be a string or a list of token ids", "prompt")
    return asked


def params_of(asked: Record) -> SamplingParams:
    """The sampling parameters of an input line. Raises InputError."""
    named = ("max_tokens", "logprobs")
    return read_sampling(asked, {n: asked[n] for n in named if asked.get(n) is not None})


def _result(completion: Completion) -> Iterator[tuple[str, Any]]:
    yield "text", completion.text
    yield "token_ids", completion.token_ids
    yield "finish_reason", completion.finish_reason
    if completion.logprobs:
        yield "logprobs", [entry._asdict() for entry in completion.logprobs]
    if completion.usage is not None:
        yield "usage", asdict(completion.usage)
