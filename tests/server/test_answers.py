"""What the official client gets, whole and streamed."""

from __future__ import annotations

import openai
import pytest
from tests.server.fake import END, FakeEngine
from tests.server.serving import Served, events, served

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_ECHO = "<user>hi<assistant>"


def test_models_are_listed_and_found(echo: Served) -> None:
    listed = echo.openai.models.list().data
    assert [model.id for model in listed] == ["fake"]
    assert echo.openai.models.retrieve("fake") == listed[0]


def test_completion(echo: Served) -> None:
    answer = echo.openai.completions.create(model="fake", prompt="hello")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.created > 1_600_000_000
    assert answer.model == "fake"
    assert answer.system_fingerprint
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "hello", "stop")
    assert choice.logprobs is None


def test_chat(echo: Served) -> None:
    answer = echo.openai.chat.completions.create(model="fake", messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == CHAT_ECHO
    assert choice.finish_reason == "stop"


def test_usage_says_where_the_prompt_came_from(echo: Served) -> None:
    usage = echo.openai.completions.create(model="fake", prompt="hello").usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 5, 10)
    details = usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == 2
    assert details.model_extra == {"device": 1, "host": 1, "computed": 3}
    assert usage.model_extra == {"recomputed_tokens": {"preempted": 2, "failed": 1}}


def test_usage_counts_a_prompt_once_and_every_output(echo: Served) -> None:
    answer = echo.openai.completions.create(model="fake", prompt=["hello", "abc"], n=3)
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (8, 24)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 4


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abc"]),
        (["abc", "d"], ["abc", "d"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_every_form_of_prompt(echo: Served, prompt: object, texts: list[str]) -> None:
    answer = echo.openai.completions.create(model="fake", prompt=prompt)  # type: ignore[arg-type]
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))


def test_completions_end_after_16_tokens_unless_told_otherwise(echo: Served) -> None:
    prompt = "a" * 40
    short = echo.openai.completions.create(model="fake", prompt=prompt).choices[0]
    assert (short.text, short.finish_reason) == ("a" * 16, "length")
    longer = echo.openai.completions.create(model="fake", prompt=prompt, max_tokens=30)
    assert longer.choices[0].text == "a" * 30


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_chat_takes_either_name_of_the_limit(echo: Served, name: str) -> None:
    choice = echo.chat("hello", **{name: 3}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("<us", "length")


def test_choices_of_several_prompts_are_in_order() -> None:
    with served(FakeEngine(lambda text, index: f"{text}{index}")) as server:
        answer = server.openai.completions.create(model="fake", prompt=["a", "b"], n=2)
        assert [choice.text for choice in answer.choices] == ["a0", "a1", "b0", "b1"]
        stream = server.openai.completions.create(model="fake", prompt=["a", "b"], n=2, stream=True)
        texts = [""] * 4
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == ["a0", "a1", "b0", "b1"]


def test_streamed_completion(echo: Served) -> None:
    chunks = list(echo.openai.completions.create(model="fake", prompt="grüß", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "grüß"
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_streamed_chat_opens_with_the_role(echo: Served) -> None:
    chunks = list(echo.openai.chat.completions.create(model="fake", messages=MESSAGES, stream=True))
    first, *rest = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert all(choice.delta.role is None for choice in rest)
    assert "".join(choice.delta.content or "" for choice in rest) == CHAT_ECHO
    assert rest[-1].finish_reason == "stop"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.system_fingerprint for chunk in chunks)


def test_every_streamed_choice_opens_once(echo: Served) -> None:
    stream = echo.openai.chat.completions.create(model="fake", messages=MESSAGES, n=3, stream=True)
    opened, texts = [], ["", "", ""]
    for chunk in stream:
        (choice,) = chunk.choices
        if choice.delta.role:
            opened.append(choice.index)
        texts[choice.index] += choice.delta.content or ""
    assert sorted(opened) == [0, 1, 2]
    assert texts == [CHAT_ECHO] * 3


@pytest.mark.parametrize("path", ["completion", "chat"])
def test_streamed_usage_comes_last_and_only_if_asked(echo: Served, path: str) -> None:
    answer = getattr(echo, path)(stream=True, stream_options={"include_usage": True})
    *chunks, last, done = events(answer.text)
    assert done == "[DONE]"
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    whole = getattr(echo, path)().json()
    assert last["usage"] == whole["usage"]
    assert "usage" not in events(getattr(echo, path)(stream=True).text)[-2]


def test_stop_strings(echo: Served) -> None:
    create = echo.openai.completions.create
    for stop in ("d", ["f", "d"]):
        choice = create(model="fake", prompt="abcdefg", stop=stop).choices[0]
        assert (choice.text, choice.finish_reason) == ("abc", "stop")


def test_repetition_is_a_stop_with_a_reason() -> None:
    with served(FakeEngine(lambda text, index: "lalala")) as server:
        rule = {"max_pattern_size": 4, "min_count": 3}
        choice = server.chat(repetition=rule).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")
        last = events(server.chat(repetition=rule, stream=True).text)[-2]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", "repetition")
        assert "stop_reason" not in server.chat().json()["choices"][0]


def test_chat_logprobs(echo: Served) -> None:
    answer = echo.openai.chat.completions.create(
        model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [item.token for item in logprobs.content] == ["<", "u"]
    first = logprobs.content[0]
    assert (first.logprob, first.bytes) == (-0.5, [ord("<")])
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("<", -0.5), ("=", -1.5)]


def test_chat_logprobs_without_alternatives(echo: Served) -> None:
    answer = echo.chat(logprobs=True, max_tokens=1).json()
    (item,) = answer["choices"][0]["logprobs"]["content"]
    assert item["top_logprobs"] == []


def test_completion_logprobs_whole_and_streamed(echo: Served) -> None:
    whole = echo.completion("aü", logprobs=1).json()["choices"][0]["logprobs"]
    assert whole["text_offset"] == [0, 1, 1]
    assert whole["token_logprobs"] == [-0.5] * 3
    assert whole["tokens"][0] == "a"
    assert whole["top_logprobs"][0] == {"a": -0.5}
    parts = [
        chunk["choices"][0]["logprobs"]
        for chunk in events(echo.completion("aü", logprobs=1, stream=True).text)[:-1]
    ]
    parts = [part for part in parts if part]
    assert {key: [x for part in parts for x in part[key]] for key in whole} == whole


def test_minus_infinity_becomes_a_number_json_can_say() -> None:
    engine = FakeEngine()
    with served(engine) as server:
        real = engine.generate

        def impossible(*args: object, **kwargs: object) -> object:
            stream = real(*args, **kwargs)  # type: ignore[arg-type]
            deltas = list(stream._deltas)
            for delta in deltas[:-1]:
                (item,) = delta.logprobs  # type: ignore[union-attr]
                object.__setattr__(delta, "logprobs", (item._replace(logprob=float("-inf")),))
            stream._deltas = iter(deltas)
            return stream

        engine.generate = impossible  # type: ignore[assignment, method-assign]
        answer = server.completion("ab", logprobs=0)
        assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0] * 2


def test_extensions_reach_the_engine(echo: Served) -> None:
    echo.openai.completions.create(
        model="fake",
        prompt="x",
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": 3, "6": -1.5},
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 1,
            "ignore_eos": True,
            "stop_token_ids": [END],
            "priority": -2,
            "cache_salt": "tenant",
            "on_lost_kv": "fail",
            "repetition": {"max_pattern_size": 4, "min_count": 3},
        },
    )
    request = echo.engine.requests[-1]
    params = request["params"]
    assert (request["priority"], request["cache_salt"]) == (-2, "tenant")
    assert request["fail_on_lost_kv"] is True
    assert (params.temperature, params.top_p, params.seed) == (0.5, 0.9, 7)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert params.logit_bias == {5: 3, 6: -1.5}
    assert (params.top_k, params.min_p, params.repetition_penalty) == (3, 0.1, 1.2)
    assert (params.min_tokens, params.ignore_eos) == (1, True)
    assert params.stop_token_ids == {END}
    assert (params.repetition.max_pattern_size, params.repetition.min_count) == (4, 3)


