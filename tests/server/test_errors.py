"""Whatever is wrong with a request is said in one sentence, in the API's shape, naming the field."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from tests.server.fake import FakeEngine
from tests.server.serving import Served, events, served

from ebbtide.server.config import ServerConfig

JSON = {"content-type": "application/json"}


def problem(response: Any, status: int = 400) -> dict[str, Any]:
    """The error of a response, after checking its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert 10 < len(error["message"]) <= 500
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"model": "fake", "prompt": "x", "temperature": NaN}',
        b'{"model": "fake", "prompt": "x", "temperature": Infinity}',
        b'{"model": "fake", "prompt": "x", "logit_bias": {"1": -Infinity}}',
        b'{"model": "fake", "prompt": "x", "n": 1, "n": 2}',
        b'{"model": "fake", "prompt": "\\ud800"}',
        b'{"model": "fake", "prompt": "\xff"}',
        b'{"model": "fake", "prompt": ' + b"[" * 100_000,
        b'{"model": "fake", "prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
        b'["model"]',
        b"null",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bodies_that_are_not_strict_json(echo: Served, path: str, body: bytes) -> None:
    error = problem(echo.http.post(path, content=body, headers=JSON))
    assert error["code"] == "invalid_json"


def test_an_empty_body_is_called_so(echo: Served) -> None:
    for body in (b"", b" \n"):
        error = problem(echo.http.post("/v1/completions", content=body, headers=JSON))
        assert error["message"] == "the body is empty; it must be a JSON object"


def test_whole_characters_beyond_the_first_plane_are_no_half_pairs(echo: Served) -> None:
    body = json.dumps({"model": "fake", "prompt": "😀"})
    assert "\\ud83d" in body
    answer = echo.http.post("/v1/completions", content=body, headers=JSON)
    assert answer.json()["choices"][0]["text"] == "😀"


WRONG_IN_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"model": 3}, "model"),
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1 << 40}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": []}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 1 << 70}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": "2"}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop": [3]}, "stop"),
    ({"stop": ["a"] * 100}, "stop"),
    ({"stop_token_ids": 2}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(1000))}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {str(k): 1 for k in range(2000)}}, "logit_bias"),
    ({"repetition": 3}, "repetition"),
    ({"repetition": {"min_count": 3}}, "repetition.max_pattern_size"),
    ({"repetition": {"min_count": 3, "max_pattern": 3}}, "repetition.max_pattern"),
    ({"repetition": {"min_count": 1, "max_pattern_size": 3}}, "repetition.min_count"),
    ({"repetition": {"min_count": "3", "max_pattern_size": 3}}, "repetition.min_count"),
    ({"priority": 1.5}, "priority"),
    ({"priority": 1 << 40}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "x" * 1000}, "cache_salt"),
    ({"on_lost_kv": "retry"}, "on_lost_kv"),
    ({"on_lost_kv": True}, "on_lost_kv"),
    ({"user": 5}, "user"),
    ({"metadata": "x"}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"store": True}, "store"),
    ({"best_of": 2}, "best_of"),
    ({"service_tier": "auto"}, "service_tier"),
    ({"guided_json": {}}, "guided_json"),
]


