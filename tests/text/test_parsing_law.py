"""The law of parsing: however the tokens of an answer are cut, the joined stream is that of all at once."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markup import ONLY_CALLS, WRITERS, Call, Said, data, markup, read, tokenizer, write

CASES = [*WRITERS, "gpt_oss"]

NASTY = (
    "mkdir -p a/{b1,b2",
    'echo "}{" \\ \n\t',
    "Grüße 世界 🙂",
    "<tool_call>",
    "</think>",
    "line\n\nline\n",
    "a < b && c > d",
    "[TOOL_CALLS]",
    "'single' \"double\"",
    "```json\n{}\n```",
    "",
)
TEXT = st.one_of(st.sampled_from(NASTY), st.text("ab{}[]\"'\\<>/\n =:,é🙂", max_size=12))
PROSE = st.text("abc {}<>.,é🙂\n", max_size=20).map(str.strip).filter(lambda text: text[:1] not in ("{", "["))


def arguments() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"command": TEXT},
        optional={
            "timeout": st.integers(-5, 10**6),
            "env": st.dictionaries(st.sampled_from("ab"), TEXT | st.integers() | st.none(), max_size=2),
            "quiet": st.booleans(),
        },
    )


CALLS = st.lists(
    st.builds(Call, st.just("shell"), arguments()) | st.just(Call("ping", {})), min_size=0, max_size=3
)


@st.composite
def cuts(draw: st.DrawFn, tokens: list[int]) -> list[list[int]]:
    places = draw(st.lists(st.integers(0, len(tokens)), max_size=8))
    return [tokens[start:end] for start, end in pairwise([0, *sorted(places), len(tokens)])]


def one_by_one(tokens: list[int]) -> list[list[int]]:
    return [[token] for token in tokens] or [[]]


def expected(case: str, reasoning: str, text: str, calls: list[Call]) -> Said:
    return Said(
        reasoning=reasoning,
        text=text,
        calls=tuple((call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in calls),
        finish="tool_calls" if calls else "stop",
    )


def same(got: Said, wanted: Said) -> bool:
    """Equal up to the white space of JSON."""

    def shape(said: Said) -> tuple[Any, ...]:
        calls = [(name, json.loads(arguments)) for name, arguments in said.calls]
        return said.reasoning, said.text, calls, said.finish

    return shape(got) == shape(wanted)


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("case", CASES)
@given(st.data())
@settings(max_examples=40)
def test_what_a_model_says_is_understood_in_any_pieces(
    case: str, with_tokens: bool, data: st.DataObject
) -> None:
    reasoning = data.draw(PROSE)
    calls = data.draw(CALLS)
    text = "" if case in ONLY_CALLS and calls else data.draw(PROSE)
    if not with_tokens:
        calls = [call for call in calls if not _looks_like_markup(call)]
    tokens = write(case, (reasoning, text, calls), with_tokens)
    wanted = expected(case, reasoning, text, calls)
    whole, _ = read(case, [tokens], with_tokens=with_tokens)
    assert same(whole, wanted)
    streamed, _ = read(case, one_by_one(tokens), with_tokens=with_tokens)
    assert streamed == whole
    pieces, _ = read(case, data.draw(cuts(tokens)), with_tokens=with_tokens)
    assert pieces == whole


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("case", CASES)
@given(st.data())
@settings(max_examples=40)
def test_nonsense_is_the_same_in_any_pieces(case: str, with_tokens: bool, data: st.DataObject) -> None:
    """Markup in any order, cut anywhere, ended in any way."""
    name = WRITERS[case][0] if case in WRITERS else case
    marks = sorted(markup(name).format.control_tokens)
    pieces = data.draw(st.lists(st.one_of(st.sampled_from([*marks, *_SHREDS]), TEXT), max_size=14))
    tokens = tokenizer(with_tokens).encode("".join(pieces), add_special=False)
    finish = data.draw(st.sampled_from(["stop", "length"]))
    options: dict[str, Any] = {
        "thinking": data.draw(st.booleans()),
        "stop": data.draw(st.sampled_from([(), ("ab",), ("{", "\n\n")])),
        "single_call": data.draw(st.booleans()),
        "with_tokens": with_tokens,
    }
    whole, _ = read(case, [tokens], finish, **options)
    streamed, _ = read(case, one_by_one(tokens), finish, **options)
    assert streamed == whole
    cut, _ = read(case, data.draw(cuts(tokens)), finish, **options)
    assert cut == whole


_SHREDS = (
    '{"name": "shell", "arguments": {"command": "ls"}}',
    '{"name": "shell", "arguments": "{}"}',
    '{"name": "ping"}',
    '{"na',
    "<function=shell>",
    "<parameter=command>\nls\n</parameter>",
    "</function>",
    '<invoke name="shell">',
    '<parameter name="command">ls</parameter>',
    "</invoke>",
    "shell",
    "functions.shell:0",
    "[ping(), shell(command='x')",
    "analysis",
    "commentary to=functions.shell ",
    "final",
    "\n",
    " ",
    "}",
)


@pytest.mark.parametrize("case", CASES)
def test_every_split_point(case: str) -> None:
    calls = [Call("ping", {}), Call("shell", {"command": "mkdir -p a/{b1,b2", "timeout": 5})]
    text = "" if case in ONLY_CALLS else "On it."
    tokens = write(case, ("hm {", text, calls))
    whole, _ = read(case, [tokens])
    assert same(whole, expected(case, "hm {", text, calls))
    for at in range(len(tokens) + 1):
        assert read(case, [tokens[:at], tokens[at:]])[0] == whole, f"split at {at}"


def _looks_like_markup(call: Call) -> bool:
    """Where the vocabulary has no control tokens, an argument that holds markup can't be told from it."""
    return any(sign in json.dumps(call.arguments) for sign in ("</", "<tool", "[TOOL", "parameter"))


def test_data_is_data() -> None:
    assert data("<think>") == list(b"<think>")
