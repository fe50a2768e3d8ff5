"""Answers as models of each family write them, as tokens of a vocabulary in which every byte is a token and
control tokens are tokens of their own.
"""

# ruff: noqa: RUF001  (the vertical lines of DeepSeek's tokens are full-width)

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quickturn.sampling_params import SamplingParams
from quickturn.text.answer_format import AnswerMarkup, choose_format
from quickturn.text.answer_reader import AnswerEvent, AnswerReader, Finished
from quickturn.text.byte_alphabet import CHAR_OF_BYTE
from quickturn.text.harmony import TOKENS as HARMONY_TOKENS
from quickturn.text.parsing.alphabet import Alphabet
from quickturn.text.parsing.events import (
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from quickturn.text.parsing.parser import AnswerParser
from quickturn.text.reasoning import FORMATS as REASONING
from quickturn.text.tokenizer import Tokenizer
from quickturn.text.tool_calls import FORMATS as TOOLS
from quickturn.text.tools import Tool

END = "<|im_end|>"


@cache
def tokenizer(with_tokens: bool = True) -> Tokenizer:
    """`with_tokens`: every family's control tokens are in the vocabulary; else its markup is mere text."""
    backend = Backend(models.BPE(vocab={CHAR_OF_BYTE[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True)])
    if with_tokens:
        names = {token for format in TOOLS.values() for token in format.tokens} | HARMONY_TOKENS
        names |= {marker for format in REASONING.values() for marker in (format.open, format.close)}
        special = sorted(name for name in names if "|" in name)
        backend.add_special_tokens([AddedToken(name, special=True) for name in special])
        backend.add_tokens([AddedToken(name) for name in sorted(names - set(special))])
    return Tokenizer(backend, {"eos_token": END}, (256,))


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Said:
    """What an answer says, once its markup is understood."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...]
    finish: str


STRING, ANY = {"type": "string"}, {"type": "object"}
SHELL = Tool(
    "shell",
    {
        "type": "object",
        "properties": {
            "command": STRING,
            "timeout": {"type": "integer"},
            "env": {"type": "object"},
            "quiet": {"type": "boolean"},
        },
        "required": ["command"],
    },
)
PING = Tool("ping", {"type": "object", "properties": {}})
TOOLS_GIVEN = (SHELL, PING)


def data(text: str) -> list[int]:
    """Text as ordinary tokens, whatever it looks like."""
    return list(text.encode())


Writer = Callable[[Callable[[str], list[int]], Sequence[Call]], list[int]]


def _hermes(mark: Callable[[str], list[int]], calls: Sequence[Call]) -> list[int]:
    ids: list[int] = []
    for call in calls:
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        ids += data("\n" if ids else "")
        ids += mark("<tool_call>") + data(f"\n{body}\n") + mark("</tool_call>")
    return ids


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen3_coder(mark: Callable[[str], list[int]], calls: Sequence[Call]) -> list[int]:
    ids: list[int] = []
    for call in calls:
        ids += data("\n" if ids else "") + mark("<tool_call>") + data(f"\n<function={call.name}>\n")
        for key, value in call.arguments.items():
            ids += data(f"<parameter={key}>\n{_raw(value)}\n</parameter>\n")
        ids += data("</function>\n") + mark("</tool_call>")
    return ids


def _deepseek(fenced: bool) -> Writer:
    def write(mark: Callable[[str], list[int]], calls: Sequence[Call]) -> list[int]:
        ids = mark("<｜tool▁calls▁begin｜>")
        for call in calls:
            body = json.dumps(call.arguments, ensure_ascii=False)
            ids += mark("<｜tool▁call▁begin｜>")
            if fenced:
                ids += data("function") + mark("<｜tool▁sep｜>") + data(f"{call.name}\n```json\n{body}\n```")
            else:
                ids += data(call.name) + mark("<｜tool▁sep｜>") + data(body)
            last = call is calls[-1]
            ids += mark("<｜tool▁call▁end｜>") + data("\n" if fenced and not last else "")
        return ids + mark("<｜tool▁calls▁end｜>")

    return write


def _kimi(mark: Callable[[str], list[int]], calls: Sequence[Call]) -> list[int]:
    ids = mark("<|tool_calls_section_begin|>")
    for number, call in enumerate(calls):
        ids += mark("<|tool_call_begin|>") + data(f"functions.{call.name}:{number}")
        ids += mark("<|tool_call_argument_begin|>") + data(json.dumps(call.arguments, ensure_ascii=False))
        ids += mark("<|tool_call_end|>")
    return ids + mark("<|tool_calls_section_end|>")


def _glm(mark: Callable[[str], list[int]], calls: Sequence[Call]) -> list[int]:
    ids: list[int] = []
    for call in calls:
        ids += data("\n" if ids else "") + mark("<tool_call>") + data(f"{call.name}\n")
        for key, value in call.arguments.items():
            ids += mark("<arg_key>") + data(key) + mark("</arg_key>") + data("\n")
            ids += mark("<arg_value>") + data(_raw(value)) + mark("</arg_value>") + data("\n")
        ids += mark("</tool_call>")
    return ids


def _invoke(section: str, prefix: str, typed: bool) -> Writer:
    def write(mark: Callable[[str], list[int]], calls: Sequence[Call]) -> list[int]:
        ids = mark(f"<{section}>") + data("\n")
        for call in calls:
            ids += mark(f'<{prefix}invoke name="{call.name}">') + data("\n")
            for key, value in call.arguments.items():
                kind = f' string="{"true" if isinstance(value, str) else "false"}"' if typed else ""
                ids += mark(f'<{prefix}parameter name="{key}"{kind}>') + data(_raw(value))
                ids += mark(f"</{prefix}parameter>") + data("\n")
            ids += mark(f"</{prefix}invoke>") + data("\n")
        return ids + mark(f"</{section}>")

    return write


def _llama3(mark: Callable[[str], list[int]], calls: Sequence[Call]) -> list[int]:
    bodies = [{"name": call.name, "parameters": call.arguments} for call in calls]
    return data("; ".join(json.dumps(body, ensure_ascii=False) for body in bodies))


def _pythonic(mark: Callable[[str], list[int]], calls: Sequence[Call]) -> list[int]:
    bodies = [
        f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
        for call in calls
    ]
    return data(f"[{', '.join(bodies)}]")


def _mistral(mark: Callable[[str], list[int]], calls: Sequence[Call]) -> list[int]:
    ids: list[int] = []
    for call in calls:
        ids += mark("[TOOL_CALLS]") + data(call.name) + mark("[ARGS]")
        ids += data(json.dumps(call.arguments, ensure_ascii=False))
    return ids


def _mistral_list(mark: Callable[[str], list[int]], calls: Sequence[Call]) -> list[int]:
    bodies = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return mark("[TOOL_CALLS]") + data(json.dumps(bodies, ensure_ascii=False))


WRITERS: dict[str, tuple[str, Writer]] = {
    "hermes": ("hermes", _hermes),
    "qwen3_coder": ("qwen3_coder", _qwen3_coder),
    "deepseek_v3": ("deepseek_v3", _deepseek(True)),
    "deepseek_v31": ("deepseek_v31", _deepseek(False)),
    "deepseek_v32": ("deepseek_v32", _invoke("｜DSML｜function_calls", "｜DSML｜", True)),
    "kimi_k2": ("kimi_k2", _kimi),
    "glm45": ("glm45", _glm),
    "minimax_m2": ("minimax_m2", _invoke("minimax:tool_call", "", False)),
    "llama3_json": ("llama3_json", _llama3),
    "pythonic": ("pythonic", _pythonic),
    "mistral": ("mistral", _mistral),
    "mistral list": ("mistral", _mistral_list),
}
"""By the name of the case: the parser, and what writes a section of calls."""

ONLY_CALLS = {"llama3_json", "pythonic"}
"""Formats in which text and calls exclude each other."""


def write(case: str, said: "tuple[str, str, Sequence[Call]]", with_tokens: bool = True) -> list[int]:
    """The tokens of an answer of reasoning, text and calls."""
    backend = tokenizer(with_tokens)

    def mark(text: str) -> list[int]:
        return backend.encode(text, add_special=False)

    reasoning, text, calls = said
    if case == "gpt_oss":
        return _harmony(mark, reasoning, text, calls)
    ids: list[int] = []
    if reasoning:
        ids += mark("<think>") + data(f"\n{reasoning}\n") + mark("</think>") + data("\n\n")
    ids += data(text)
    if calls:
        ids += data("\n" if text else "") + WRITERS[case][1](mark, calls)
    return ids


def _harmony(mark: Callable[[str], list[int]], reasoning: str, text: str, calls: Sequence[Call]) -> list[int]:
    messages = []
    if reasoning:
        messages.append(mark("<|channel|>analysis<|message|>") + data(reasoning) + mark("<|end|>"))
    if text:
        messages.append(mark("<|channel|>final<|message|>") + data(text) + mark("<|end|>"))
    for call in calls:
        head = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
        body = json.dumps(call.arguments, ensure_ascii=False)
        messages.append(mark(head) + data(body) + mark("<|call|>"))
    ids: list[int] = []
    for number, message in enumerate(messages):
        ids += (mark("<|start|>assistant") if number else []) + message
    return ids


@cache
def markup(tool_parser: str, with_tokens: bool = True) -> AnswerMarkup:
    reasoning_parser = "auto" if tool_parser == "gpt_oss" else "qwen3"
    format = choose_format("", tool_parser, reasoning_parser)
    return AnswerMarkup(format, Alphabet.of(tokenizer(with_tokens), format.control_tokens))


def read(
    case: str,
    chunks: Sequence[Sequence[int]],
    finish: str = "stop",
    *,
    tools: tuple[Tool, ...] = TOOLS_GIVEN,
    with_tokens: bool = True,
    thinking: bool = False,
    stop: tuple[str, ...] = (),
    single_call: bool = False,
) -> tuple[Said, list[AnswerEvent]]:
    """Feed an answer in chunks; the finish comes with the last of them."""
    name = WRITERS[case][0] if case in WRITERS else case
    chosen = markup(name, with_tokens)
    parser = AnswerParser(
        tokenizer(with_tokens), chosen.format, chosen.alphabet, tools=tools, thinking=thinking
    )
    reader = AnswerReader(parser, SamplingParams(stop=stop), single_call)
    events: list[AnswerEvent] = []
    for index, chunk in enumerate(chunks):
        news = reader.push(chunk, finish if index == len(chunks) - 1 else "")
        events += news.content
        if news.finish:
            break
    return joined(events), events


def joined(events: Sequence[AnswerEvent]) -> Said:
    """The whole answer of its events; checks that they come in a legal order."""
    reasoning, text, finish = "", "", ""
    calls: list[tuple[str, str]] = []
    is_open = False
    for event in events:
        assert not finish, "nothing follows the end"
        if isinstance(event, ReasoningDelta | TextDelta | ToolArgumentsDelta):
            assert event.text
        if isinstance(event, ReasoningDelta):
            reasoning += event.text
        elif isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, ToolCallStart):
            assert not is_open
            assert event.call == len(calls)
            is_open = True
            calls.append((event.name, ""))
        elif isinstance(event, ToolArgumentsDelta):
            assert is_open
            assert event.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
        elif isinstance(event, ToolCallEnd):
            assert is_open
            is_open = False
        elif isinstance(event, Finished):
            finish = event.reason
    assert not is_open
    return Said(reasoning, text, tuple(calls), finish)
