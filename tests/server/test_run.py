"""A server as a process of its own: ports, signals and exit codes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ebbtide.server.run import BindError, bind, url_of

ROOT = Path(__file__).parents[2]

# Serves a fake engine whose answers take 60 seconds, and whose end does if there is a second argument;
# prints the URL.
PROGRAM = """
import asyncio
import sys
from ebbtide.server.config import ServerConfig
from ebbtide.server.run import bind, serve_engine
from tests.server.fake import FakeEngine

engine = FakeEngine(lambda text, index: "x" * 3000)
engine.delay_s = 0.02
say = lambda text: print(text, flush=True)
if sys.argv[2:]:

    async def close():
        await asyncio.sleep(60)

    engine.close = close
config = ServerConfig(grace_s=float(sys.argv[1]))
serve_engine(engine, bind("127.0.0.1", 0), config=config, ready=say, stopping=say)
print("closed" if engine.closed and not engine.unfinished else "left open")
"""


@contextmanager
def process(grace_s: float, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(grace_s), *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with started:
        try:
            assert started.stdout is not None
            yield started, started.stdout.readline().strip()
        finally:
            started.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(number: signal.Signals) -> None:
    with process(grace_s=0.2) as (server, url):
        body = {"model": "fake", "prompt": "x", "stream": True, "max_tokens": 3000}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            parts = answer.iter_text()
            next(parts)
            started = time.monotonic()
            server.send_signal(number)
            assert "shutting_down" in "".join(parts)
        out, err = server.communicate(timeout=10)
        assert time.monotonic() - started < 5
        told = "Stopping: 1 request has 0.2 s to finish (Ctrl-C ends at once).\n"
        assert (server.returncode, out, err) == (0, told + "closed\n", "")


def test_a_second_signal_ends_it_at_once() -> None:
    with process(grace_s=60) as (server, url):
        body = {"model": "fake", "prompt": "x", "stream": True, "max_tokens": 3000}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            server.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert server.poll() is None
            server.send_signal(signal.SIGTERM)
            assert server.wait(3) == 128 + signal.SIGTERM


def test_an_engine_that_takes_long_to_close_is_told_of_and_a_second_signal_still_counts() -> None:
    with process(0.0, "closes slowly") as (server, _):
        assert server.stdout is not None
        server.send_signal(signal.SIGINT)
        assert server.stdout.readline().startswith("Stopping: waiting for the steps in flight")
        server.send_signal(signal.SIGINT)
        assert server.wait(3) == 128 + signal.SIGINT


def test_a_port_in_use_is_found_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "ebbtide.cli.main", "serve", "--port", str(port)]
        done = subprocess.run(
            [*command, "--model", "/no/such/model.gguf"], capture_output=True, text=True, timeout=30
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"port {port}" in done.stderr
    assert "in use; choose another with --port" in done.stderr


def test_addresses() -> None:
    with bind("localhost", 0) as sock:
        assert url_of(sock).startswith("http://")
        with (
            pytest.raises(BindError, match="cannot listen"),
            socket.create_server(("", 0)) as other,
        ):
            bind("127.0.0.1", other.getsockname()[1])
    with pytest.raises(BindError, match="not known"):
        bind("no such host", 80)
