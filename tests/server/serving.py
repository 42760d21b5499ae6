"""Runs the real HTTP stack around an engine in a thread, on a free port of the loopback."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from ebbtide.server.config import ServerConfig
from ebbtide.server.run import Server, bind, url_of


@dataclass
class Served:
    """A running server: its engine, and clients for it. Nothing is tried twice."""

    url: str
    engine: Any
    http: httpx.Client
    openai: openai.OpenAI
    server: Server

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST ``body`` for the server's model."""
        return self.http.post(path, json={"model": self.engine.model_name, **body})

    def completion(self, prompt: Any = "hello", **body: Any) -> httpx.Response:
        return self.post("/v1/completions", prompt=prompt, **body)

    def chat(self, text: Any = "hello", **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", **{"messages": messages, **body})


@contextmanager
def served(engine: Any, config: ServerConfig | None = None) -> Iterator[Served]:
    """The engine must not be used outside of the server's event loop; it is closed at the end."""
    sock = bind("127.0.0.1", 0)
    url = url_of(sock)
    up = threading.Event()
    server = Server(engine, config or ServerConfig(grace_s=0.0), lambda _: up.set())
    thread = threading.Thread(target=lambda: asyncio.run(server.run(sock)))
    thread.start()
    try:
        assert up.wait(10)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
        with httpx.Client(base_url=url, timeout=30) as http, client:
            yield Served(url, engine, http, client, server)
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()
        assert not thread.is_alive()


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    """Whether ``condition`` comes true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def events(text: str) -> list[Any]:
    """The payloads of server-sent events; ``[DONE]`` stays a string."""
    payloads = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]
