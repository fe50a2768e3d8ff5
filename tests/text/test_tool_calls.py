"""What models have been seen to write, and what it means."""

# ruff: noqa: RUF001  (the vertical lines of DeepSeek's tokens are full-width)

import json
from typing import Any

import pytest
from markup import PING, SHELL, Said, data, read, tokenizer

from quickturn.text import reasoning, tool_calls
from quickturn.text.answer_format import choose_format, markup_of
from quickturn.text.parsing.alphabet import Alphabet
from quickturn.text.parsing.events import ToolCallStart
from quickturn.text.parsing.output import typed_json
from quickturn.text.parsing.parser import begins_thinking
from quickturn.text.tools import Tool, argument_types, call_is_valid


def marked(text: str) -> list[int]:
    return tokenizer().encode(text, add_special=False)


def said(case: str, text: str, finish: str = "stop", **options: Any) -> Said:
    whole, _ = read(case, [marked(text)], finish, **options)
    for size in (1, 3):
        ids = marked(text)
        chunks = [ids[at : at + size] for at in range(0, len(ids), size)] or [[]]
        assert read(case, chunks, finish, **options)[0] == whole
    return whole


def calls(case: str, text: str, **options: Any) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in said(case, text, **options).calls]


def test_one_delta_ends_a_call_and_starts_the_next() -> None:
    first = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}'
    second = '}\n</tool_call>\n<tool_call>\n{"name": "ping", "argum'
    third = 'ents": {"x": [1, 2]}}\n</tool_call>'
    whole, _ = read("hermes", [marked(first + second + third)])
    pieces, _ = read("hermes", [marked(first), marked(second), marked(third)])
    assert pieces == whole
    assert whole.calls == (("shell", '{"command": "ls"}'), ("ping", '{"x": [1, 2]}'))


@pytest.mark.parametrize("case", ["hermes", "mistral", "kimi_k2"])
def test_braces_in_strings_are_text(case: str) -> None:
    arguments = '{"command": "mkdir -p a/{b1,b2 \\"}}\\" \\\\"}'
    text = {
        "hermes": f'<tool_call>{{"name": "shell", "arguments": {arguments}}}</tool_call>',
        "mistral": f"[TOOL_CALLS]shell[ARGS]{arguments}",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.shell:3"
        f"<|tool_call_argument_begin|>{arguments}<|tool_call_end|><|tool_calls_section_end|>",
    }
    assert calls(case, text[case]) == [("shell", {"command": 'mkdir -p a/{b1,b2 "}}" \\'})]


def test_shell_text_between_tags_is_literal() -> None:
    text = (
        '<tool_call>\n<function=shell>\n<parameter=command>\nmkdir -p a/{b1,b2 && echo "x"\n\n'
        "</parameter>\n<parameter=timeout>\n30\n</parameter>\n</function>\n</tool_call>"
    )
    assert calls("qwen3_coder", text) == [
        ("shell", {"command": 'mkdir -p a/{b1,b2 && echo "x"\n', "timeout": 30})
    ]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("hermes", '<tool_call>{"name": "ping"}</tool_call><tool_call>{"name": "shell", "arguments": '
         '{"command": "ls"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "ping", "arguments": null}</tool_call><tool_call>{"arguments": '
         '{"command": "ls"}, "name": "shell"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "ping", "arguments": ""}</tool_call><tool_call>{"name": "shell", '
         '"arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>'),
        ("qwen3_coder", "<tool_call><function=ping></function></tool_call><tool_call><function=shell>"
         "<parameter=command>ls</parameter></function></tool_call>"),
        ("qwen3_coder", "<function=ping>\n</function>\n</tool_call>\n<function=shell>\n<parameter=command>\n"
         "ls\n</function>"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜><｜tool▁call▁end｜>"
         '<｜tool▁call▁begin｜>shell<｜tool▁sep｜>{"command":"ls"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
        ("glm45", "<tool_call>ping</tool_call><tool_call>shell<arg_key>command</arg_key><arg_value>ls"
         "</arg_value></tool_call>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="ping"></invoke><invoke name="shell"><parameter '
         'name="command">ls</parameter></invoke></minimax:tool_call>'),
        ("pythonic", "[ping(), shell(command='ls')]"),
        ("llama3_json", '<|python_tag|>{"name": "ping", "parameters": {}};{"name": "shell", "parameters": '
         '{"command": "ls"}}'),
        ("mistral", '[TOOL_CALLS][{"name": "ping"}, {"name": "shell", "arguments": {"command": "ls"}}]'),
        ("mistral", '[TOOL_CALLS]ping[ARGS]{}[TOOL_CALLS]shell{"command": "ls"}'),
        ("gpt_oss", "<|channel|>commentary to=functions.ping<|message|><|call|><|start|>assistant"
         ' to=functions.shell<|channel|>commentary json<|message|>{"command": "ls"}<|call|>'),
    ],
)  # fmt: skip
def test_no_arguments_then_some(case: str, text: str) -> None:
    assert calls(case, text) == [("ping", {}), ("shell", {"command": "ls"})]