@pytest.mark.parametrize(("wrong", "param"), WRONG_IN_BOTH)
@pytest.mark.parametrize("path", ["completion", "chat"])
def test_wrong_values_name_their_field(
    echo: Served, path: str, wrong: dict[str, Any], param: str
) -> None:
    before = len(echo.engine.requests)
    error = problem(getattr(echo, path)(**wrong))
    assert error["param"] == param
    assert param.rpartition(".")[2] in error["message"]
    assert len(echo.engine.requests) == before


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": [97, 1 << 80]}, "prompt"),
        ({"prompt": ["a"] * 64, "n": 64}, "n"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_wrong_completions(echo: Served, wrong: dict[str, Any], param: str) -> None:
    assert problem(echo.completion(**{"prompt": "x", **wrong}))["param"] == param


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"} | fields]}


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        (message(role="king"), "messages[0].role"),
        (message(role=None), "messages[0].role"),
        (message(role=["user"]), "messages[0].role"),
        (message(content=None), "messages[0].content"),
        (message(content=5), "messages[0].content"),
        (message(content=[IMAGE]), "messages[0].content[0].type"),
        (message(content=["x"]), "messages[0].content[0]"),
        (message(content=[{"type": "text"}]), "messages[0].content[0].text"),
        (message(content=[{"type": "text", "text": "", "x": 1}]), "messages[0].content[0].x"),
        (message(name="Bob"), "messages[0].name"),
        (message(tool_calls=[]), "messages[0].tool_calls"),
        (message(tool_call_id="1"), "messages[0].tool_call_id"),
        (message(contents="x"), "messages[0].contents"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": False}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "text"}, "response_format"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["text"]}, "modalities"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_wrong_chats(echo: Served, wrong: dict[str, Any], param: str) -> None:
    error = problem(echo.chat(**wrong))
    assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "wrong", "code", "words"),
    [
        ("completion", {"temperature": "0.5"}, "invalid_type", 'a number, got the string "0.5"'),
        ("chat", {"max_tokens": 5.0}, "invalid_type", "an integer, got 5.0"),
        ("chat", {"max_completion_tokens": "5"}, "invalid_type", "max_completion_tokens must be"),
        ("completion", {"n": True}, "invalid_type", "got true"),
        ("completion", {"logprobs": True}, "invalid_type", "logprobs must be an integer"),
        ("chat", {"logprobs": True, "top_logprobs": []}, "invalid_type", "top_logprobs must be"),
        ("chat", {"logit_bias": {"1": "x"}}, "invalid_type", "numbers"),
        ("chat", {"repetition": {"min_count": 2.5, "max_pattern_size": 1}}, "invalid_type", "2.5"),
        ("chat", {"repetition": {"min_count": 1, "max_pattern_size": 1}}, None, "from 2"),
        ("chat", {"messages": [{"content": "x"}]}, "missing_parameter", "role is required"),
        ("chat", {"messages": [{"role": 5, "content": "x"}]}, "invalid_type", "got 5"),
        ("chat", {"messages": []}, "empty_prompt", "messages"),
        ("completion", {"prompt": []}, "empty_prompt", "must not be empty"),
        ("completion", {"prompt": ""}, "empty_prompt", "must not be empty"),
        ("completion", {"prompt": ["a"] * 65}, None, "64"),
        ("completion", {"temperature": -1}, None, "from 0 to 100"),
    ],
)
def test_codes_are_those_of_the_document(
    echo: Served, path: str, wrong: dict[str, Any], code: str | None, words: str
) -> None:
    error = problem(getattr(echo, path)(**wrong))
    assert error["code"] == code
    assert words in error["message"]


@pytest.mark.parametrize("value", [1, True, {"a": [1]}, None])
def test_unknown_fields_are_refused_with_the_nearest_name(echo: Served, value: Any) -> None:
    error = problem(echo.chat(temprature=value))
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
    assert "did you mean temperature?" in error["message"]
    assert "did you mean" not in problem(echo.chat(zzzzzz=value))["message"]


def test_long_values_are_cut_in_the_message(echo: Served) -> None:
    assert problem(echo.chat(temperature="x" * 100_000))["param"] == "temperature"
    assert problem(echo.chat(**{"x" * 100_000: 1}))["code"] == "unknown_parameter"
    assert problem(echo.post("/v1/completions", prompt="a", model="m" * 10_000))["param"] == "model"


def test_numbers_beyond_floats(echo: Served) -> None:
    body = '{"model": "fake", "prompt": "x", "temperature": %s}'
    for number in ("1" + "0" * 400, "1e999"):
        problem(echo.http.post("/v1/completions", content=body % number, headers=JSON))


