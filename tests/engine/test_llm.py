"""The engine with a real model: what a Python program sees of it. Float32, so that tokens are exact."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from tests.models import tiny_files

from ebbtide.engine.async_engine import AsyncEngine
from ebbtide.engine.config import MIB, EngineConfig
from ebbtide.engine.llm import LLM
from ebbtide.engine.output import Delta
from ebbtide.errors import InputError, QueueFull
from ebbtide.params import RepetitionStop, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SETTINGS = {"dtype": "float32", "kv_bytes": 40 * MIB, "host_bytes": 200 * MIB, "max_length": 1024}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as llm:  # type: ignore[arg-type]
        yield llm


def greedy(count: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, **more)  # type: ignore[arg-type]


def test_it_answers(llm: LLM) -> None:
    done = llm.chat([{"role": "user", "content": "What is the capital of France?"}], greedy(30))[0]
    assert "Paris" in done.text
    assert done.finish_reason == "stop"
    assert done.usage is not None
    assert done.usage.completion_tokens == len(done.token_ids)
    assert "<|im_end|>" not in done.text


def test_usage_adds_up_and_a_second_time_is_served_from_the_device(llm: LLM) -> None:
    prompt = "The tide comes in and the tide goes out. " * 12
    first, second = llm.generate(prompt, GREEDY)[0], llm.generate(prompt, GREEDY)[0]
    for usage in (first.usage, second.usage):
        assert usage is not None
        assert usage.device + usage.host + usage.computed == usage.prompt_tokens
    assert second.usage is not None
    assert second.usage.device >= second.usage.prompt_tokens - 17
    assert first.token_ids == second.token_ids


def test_kv_that_left_the_device_comes_back_from_host_with_the_same_tokens(llm: LLM) -> None:
    prompts = [f"Story number {n}. " + f"Once there were {n} ships. " * 40 for n in range(8)]
    first = llm.generate(prompts, GREEDY)  # together they are larger than the pool
    again = llm.generate(prompts, GREEDY)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert sum(c.usage.host for c in again if c.usage) > 0
    llm.reset()
    assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == [c.token_ids for c in first]


def test_completions_of_one_prompt_differ_by_their_seed_and_repeat_with_it(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=10)
    first, again = llm.generate("The sea is", params), llm.generate("The sea is", params)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) > 1
    alone = SamplingParams(temperature=1.0, seed=8, max_tokens=10)
    assert llm.generate("The sea is", alone)[0].token_ids == first[1].token_ids


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    plain = llm.generate("Count: one, two, three,", greedy(24))[0]
    stop = plain.text[len(plain.text) // 2 :][:4]
    stopped = llm.generate("Count: one, two, three,", greedy(24, stop=(stop,)))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == plain.text[: plain.text.index(stop)]


def test_other_ways_to_end(llm: LLM) -> None:
    prompt = "The sea is"
    plain = llm.generate(prompt, greedy(10, ignore_eos=True))[0]
    assert plain.finish_reason == "length"
    token = plain.token_ids[4]
    by_token = llm.generate(prompt, greedy(10, stop_token_ids=frozenset({token})))[0]
    assert by_token.finish_reason == "stop"
    assert by_token.token_ids == plain.token_ids[: plain.token_ids.index(token) + 1]
    rule = RepetitionStop(max_pattern_size=8, min_count=3)
    looping = llm.generate("ha ha ha ha ha ha ha ha ha ha", greedy(200, repetition=rule))[0]
    assert looping.finish_reason in {"repetition", "stop", "length"}
    if looping.finish_reason == "repetition":
        tail = looping.token_ids
        assert any(tail[-p:] == tail[-2 * p : -p] == tail[-3 * p : -2 * p] for p in range(1, 9))


def test_logprobs(llm: LLM) -> None:
    done = llm.generate("The sea is", greedy(5, logprobs=3))[0]
    assert len(done.logprobs) == len(done.token_ids) == 5
    for token, entry in zip(done.token_ids, done.logprobs, strict=True):
        assert entry.token == token == entry.top[0][0]
        assert len(entry.top) == 3
        assert entry.logprob == entry.top[0][1] <= 0
        assert [value for _, value in entry.top] == sorted((v for _, v in entry.top), reverse=True)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("", GREEDY, "empty"),
        ([], GREEDY, "empty"),
        ([5, 10**6], GREEDY, "1000000"),
        ([5, -1], GREEDY, "-1"),
        ([5] * 1024, GREEDY, "1024 tokens"),
        ([5] * 900, greedy(100), "KV blocks"),
        ("a", SamplingParams(logit_bias={10**6: 1.0}), "1000000"),
        ("a", SamplingParams(stop_token_ids=frozenset({10**6})), "1000000"),
    ],
)
def test_bad_input_is_one_sentence_and_harms_nobody(
    llm: LLM, prompt: str | list[int], params: SamplingParams, words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        llm.generate([prompt], params)
    assert "\n" not in str(caught.value)
    assert llm.generate("The sea", greedy(2))[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate(3), "a text, a list of token ids, or a list of either, got 3"),
        (lambda llm: llm.generate(None), "got None"),
        (lambda llm: llm.generate(b"abc"), "got b'abc'"),
        (lambda llm: llm.generate(["a", 3]), "got 3 at index 1"),
        (lambda llm: llm.generate([3, "a"]), "token id 'a'"),
        (lambda llm: llm.generate("a", {"temperature": 0}), "params must be SamplingParams"),
        (lambda llm: llm.generate(["a"], [GREEDY, GREEDY]), "1 prompts, but 2 sets"),
        (lambda llm: llm.generate("a", max_tokens=5), r"SamplingParams\(max_tokens=...\)"),
        (lambda llm: llm.generate("a", cache_sald="x"), "did you mean 'cache_salt'"),
        (lambda llm: llm.chat("hi"), r"got 'hi'; generate\(\) completes a text"),
        (lambda llm: llm.chat({"role": "user", "content": "hi"}), "messages must be a list"),
        (lambda llm: llm.chat([]), "messages is empty"),
        (lambda llm: llm.chat([[]]), "messages is empty"),
        (lambda llm: llm.chat(["hi"]), "a message must be an object"),
        (lambda llm: llm.chat([[], "hi"]), "messages is empty"),
    ],
)
def test_what_is_no_prompt_is_one_sentence(llm: LLM, call: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        call(llm)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_byte": 1}, "kv_bytes"),
        ({"dtype": "int3"}, "bfloat16"),
        ({"weights": "int3"}, "weights must be one of auto, packed"),
        (
            {"weights": "packed", "dtype": "float32", "kernels": "torch"},
            "nothing here multiplies with them",
        ),
        ({"weights": "bfloat16", "dtype": "float32"}, "needs dtype=bfloat16"),
        ({"overlap": 3}, "overlap"),
        ({"threads": 100_000}, "threads must be 1024 at most"),
        ({"kv_bytes": 1}, "at least"),
        ({"kv_bytes": "1GiB"}, "kv_bytes must be an integer, got '1GiB'"),
        ({"threads": "2"}, "threads must be an integer, got '2'"),
        ({"close_s": "1"}, "close_s must be above 0"),
        ({"kv_bytes": 1 << 50}, "available"),
        ({"host_bytes": 1}, "one chunk"),
        ({"max_length": 10**6}, "8192"),
        ({"device": "toaster"}, "toaster"),
        ({"model": "no/such/file.gguf"}, "no/such/file.gguf"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(
    settings: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        LLM(**settings)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weights", ["packed", "float32"])
def test_each_form_of_the_weights_answers_alike(weights: str) -> None:
    """KV in bfloat16, weights packed or wider: the model's first words are the same."""
    settings = {"kv_bytes": 40 * MIB, "host_bytes": 0, "dtype": "bfloat16", "threads": 1}
    with LLM(**settings, weights=weights) as llm:  # type: ignore[arg-type]
        (answer,) = llm.chat([{"role": "user", "content": "What is 2+2?"}], greedy(20))
    assert "4" in answer.text


