"""What the server adds to the engine: the time from its start to a first answer, and tokens through HTTP.

- start: ``ebbtide serve`` as a process, until a chat completion of one token is answered, imports included.
- streams: the same prompts by ``LLM.generate`` and, as so many streams at a time, through the server. Both
  engines are processes of their own, asked in turns; the client shares the processors with the server,
  and does no more than count events.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console

from ebbtide.engine.config import DEFAULT_MODEL

PROMPT_TOKENS, ANSWER_TOKENS = 64, 128
KV_MEMORY = 512 << 20
START_LIMIT_S, RATIO_MIN = 5.0, 0.93
START_DEADLINE_S = 60.0


@contextmanager
def server() -> Iterator[tuple[int, float]]:
    """A server that has answered once: its port, and the seconds from its start to that answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begin = time.perf_counter()
    program = Path(sys.executable).with_name("ebbtide")
    command = [program, "serve", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(asyncio.wait_for(first_answer(port, process), START_DEADLINE_S))
        yield port, time.perf_counter() - begin
    finally:
        process.terminate()
        process.wait()


async def first_answer(port: int, process: subprocess.Popen[bytes]) -> None:
    body = {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 1,
    }
    while True:
        try:
            await post(port, "/v1/chat/completions", body)
            return
        except OSError:
            if process.poll() is not None:
                raise SystemExit("the server has ended; run ebbtide serve to see why") from None
            await asyncio.sleep(0.01)


async def post(port: int, path: str, body: dict[str, Any]) -> bytes:
    """The whole answer, as it came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + content)
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the server said: {answer[:500].decode(errors='replace')}")
    return answer


async def stream(port: int, prompts: list[list[int]]) -> None:
    """All prompts at once, each a stream; every token must come."""
    params = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    bodies = [
        {"model": DEFAULT_MODEL, "prompt": prompt, **params, **streamed} for prompt in prompts
    ]
    answers = await asyncio.gather(*(post(port, "/v1/completions", body) for body in bodies))
    for answer in answers:
        assert f'"completion_tokens":{ANSWER_TOKENS}'.encode() in answer.replace(b": ", b":")


def generate(connection: Connection) -> None:
    """A process with ``LLM``: answers each list of prompts with the seconds that it took."""
    from ebbtide import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    with LLM(kv_bytes=KV_MEMORY) as llm:
        connection.send(0.0)
        while prompts := connection.recv():
            begin = time.perf_counter()
            llm.generate(prompts, params)
            connection.send(time.perf_counter() - begin)


def bench_streams(port: int, streams: int, rounds: int) -> tuple[list[float], list[float]]:
    """tokens/s of each round, by ``LLM.generate`` and through the server."""
    context = multiprocessing.get_context("spawn")
    connection, child = context.Pipe()
    context.Process(target=generate, args=(child,), daemon=True).start()
    connection.recv()
    drawn = random.Random(1)
    direct, served = [], []
    for number in range(rounds + 1):  # the first is to warm up
        prompts = [[drawn.randrange(40_000) for _ in range(PROMPT_TOKENS)] for _ in range(streams)]
        tokens = streams * ANSWER_TOKENS
        connection.send(prompts)
        direct_s = connection.recv()
        begin = time.perf_counter()
        asyncio.run(stream(port, prompts))
        served_s = time.perf_counter() - begin
        if number:
            direct.append(tokens / direct_s)
            served.append(tokens / served_s)
    connection.send(None)
    return direct, served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    console = Console(width=120)
    starts = []
    for _ in range(args.starts):
        with server() as (_, seconds):
            starts.append(seconds)
    console.print(
        f"start to first answer: median {statistics.median(starts):.2f} s, most {max(starts):.2f} s, "
        f"of {args.starts}; asked for: {START_LIMIT_S:.0f} s"
    )
    with server() as (port, _):
        direct, served = bench_streams(port, args.streams, args.rounds)
    ratio = statistics.median(b / a for a, b in zip(direct, served, strict=True))
    console.print(
        f"{args.streams} streams: {statistics.median(direct):.0f} tokens/s by LLM.generate, "
        f"{statistics.median(served):.0f} through HTTP: {ratio:.3f}; asked for: {RATIO_MIN}"
    )


if __name__ == "__main__":
    main()
