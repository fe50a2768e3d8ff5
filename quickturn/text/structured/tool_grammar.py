"""Tool calls as grammars, in each model family's own markup."""

# ruff: noqa: RUF001  (the vertical lines of DeepSeek's tokens are full-width)

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quickturn.text.parsing.alphabet import Alphabet
from quickturn.text.structured import formats
from quickturn.text.structured.formats import Format
from quickturn.text.structured.python_grammar import python_call
from quickturn.text.structured.schema import BadSchema
from quickturn.text.structured.tag_grammar import KEY, dsml_arguments, tagged_arguments
from quickturn.text.tools import Tool

ANY_OBJECT = {"type": "object"}
_ANY_NAME = "[a-zA-Z0-9_.:/-]{1,128}"


@dataclass(frozen=True)
class CallMarkup:
    """Where the parts of calls stand: `open`, then one call or (`many`) several, then `close`. A call is
    `before`, the tool's name, `between`, `lead` and the arguments in `style` if there are any, `after`; calls
    of one section are parted by `separator`, sections by `gap`.
    """

    open: str
    before: str
    between: str
    after: str
    close: str
    many: bool = False
    separator: str = ""
    gap: str = "\n"
    style: str = "json"
    lead: str = ""


_MARKUP: dict[str, CallMarkup] = {
    "hermes": CallMarkup("<tool_call>", '\n{"name": "', '", "arguments": ', "}\n", "</tool_call>"),
    "qwen3_coder": CallMarkup(
        "<tool_call>", "\n<function=", ">", "\n</function>\n", "</tool_call>", style="qwen_xml", lead="\n"
    ),
    "deepseek_v3": CallMarkup(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        many=True,
        separator="\n",
    ),
    "deepseek_v31": CallMarkup(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        many=True,
    ),
    "kimi_k2": CallMarkup(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        many=True,
    ),
    "minimax_m2": CallMarkup(
        "<minimax:tool_call>",
        '\n<invoke name="',
        '">',
        "\n</invoke>",
        "\n</minimax:tool_call>",
        many=True,
        style="minimax_xml",
        lead="\n",
    ),
    "deepseek_v32": CallMarkup(
        "<｜DSML｜function_calls>",
        '\n<｜DSML｜invoke name="',
        '">',
        "\n</｜DSML｜invoke>",
        "\n</｜DSML｜function_calls>",
        many=True,
        style="dsml",
    ),
    "pythonic": CallMarkup("[", "", "", "", "]", many=True, separator=", ", style="python"),
    "glm45": CallMarkup("<tool_call>", "", "", "\n", "</tool_call>", style="glm_xml", lead="\n"),
    "mistral": CallMarkup("[TOOL_CALLS]", "", "[ARGS]", "", "", gap=""),
    "mistral list": CallMarkup(
        "[TOOL_CALLS][", '{"name": "', '", "arguments": ', "}", "]", many=True, separator=", "
    ),
    "llama3_json": CallMarkup("", '{"name": "', '", "parameters": ', "}", "", many=True, separator="; "),
}
_NUMBERED = {"kimi_k2"}
"""Formats that number the calls behind their names."""


class NoGrammar(ValueError):
    """This model's markup of calls can't be put into a grammar."""