def test_packed_weights_of_a_file_that_has_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tiny_files.write_gguf(path, "llama", tiny_files.model("llama"), GGMLQuantizationType.Q8_0)
    with pytest.raises(InputError, match="model has no weights in Q4_0 or Q4_1: use auto"):
        LLM(model=str(path), weights="packed", dtype="bfloat16")


def test_deltas_arrive_one_by_one_and_a_closed_iterator_aborts() -> None:
    before = set(threading.enumerate())

    async def main() -> None:
        engine = AsyncEngine.start(EngineConfig(**SETTINGS))  # type: ignore[arg-type]
        try:
            deltas = [d async for d in engine.generate("The sea is", greedy(6, n=2))]
            for index in (0, 1):
                own = [d for d in deltas if d.index == index]
                assert [d.finish_reason for d in own[:-1]] == [None] * (len(own) - 1)
                assert own[-1].usage is not None
                assert sum(len(d.token_ids) for d in own) == 6
            await _closing_aborts(engine)
            await _cancelling_aborts(engine)
            await _failing_in_the_call_itself(engine)
        finally:
            await engine.close()
        left = set(threading.enumerate()) - before
        assert not [thread for thread in left if thread.name.startswith("ebbtide")]

    asyncio.run(main())


async def _until_idle(engine: AsyncEngine) -> None:
    for _ in range(500):
        stats = engine.stats()
        if not stats.running + stats.waiting + stats.loading and not stats.kv_blocks_in_use:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still busy: {engine.stats()}")


async def _closing_aborts(engine: AsyncEngine) -> None:
    stream = engine.generate("Count to a thousand:", greedy(500, ignore_eos=True))
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    await _until_idle(engine)
    assert engine.stats().finished_requests["abort"] == 1


async def _cancelling_aborts(engine: AsyncEngine) -> None:
    got: list[Delta] = []

    async def listen() -> None:
        async for delta in engine.generate("Count to a thousand:", greedy(500, ignore_eos=True)):
            got.append(delta)

    task = asyncio.create_task(listen())
    while not got:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _until_idle(engine)
    assert engine.stats().finished_requests["abort"] == 2


async def _failing_in_the_call_itself(engine: AsyncEngine) -> None:
    with pytest.raises(InputError, match="empty"):
        engine.generate("", GREEDY)


def test_a_batch_larger_than_the_queue_still_completes() -> None:
    with LLM(**{**SETTINGS, "max_waiting": 2, "max_batch": 2}) as llm:  # type: ignore[arg-type]
        done = llm.generate([[number + 5] for number in range(7)], greedy(3, ignore_eos=True))
        assert [len(c.token_ids) for c in done] == [3] * 7
        with pytest.raises(QueueFull):
            llm.generate([[5]], greedy(3, n=5))