THOUGHT = '<think>I could write <tool_call> here, as in <tool_call>{"name": x}</tool_call>. No.'


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_prose_about_calls_in_thinking_makes_none(finish: str) -> None:
    whole = said("hermes", THOUGHT + "</think>Done.", finish)
    assert (whole.text, whole.calls, whole.finish) == ("Done.", (), finish)
    assert whole.reasoning == THOUGHT.removeprefix("<think>")
    assert said("hermes", THOUGHT, finish).calls == ()


CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'


def test_a_real_call_at_the_end_of_thinking_is_one() -> None:
    whole = said("hermes", "<think>I list them.\n" + CALL)
    assert (whole.reasoning, whole.finish) == ("I list them.", "tool_calls")
    assert whole.calls == (("shell", '{"command": "ls"}'),)
    assert said("hermes", "I list them.\n" + CALL, thinking=True) == whole


def test_two_real_calls_at_the_end_of_thinking_are_two() -> None:
    """One behind the other; a complete one that is mere prose, with text behind it, isn't among them."""
    ping = '<tool_call>{"name": "ping"}</tool_call>'
    whole = said("hermes", f"<think>As in {CALL}: so\n{ping}\n{CALL}\n")
    assert whole.calls == (("ping", "{}"), ("shell", '{"command": "ls"}'))
    assert (whole.reasoning, whole.finish) == (f"As in {CALL}: so", "tool_calls")
    section = "<｜tool▁calls▁begin｜>" + "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
        for name, arguments in (("ping", "{}"), ("shell", '{"command": "ls"}'))
    )
    both = said("deepseek_v31", f"<think>hm {section}<｜tool▁calls▁end｜>")
    assert (both.reasoning.strip(), both.calls) == ("hm", whole.calls)
    bad = CALL.replace('"ls"', "7")
    assert said("hermes", f"<think>{bad}{CALL}").calls == (("shell", '{"command": "ls"}'),)
    assert said("hermes", f"<think>{CALL}{bad}").calls == ()


@pytest.mark.parametrize(
    "text",
    [
        CALL + " and so on",
        CALL.replace("shell", "unknown"),
        CALL.replace("command", "comand"),
        CALL.replace('"ls"', "7"),
        CALL[:-20],
    ],
)
def test_not_a_real_call(text: str) -> None:
    whole = said("hermes", "<think>" + text)
    assert (whole.calls, whole.text, whole.finish) == ((), "", "stop")
    assert whole.reasoning == text
    assert said("hermes", "<think>" + CALL, "length").calls == ()


def test_a_call_after_thinking_that_held_an_unclosed_one() -> None:
    whole = said("hermes", '<think>say <tool_call>{"name": "shell", "x": "</think>\n\n' + CALL)
    assert whole.calls == (("shell", '{"command": "ls"}'),)


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_stop_strings_fire_in_the_visible_text_only(chunk: int) -> None:
    ids = marked("<think>DEFGHIJ</think>") + data("ABCDEF") + data("G") + data("HI") + data("J tail")
    chunks = [ids[at : at + chunk] for at in range(0, len(ids), chunk)]
    whole, _ = read("hermes", chunks, stop=("DEFGHIJ",))
    assert whole == Said("DEFGHIJ", "ABC", (), "stop")
    held, _ = read("hermes", [data("ABC DEFGH")], stop=("DEFGHIJ",))
    assert held.text == "ABC DEFGH"
    called, _ = read("hermes", [data("DEF") + marked(CALL)], stop=("DEFG", "ls"))
    assert (called.text, called.finish) == ("DEF", "tool_calls")


def test_finish_reasons_agree_with_the_body() -> None:
    assert said("hermes", CALL).finish == "tool_calls"
    assert said("hermes", CALL, "length").finish == "length"
    assert said("hermes", "text").finish == "stop"
    cut = said("hermes", CALL[:53], "length")
    assert (cut.finish, cut.calls) == ("length", (("shell", '{"command"'),))


def test_only_one_call_where_only_one_is_wanted() -> None:
    assert len(said("hermes", "x" + CALL + CALL, single_call=True).calls) == 1


def test_without_tools_markup_is_text() -> None:
    whole = said("hermes", CALL, tools=())
    assert (whole.text, whole.calls) == (CALL, ())