@dataclass(frozen=True)
class ToolGrammar:
    """Builds grammars of calls in one model's markup."""

    markup: CallMarkup
    alphabet: Alphabet
    numbered: bool

    @staticmethod
    def of(name: str, alphabet: Alphabet) -> "ToolGrammar":
        """For the tool call format `name`. Raises NoGrammar."""
        if name == "mistral" and "[ARGS]" not in alphabet.chars:
            name = "mistral list"
        if name not in _MARKUP:
            raise NoGrammar(f"calls in this model's format ({name}) can't be forced; use tool_choice 'auto'")
        return ToolGrammar(_MARKUP[name], alphabet, name in _NUMBERED)

    def calls(self, tools: Sequence[Tool], single: bool) -> Format:
        """One call or more (`single`: exactly one), and nothing else."""
        one = self._body(tools)
        m = self.markup
        if m.many and not single:
            more = formats.sequence(*self._literal(m.separator), one)
            one = formats.sequence(one, {"type": "star", "content": more})
        section = formats.sequence(*self._literal(m.open), one, *self._literal(m.close))
        if single or m.many:
            return section
        more = formats.sequence(*self._literal(m.gap), section)
        return formats.sequence(section, {"type": "star", "content": more})

    def in_text(self, tools: Sequence[Tool]) -> Format:
        """Free text, in which what begins a call goes on as one; without tools, as a call of any name with
        any object for its arguments. Raises NoGrammar for calls that begin with nothing of their own.
        """
        m = self.markup
        if not m.open or m.style == "python":
            raise NoGrammar("strict tools need tool_choice 'required' with this model's format")
        opener, *rest = self._literal(m.open)
        if rest and opener["type"] != "token" and rest[0]["type"] == "token":
            # What stands before the token is no sign by itself.
            opener, *rest = rest
        body = self._body(tools)
        if m.many:
            more = formats.sequence(*self._literal(m.separator), body)
            body = formats.sequence(body, {"type": "star", "content": more})
        *before_end, end = self._literal(m.close) or [formats.literal("")]
        content = formats.sequence(*rest, body, *before_end)
        closing = end if end["type"] == "token" else end["value"]
        if opener["type"] == "token":
            tag = {"type": "tag", "begin": opener, "content": content, "end": closing}
            return {"type": "token_triggered_tags", "trigger_tokens": [opener["token"]], "tags": [tag]}
        if end["type"] == "token":
            content, closing = formats.sequence(content, end), ""
        tag = {"type": "tag", "begin": opener["value"], "content": content, "end": closing}
        return {"type": "triggered_tags", "triggers": [opener["value"]], "tags": [tag]}

    def _body(self, tools: Sequence[Tool]) -> Format:
        return formats.either([self._call(tool) for tool in tools] or [self._call(None)])

    def _call(self, tool: Tool | None) -> Format:
        m = self.markup
        if tool is not None and m.style == "python":
            return python_call(tool)
        if tool is None:
            elements = [*self._literal(m.before), formats.regex(_ANY_NAME)]
        else:
            name = json.dumps(tool.name, ensure_ascii=False)[1:-1] if m.style == "json" else tool.name
            elements = [*self._literal(m.before + name)]
        if self.numbered:
            elements.append(formats.regex(":[0-9]{1,4}"))
        elements += self._literal(m.between)
        if tool is None:
            elements.append(formats.json_object())
        elif m.style == "glm_xml" and KEY in self.alphabet.chars:
            # The compiler's own style would let the tags be spelled by other tokens, which are text.
            elements += tagged_arguments(tool, self.alphabet)
        elif m.style == "dsml":
            elements += dsml_arguments(tool, self.alphabet)
        elif m.style == "json" or takes_arguments(tool):
            elements += [*self._literal(m.lead), arguments_of(tool, m.style)]
        elements += self._literal(m.after)
        return formats.sequence(*elements)

    def _literal(self, text: str) -> list[Format]:
        return formats.markup(self.alphabet, text) if text else []


def takes_arguments(tool: Tool) -> bool:
    """Whether a call can have any arguments; a schema that names none means that there are none."""
    return bool(tool.parameters.get("properties") or tool.parameters.get("additionalProperties"))


def arguments_of(tool: Tool, style: str = "json") -> Format:
    """The arguments of a call: by its schema, or (a tool that isn't strict, with a schema that can't be
    followed) any object. Raises BadSchema for a strict one.
    """
    schema: dict[str, Any] = {**ANY_OBJECT, **(tool.parameters or {"properties": {}})}
    try:
        return formats.json_schema(schema, style)
    except BadSchema:
        if tool.strict:
            raise
        return formats.json_schema(ANY_OBJECT, style)


def well_formed(name: str, alphabet: Alphabet) -> Format | None:
    """Free text whose calls hold whole JSON objects, for the format `name`; None where the parser makes JSON
    of what is written, or where calls don't begin with a token of their own.
    """
    try:
        grammar = ToolGrammar.of(name, alphabet)
        if grammar.markup.style != "json" or alphabet.spell(grammar.markup.open) == grammar.markup.open:
            return None
        return grammar.in_text(())
    except NoGrammar:
        return None
