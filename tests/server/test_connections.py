"""Clients that leave, that are many, or that meet a server on its way out."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from tests.server.fake import FakeEngine
from tests.server.serving import Served, events, eventually, served

from ebbtide.server.config import ServerConfig


def slow_engine(delay_s: float = 0.02) -> FakeEngine:
    engine = FakeEngine(lambda text, index: "x" * 3000)
    engine.delay_s = delay_s
    return engine


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(path: str, stream: bool) -> None:
    engine = slow_engine()
    body: dict[str, Any] = {"model": "fake", "stream": stream, "n": 2, "max_tokens": 3000}
    if path == "/v1/completions":
        body["prompt"] = ["a", "b"]
    else:
        body["messages"] = [{"role": "user", "content": "x"}]
    with served(engine) as server:
        if stream:
            with server.http.stream("POST", path, json=body) as answer:
                next(answer.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout):
                server.http.post(path, json=body, timeout=0.3)
        assert eventually(lambda: engine.unfinished == 0)
        assert engine.aborted == (2 if path == "/v1/completions" else 1)
        assert server.http.get("/health").is_success


def test_closing_the_official_clients_stream_aborts() -> None:
    engine = slow_engine()
    with served(engine) as server:
        stream = server.openai.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x"}], stream=True
        )
        next(iter(stream))
        assert engine.unfinished == 1
        stream.close()
        assert eventually(lambda: engine.unfinished == 0)
        assert engine.aborted == 1


def test_64_streams_at_once_are_all_complete() -> None:
    engine = FakeEngine(lambda text, index: text * 20)
    engine.delay_s = 0.002

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model="fake", prompt=f"{number:03d}", stream=True, max_tokens=100
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    with served(engine) as server:
        texts = asyncio.run(ask_all(f"{server.url}/v1"))
    assert texts == [f"{number:03d}" * 20 for number in range(64)]
    assert (engine.unfinished, engine.aborted) == (0, 0)


def test_deltas_that_came_together_are_written_together(echo: Served) -> None:
    with echo.http.stream(
        "POST",
        "/v1/completions",
        json={"model": "fake", "prompt": "x" * 500, "max_tokens": 500, "stream": True},
    ) as answer:
        pieces = [piece for piece in answer.iter_raw() if piece]
    assert len(events(b"".join(pieces).decode())) == 502
    assert len(pieces) < 100


def test_a_stopping_server_lets_requests_finish_and_takes_no_more() -> None:
    engine = FakeEngine(lambda text, index: "x" * 20)
    engine.delay_s = 0.02
    with served(engine, ServerConfig(grace_s=5.0)) as server, ThreadPoolExecutor() as pool:
        running = pool.submit(server.completion, max_tokens=50)
        assert eventually(lambda: engine.unfinished == 1)
        server.server.should_exit = True
        assert running.result().json()["choices"][0]["text"] == "x" * 20
        assert eventually(lambda: engine.closed)
        with pytest.raises(httpx.ConnectError):
            server.completion()


def test_a_stopping_server_ends_what_does_not_finish_in_time() -> None:
    engine = slow_engine()
    with served(engine, ServerConfig(grace_s=0.3)) as server, ThreadPoolExecutor() as pool:
        started = time.monotonic()
        whole = pool.submit(server.completion, max_tokens=3000)
        stream = pool.submit(server.completion, max_tokens=3000, stream=True)
        assert eventually(lambda: engine.unfinished == 2)
        server.server.should_exit = True
        refused = whole.result()
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        for error in (refused.json(), events(stream.result().text)[-1]):
            assert error["error"]["code"] == "shutting_down"
        assert eventually(lambda: engine.closed)
        assert time.monotonic() - started < 5
        assert engine.unfinished == 0


def test_the_service_refuses_once_it_stops(echo: Served) -> None:
    engine = FakeEngine()
    with served(engine) as server:
        service = server.server._service
        service.stop()
        for answer in (server.completion(), server.http.get("/health")):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "shutting_down"
