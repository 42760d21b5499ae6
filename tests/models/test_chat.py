"""Chat templates, against transformers' rendering of the same template and messages."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
import tokenizers
import transformers

from ebbtide.errors import InputError
from ebbtide.models.chat import ChatTemplate

HELLO = [{"role": "user", "content": "hello <b>'&' é"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = [
    {"role": "user", "content": "look"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]},
]
TEMPLATES = {
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ missing_token }}",
    "json without html escapes": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}",
    "white space control": "{% for m in messages %}\n  {% if true %}\n  {{- m.role }}\n  {% endif %}\n"
    "{% endfor %}\n",
    "generation block": "{% for m in messages %}{% generation %}{{ m['role'] }}\n{% endgeneration %}"
    "{% endfor %}",
    "loop controls": "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "absent where none": "{% for m in messages %}{{ 'content' in m }} {% endfor %}",
    "tools": "{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}{% else %}none{% endif %}",
    "namespace": "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}"
    "{{ n.x }}{% if add_generation_prompt %}go{% endif %}",
    "string methods": "{{ messages[0]['content'].strip().split()[0] | upper }}",
}


@pytest.fixture(scope="module")
def other() -> transformers.PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "</s>": 1}, []))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )


def rendered(template: str, messages: list[dict[str, Any]], **changes: Any) -> str:
    known = {"bos_token": "<s>", "eos_token": "</s>"}
    arguments = {"tools": None, "add_generation_prompt": True, "variables": {}, **changes}
    return ChatTemplate({"default": template}, known).render(messages, **arguments)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("messages", [HELLO, CALL])
def test_templates_render_as_transformers_renders_them(
    name: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    other: transformers.PreTrainedTokenizerFast,
) -> None:
    for add_generation_prompt in (True, False):
        expected = other.apply_chat_template(
            messages,
            tools=tools,
            chat_template=TEMPLATES[name],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        found = rendered(
            TEMPLATES[name], messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
        assert found == expected


def test_variables_reach_the_template_and_cannot_replace_the_messages() -> None:
    template = "{{ enable_thinking }}{{ messages[0].content }}"
    variables = {"enable_thinking": False, "messages": []}
    assert rendered(template, [{"content": "x"}], variables=variables) == "Falsex"


def test_the_date_is_todays() -> None:
    found = rendered("{{ strftime_now('%Y') }}", HELLO)
    assert abs(int(found) - datetime.now().year) <= 1


def test_a_template_for_tools_is_used_where_there_are_tools() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert chat.render(HELLO, [TOOL], True, {}) == "tools"
    assert chat.render(HELLO, None, True, {}) == "plain"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "template says: roles must alternate"),
        ("{% if %}", "the chat template says: "),
        ("{{ messages[0].content + 1 }}", "cannot be applied to these messages"),
        ("{{ messages[9].content }}", "has no element 9|is undefined"),
        ("{{ 1 / 0 }}", "cannot be applied to these messages: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not callable|unsafe|immutable"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_a_template_refuses_is_said_in_its_words(template: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        rendered(template, HELLO)
    assert caught.value.field == "messages"


def test_without_a_template_there_is_no_chat() -> None:
    chat = ChatTemplate({}, {})
    assert not chat.available
    with pytest.raises(InputError, match="no chat template; send it a plain prompt"):
        chat.render(HELLO, None, True, {})


@pytest.mark.parametrize("message", ["text", {"role": object()}, {"content": [{"x": {1, 2}}]}])
def test_only_json_reaches_a_template(message: Any) -> None:
    with pytest.raises(InputError, match="a message "):
        rendered("{{ messages }}", [message])