def test_what_is_not_said_stays_unsaid(echo: Served) -> None:
    assert echo.chat(temperature=None, top_p=None, seed=None, n=None, tools=None).is_success
    params = echo.engine.requests[-1]["params"]
    assert (params.temperature, params.top_p, params.seed, params.n) == (None, None, None, 1)
    assert params.max_tokens is None


def test_fields_without_effect_are_accepted(echo: Served) -> None:
    answer = echo.openai.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        user="me",
        metadata={"job": "x"},
        store=False,
        response_format={"type": "text"},
        safety_identifier="me",
        prompt_cache_key="k",
    )
    assert answer.choices[0].message.content == CHAT_ECHO


def test_roles_and_text_parts(echo: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "system", "content": "!"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
        {"role": "tool", "tool_call_id": "1", "content": "d"},
    ]
    answer = echo.chat(messages=messages).json()
    expected = "<system>be kind<system>!<user>ab<assistant>c<tool>d<assistant>"
    assert answer["choices"][0]["message"]["content"] == expected


def test_an_answer_can_be_fed_back(echo: Served) -> None:
    first = echo.openai.chat.completions.create(model="fake", messages=MESSAGES)
    said = first.choices[0].message.model_dump()
    again = echo.openai.chat.completions.create(model="fake", messages=[*MESSAGES, said])  # type: ignore[list-item]
    assert again.choices[0].message.content == f"<user>hi<assistant>{CHAT_ECHO}<assistant>"


def test_raw_stream_is_server_sent_events(echo: Served) -> None:
    answer = echo.completion(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"] == events(answer.text)[0]["id"]
    assert answer.text.endswith("data: [DONE]\n\n")


def test_client_errors_are_the_clients_exceptions(echo: Served) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        echo.openai.completions.create(model="gpt-9", prompt="x")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        echo.openai.completions.create(model="fake", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
