"""The whole way with a real model: one server for all of these tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.server.serving import Served, events, eventually, served
from tests.server.test_metrics import samples

from ebbtide.engine.async_engine import AsyncEngine
from ebbtide.engine.config import EngineConfig

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    config = EngineConfig(
        threads=1, dtype="float32", kv_bytes=48 << 20, host_bytes=64 << 20, max_waiting=80
    )
    with served(AsyncEngine.start(config)) as server:
        yield server


def chat(real: Served, **options: Any) -> Any:
    return real.openai.chat.completions.create(
        model=real.engine.model_name, messages=QUESTION, temperature=0, **options
    )


def test_the_model_is_listed(real: Served) -> None:
    (model,) = real.openai.models.list().data
    assert model.id == "smollm2-135m-instruct"
    assert model.model_extra == {"max_length": real.engine.max_length}


def test_whole_and_streamed_answers_are_the_same(real: Served) -> None:
    whole = chat(real, max_tokens=12)
    assert "Paris" in whole.choices[0].message.content
    chunks = list(chat(real, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == (
        whole.choices[0].finish_reason
    )
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_prompt_said_again_comes_from_the_cache(real: Served) -> None:
    prompt = "The tide goes out and the tide comes in, " * 8
    salted: dict[str, Any] = {"max_tokens": 2, "cache_salt": "a", "temperature": 0}
    first, again = (real.completion(prompt, **salted).json() for _ in range(2))
    before = first["usage"]["prompt_tokens_details"]
    after = again["usage"]["prompt_tokens_details"]
    assert before["cached_tokens"] == 0
    assert after["device"] + after["host"] == after["cached_tokens"] > 0
    assert after["cached_tokens"] + after["computed"] == again["usage"]["prompt_tokens"]
    assert first["choices"] == again["choices"]
    other = real.completion(prompt, **{**salted, "cache_salt": "b"}).json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_logprobs_and_choices(real: Served) -> None:
    answer = chat(real, max_tokens=4, logprobs=True, top_logprobs=3, n=2)
    for choice in answer.choices:
        for item in choice.logprobs.content:
            assert item.logprob <= 0
            assert len(item.top_logprobs) == 3
            assert item.token == item.top_logprobs[0].token
    first, second = answer.choices
    assert first.message.content == second.message.content

    text = real.completion("One, two, three,", max_tokens=6, logprobs=2, temperature=0).json()
    choice = text["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["text_offset"][0] == 0
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])


def test_seeds_make_samples_repeatable(real: Served) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "n": 2}
    one, other = (real.completion("Once", **asked).json()["choices"] for _ in range(2))
    assert one == other
    assert one[0]["text"] != one[1]["text"]


def test_stop_strings_and_repetition(real: Served) -> None:
    asked: dict[str, Any] = {"max_tokens": 64, "temperature": 0}
    counting = real.completion("1 2 3 4 5 6", **asked).json()["choices"][0]["text"]
    assert "10" in counting
    stopped = real.completion("1 2 3 4 5 6", **asked, stop=["10"]).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (counting.split("10")[0], "stop")
    rule = {"max_pattern_size": 8, "min_count": 3}
    laughing = real.completion("ha ha ha ha ha", **asked, repetition=rule, ignore_eos=True)
    choice = laughing.json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")


def test_errors_of_the_engine_name_their_field(real: Served) -> None:
    for wrong in ({"prompt": [10**6]}, {"logit_bias": {"999999": 1}}, {"stop_token_ids": [10**6]}):
        answer = real.completion(**{"prompt": "x", **wrong})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == next(iter(wrong))
    for path in (real.completion, real.chat):
        error = path("tide " * (real.engine.max_length + 1)).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("prompt" if path == real.completion else "messages")
    error = real.chat(max_tokens=5000).json()["error"]
    assert (error["param"], error["code"]) == ("messages", None)


def test_a_client_that_leaves_frees_its_blocks(real: Served) -> None:
    body = {"model": real.engine.model_name, "prompt": "x", "max_tokens": 900, "stream": True}
    with real.http.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as answer:
        pieces = answer.iter_raw()  # kept: the connection ends with it
        next(pieces)
        assert real.engine.stats().running == 1
    assert eventually(lambda: real.engine.stats().running == 0)
    assert eventually(lambda: real.engine.stats().kv_blocks_in_use == 0)
    assert real.engine.stats().finished_requests["abort"] >= 1


def test_64_streams_at_once(real: Served) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> int:
        stream = await client.completions.create(
            model=real.engine.model_name,
            prompt=f"Story number {number}:",
            stream=True,
            max_tokens=4,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage is not None
        return chunks[-1].usage.completion_tokens

    async def ask_all() -> list[int]:
        url = f"{real.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    assert asyncio.run(ask_all()) == [4] * 64


def test_a_full_queue(real: Served) -> None:
    answer = real.completion(["x"] * 60, n=2, max_tokens=1)
    assert answer.status_code == 429
    assert eventually(lambda: real.engine.stats().waiting + real.engine.stats().running == 0)
    assert events(real.completion(stream=True, max_tokens=1).text)[-1] == "[DONE]"


def test_metrics_add_up(real: Served) -> None:
    before = samples(real)
    usage = real.completion("Six words make up this prompt", max_tokens=3).json()["usage"]
    after = samples(real)

    def grown(name: str) -> float:
        return sum(after[key] - before[key] for key in after if key.startswith(name))

    assert grown("ebbtide_prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("ebbtide_generated_tokens_total") == usage["completion_tokens"]
    assert grown("ebbtide_finished_requests_total") == 1
    assert all(after[key] >= before[key] for key in before if "_total" in key)