def test_unknown_model(echo: Served) -> None:
    for path in ("completion", "chat"):
        error = problem(getattr(echo, path)(model="other"), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert problem(echo.http.get("/v1/models/a/b"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["completion", "chat"])
def test_a_prompt_that_is_too_long(echo: Served, path: str) -> None:
    for size in (4096, 100_000):
        error = problem(getattr(echo, path)("x" * size))
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("prompt" if path == "completion" else "messages")
        assert "4096" in error["message"]


def test_paths_and_methods(echo: Served) -> None:
    assert problem(echo.http.get("/v1/nothing"), 404)["code"] == "unknown_path"
    assert problem(echo.http.post("/v1/completions/", json={}), 404)["code"] == "unknown_path"
    wrong = echo.http.get("/v1/completions")
    assert problem(wrong, 405)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"
    assert problem(echo.http.delete("/v1/models"), 405)["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/completions", "did you mean /v1/completions?"),
        ("/v1/chat/completions/", "did you mean /v1/chat/completions?"),
        ("/", "the API begins at /v1/models"),
        ("/v1/kv/rese", "the API begins at /v1/models"),
        ("/v1/%00" + "x" * 5000, "the API begins at /v1/models"),
    ],
)
def test_an_unknown_path_gets_a_hint(echo: Served, path: str, hint: str) -> None:
    assert hint in problem(echo.http.post(path, json={}), 404)["message"]


def test_content_type(echo: Served) -> None:
    body = b'{"model": "fake", "prompt": "x"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = echo.http.post("/v1/completions", content=body, headers={"content-type": kind})
        assert problem(answer, 415)["code"] == "unsupported_media_type"
    assert problem(echo.http.post("/v1/completions", content=body), 415)
    kind = "application/json; charset=utf-8"
    answer = echo.http.post("/v1/completions", content=body, headers={"content-type": kind})
    assert answer.is_success


def test_a_body_that_is_too_large_or_too_slow() -> None:
    with served(FakeEngine(), ServerConfig(body_bytes_max=1000, body_timeout_s=0.2)) as server:
        assert problem(server.completion("x" * 2000), 413)["code"] == "body_too_large"

        def parts() -> Any:
            yield b'{"prompt": "' + b"x" * 600
            yield b"x" * 600

        chunked = server.http.post("/v1/completions", content=parts(), headers=JSON)
        assert problem(chunked, 413)["code"] == "body_too_large"

        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.settimeout(5)
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n{"
            )
            assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert server.completion("x").is_success


def test_a_full_queue_says_when_to_come_back() -> None:
    engine = FakeEngine()
    engine.waiting_max = 3
    with served(engine) as server:
        for path in (server.completion, server.chat):
            assert path().is_success
        answer = server.completion(["a"] * 4, stream=True)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert (engine.unfinished, engine.aborted) == (0, 3)


def test_a_stopped_engine_is_the_servers_fault() -> None:
    engine = FakeEngine()
    engine.stopped = True
    with served(engine) as server:
        for answer in (server.chat(), server.completion(stream=True)):
            error = problem(answer, 503)
            assert (error["code"], error["type"]) == ("engine_error", "server_error")
            assert "a bug" in error["message"]


def test_an_engine_error_is_the_answer() -> None:
    engine = FakeEngine()
    engine.failing = frozenset({1})
    with served(engine) as server:
        error = problem(server.chat(n=3), 500)
        assert (error["message"], error["code"]) == ("the device burnt", "engine_error")
        *chunks, last = events(server.chat(n=3, stream=True).text)
        assert last["error"]["message"] == "the device burnt"
        assert all("choices" in chunk for chunk in chunks)
        assert engine.unfinished == 0


def test_a_crash_is_told_without_its_details() -> None:
    engine = FakeEngine()
    engine.crash = ZeroDivisionError("secret")
    with served(engine) as server:
        assert "secret" not in problem(server.chat(), 500)["message"]
        assert "secret" not in events(server.chat(stream=True).text)[-1]["error"]["message"]
        engine.crash = None
        assert server.chat().is_success


def test_chat_needs_a_template() -> None:
    engine = FakeEngine()
    engine.tokenizer.has_chat_template = False
    with served(engine) as server:
        assert "template" in problem(server.chat())["message"]
        assert server.completion().is_success