@pytest.mark.parametrize(
    "text",
    ["<tool_call>no json</tool_call>", '<tool_call>{"name": 3}</tool_call>', "<tool_call>", "<tool_call>{}"],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert said("hermes", text).text == text


def test_spelled_markup_is_text_where_the_vocabulary_has_the_token() -> None:
    spelled, _ = read("hermes", [data(CALL)])
    assert (spelled.text, spelled.calls) == (CALL, ())
    plain, _ = read("hermes", [data(CALL)], with_tokens=False)
    assert plain.calls == (("shell", '{"command": "ls"}'),)


def test_kimi_ids_are_kept_and_mistral_ids_are_short() -> None:
    text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.a.b:7<|tool_call_argument_begin|>{}"
    _, events = read("kimi_k2", [marked(text)])
    assert events[0] == ToolCallStart(0, "functions.a.b:7", "a.b")
    _, events = read("mistral", [marked("[TOOL_CALLS]ping[ARGS]{}")])
    assert isinstance(events[0], ToolCallStart)
    assert len(events[0].id) == 9
    assert events[0].id.isalnum()


def test_interleaved_thinking_and_calls_keep_their_order() -> None:
    _, events = read("hermes", [marked(f"<think>a</think>{CALL}<think>b</think>{CALL}")])
    kinds = [type(event).__name__ for event in events]
    call = ["ToolCallStart", "ToolArgumentsDelta", "ToolCallEnd"]
    assert kinds == ["ReasoningDelta", *call, "ReasoningDelta", *call, "Finished"]


def test_a_cut_value_between_tags_is_not_closed() -> None:
    text = "<tool_call><function=shell><parameter=command>\nrm -rf /tmp/x"
    whole = said("qwen3_coder", text, "length")
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(whole.calls[0][1])


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("5", {"integer"}, "5"),
        ("5", {"string"}, '"5"'),
        ("5.0", {"integer"}, "5.0"),
        ("5.5", {"integer"}, '"5.5"'),
        ("True", {"boolean"}, "true"),
        ("null", {"string", "null"}, "null"),
        ("NaN", {"number"}, '"NaN"'),
        ('{"a": 1}', {"object"}, '{"a": 1}'),
        ('"quoted"', set(), '"\\"quoted\\""'),
        ("plain", set(), '"plain"'),
        ("7", set(), "7"),
    ],
)
def test_untyped_values(text: str, types: set[str], expected: str) -> None:
    assert typed_json(text, frozenset(types)) == expected


def test_references_that_go_round_are_read_once() -> None:
    again = [{"$ref": "#/$defs/loop"}] * 100
    schema = {"properties": {"a": {"anyOf": again}}, "$defs": {"loop": {"anyOf": [*again, {"type": "null"}]}}}
    assert argument_types(Tool("f", schema), "a") == {"null"}


def test_a_call_of_a_tool_whose_schema_is_odd_is_not_valid() -> None:
    assert not call_is_valid([Tool("f", {"required": [{}, []]})], "f", {"a": 1})
    assert call_is_valid([Tool("f", {"required": ["a"]})], "f", {"a": 1})


def test_argument_types() -> None:
    schema = {
        "$defs": {"mode": {"enum": ["r", "w", None]}},
        "properties": {
            "mode": {"$ref": "#/$defs/mode"},
            "either": {"anyOf": [{"type": "string"}, {"type": ["integer", "null"]}]},
            "loop": {"$ref": "#/properties/loop"},
            "free": {},
        },
    }
    tool = Tool("t", schema)
    kinds = {key: set(argument_types(tool, key)) for key in ("mode", "either", "loop", "free", "other")}
    assert kinds == {
        "mode": {"string", "null"},
        "either": {"string", "integer", "null"},
        "loop": set(),
        "free": set(),
        "other": set(),
    }


@pytest.mark.parametrize(
    ("signs", "name"),
    [
        ("<tool_call>", "hermes"),
        ("<tool_call> <function= <parameter=", "qwen3_coder"),
        ("<tool_call> <arg_key>", "glm45"),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<｜DSML｜invoke", "deepseek_v32"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("[TOOL_CALLS]", "mistral"),
        ('ipython {"name": x, "parameters": y}', "llama3_json"),
        ("[func_name1(a=b)]", "pythonic"),
    ],
)
def test_the_template_tells_the_format(signs: str, name: str) -> None:
    detected = tool_calls.detect(signs)
    assert detected is not None
    assert detected.name == name
    assert choose_format(signs, "none").tools is None


def test_names_and_templates_of_formats() -> None:
    assert choose_format("<|channel|>analysis<|message|>").whole is not None
    assert choose_format("").tools is choose_format("").reasoning is None
    assert reasoning.detect("[/THINK]") is reasoning.FORMATS["mistral"]
    with pytest.raises(ValueError, match="choose one of auto, none, gpt_oss, deepseek_v3"):
        choose_format("", "hermess")


@pytest.mark.parametrize(
    ("prompt", "thinking"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("old <think>x</think> new", False),
    ],
)
@pytest.mark.parametrize("with_tokens", [True, False])
def test_the_prompt_says_whether_thinking_was_opened(prompt: str, thinking: bool, with_tokens: bool) -> None:
    chosen = reasoning.FORMATS["qwen3"]
    backend = tokenizer(with_tokens)
    alphabet = Alphabet.of(backend, frozenset((chosen.open, chosen.close)))
    ids = backend.encode(prompt, add_special=False)
    assert begins_thinking(ids, backend, chosen, alphabet) == thinking
    if with_tokens:
        quoted = data("user said <think>") + backend.encode("<|im_start|>assistant\n")
        assert not begins_thinking(quoted, backend, chosen, alphabet)
    assert begins_thinking(ids, backend, reasoning.FORMATS["deepseek_r1"], alphabet)


def test_a_model_without_markup_has_none() -> None:
    chosen = markup_of(tokenizer())
    assert (chosen.format.tools, chosen.format.reasoning) == (None, None)
    assert {SHELL.name, PING.name} == {"shell", "ping"}
