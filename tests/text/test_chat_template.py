"""Templates render as in `transformers`, and can't reach out of their sandbox."""

from datetime import datetime
from typing import Any

import pytest

from quickturn.text.chat_template import ChatTemplate, TemplateFailed
from quickturn.text.conversation import BadMessage, normalise_messages
from quickturn.text.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": "Sei höflich & <b>kurz</b>."},
    {"role": "user", "content": "  Was ist 你好?  "},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"type": "function", "function": {"name": "look", "arguments": {"ü": [1, True, None]}}}
        ],
    },
    {"role": "tool", "content": "Grüße"},
    {"role": "user", "content": "Danke"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"b": 1, "a": "<é>"}}}]

TEMPLATES = {
    "json": "{{ messages | tojson }}|{{ tools | tojson(indent=2) }}|{{ tools | tojson(sort_keys=true) }}",
    "blocks": (
        "{% for m in messages %}\n  {%- if m.role == 'user' %}\n    U: {{ m.content | trim }}\n{% endif %}\n"
        "{% endfor %}\n"
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{{ m.role }},{% endfor %}"
    ),
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "namespace": (
        "{% set ns = namespace(last=-1, self='x') %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.last }}{{ ns.self }}"
    ),
    "tool calls": (
        "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments|tojson }}{% endfor %}"
        "{% if m.reasoning_content is defined %}[{{ m.reasoning_content }}]{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}{{ flag | default('none') }}"
    ),
    "dict": "{{ dict(a=1) | tojson }}{{ dict.fromkeys(['x'], 2) | tojson }}{{ range(3) | list }}",
    "string methods": (
        "{{ messages[1].content.split(' ')[-1] }}{{ 'a-b'.replace('-', '+') }}{{ messages[::-1][0].content }}"
    ),
    "items": (
        "{% for key, value in messages[2].tool_calls[0].function.items() %}{{ key }}={{ value }};{% endfor %}"
    ),
    "documents": "{% if documents %}docs{% else %}none{% endif %}",
    "date": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_renders_as_transformers(name: str, tools: list[dict[str, Any]] | None) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    extra = {"flag": "on"}
    expected, _ = utils.render_jinja_template(
        [CHAT], tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=True, **special, **extra
    )
    messages = normalise_messages(CHAT, TEMPLATES[name])
    ours = ChatTemplate(TEMPLATES[name], special).render(messages, tools, extra=extra)
    assert ours == expected[0]


def test_own_template_of_the_embedded_model(smollm: Tokenizer) -> None:
    assert smollm.chat_template is not None
    text = ChatTemplate(smollm.chat_template, smollm.special).render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(10 ** 9) | list }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].nothing.more }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TemplateFailed):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_a_broken_template_is_reported() -> None:
    with pytest.raises(TemplateFailed, match="can't be compiled"):
        ChatTemplate("{% if %}", {})


def test_the_year_is_this_one() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([]) == str(datetime.now().year)


@pytest.mark.parametrize("content", [None, [], ""])
def test_empty_contents_are_one(content: Any) -> None:
    message = {"role": "assistant", "content": content, "tool_calls": []}
    assert normalise_messages([message], "")[0]["content"] == ""
    assert normalise_messages([{"role": "assistant"}], "")[0]["content"] == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        (" ", {}),
        (None, {}),
        ('{"value": ', '{"value": '),
        ('"\\"Beijing\\""', '"\\"Beijing\\""'),
        ('["Beijing"]', '["Beijing"]'),
        ('{"b": "é", "a": 1}', {"b": "é", "a": 1}),
        ({"x": 1}, {"x": 1}),
    ],
)
def test_arguments_in_history(arguments: Any, expected: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = normalise_messages([{"role": "assistant", "tool_calls": [call]}], "")[0]
    assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_parts_roles_and_reasoning() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": "x", "reasoning": "why", "name": None},
    ]
    first, second = normalise_messages(messages, "no such role")
    assert first == {"role": "system", "content": "one\ntwo"}
    assert (second["reasoning_content"], second["thinking"], "name" in second) == ("why", "why", False)
    assert normalise_messages(messages, "'developer'")[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": {}}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
    ],
)
def test_bad_messages_name_their_place(message: dict[str, Any], param: str) -> None:
    with pytest.raises(BadMessage) as caught:
        normalise_messages([message], "")
    assert caught.value.param == param
