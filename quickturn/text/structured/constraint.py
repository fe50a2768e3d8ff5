"""Which grammar an answer has to follow, if any."""

from collections.abc import Sequence
from dataclasses import replace

from quickturn.sampling_params import Constraint
from quickturn.text.answer_format import AnswerMarkup
from quickturn.text.parsing.formats import ReasoningFormat
from quickturn.text.structured import formats, harmony_grammar
from quickturn.text.structured.formats import Format
from quickturn.text.structured.tool_grammar import NoGrammar, ToolGrammar, well_formed
from quickturn.text.tools import Tool


def constraint_of(
    markup: AnswerMarkup,
    *,
    output: Format | None = None,
    tools: Sequence[Tool] = (),
    must_call: bool = False,
    single_call: bool = False,
    thinking: bool = False,
) -> Constraint | None:
    """The constraint of an answer whose text has to follow `output`, and which may (`must_call`: must) call
    `tools`; None when it is free.

    Calls of strict tools follow their schemas, all calls do where one must be made. Thinking is always free;
    `thinking` says that the prompt opened it. Raises NoGrammar, BadSchema.
    """
    if output is None and not must_call and not any(tool.strict for tool in tools):
        return None
    if markup.format.whole is not None:
        return Constraint(formats.source(_harmony(markup, output, tools, must_call)))
    # Not calls: half an argument is no argument, and somebody would act on it.
    closes = output is not None and output.get("type") == "json_schema" and not tools and not must_call
    allowed: list[Format] = []
    if must_call or (tools and output is not None):
        allowed.append(_grammar(markup).calls(tools, single_call))
    if output is not None and not must_call:
        allowed.append(output)
    if not allowed:
        return _after_thinking(markup, _grammar(markup).in_text(tools), thinking, leading_space=False)
    found = _after_thinking(markup, formats.either(allowed), thinking, leading_space=True)
    return replace(found, closes=closes)


def helpful_constraint(markup: AnswerMarkup, thinking: bool) -> Constraint | None:
    """A constraint that nobody asked for: whatever begins as a call becomes one whole JSON object. It is the
    same for all tools. None where the parser makes JSON of what is written anyway.
    """
    tools = markup.format.tools
    free = None if tools is None else well_formed(tools.name, markup.alphabet)
    return None if free is None else _after_thinking(markup, free, thinking, leading_space=False)


def _grammar(markup: AnswerMarkup) -> ToolGrammar:
    if markup.format.tools is None:
        raise NoGrammar("how this model writes calls isn't known: start the server with --tool-call-parser")
    return ToolGrammar.of(markup.format.tools.name, markup.alphabet)


def _harmony(markup: AnswerMarkup, output: Format | None, tools: Sequence[Tool], must_call: bool) -> Format:
    alphabet = markup.alphabet
    bodies = [harmony_grammar.call(alphabet, tools)] if tools else []
    if not must_call:
        bodies.append(harmony_grammar.text(alphabet, output))
    return harmony_grammar.answer(alphabet, *bodies)


def _after_thinking(markup: AnswerMarkup, format: Format, thinking: bool, leading_space: bool) -> Constraint:
    """`format` behind thinking that is there already, or that the answer may begin with."""
    reasoning = markup.format.reasoning
    if reasoning is None:
        return Constraint(formats.source(format))
    if leading_space:
        format = formats.sequence(formats.space(), format)
    ids = {char: index for index, char in markup.alphabet.ids.items()}
    opened, closed = (ids.get(markup.alphabet.spell(each)) for each in (reasoning.open, reasoning.close))
    if opened is None or closed is None:
        return Constraint(formats.source(_spelled_thinking(reasoning, format, thinking)))
    return Constraint(formats.source(format), (opened,), (closed,), thinking)


def _spelled_thinking(reasoning: ReasoningFormat, format: Format, thinking: bool) -> Format:
    """Thinking whose marks are text, as a part of the grammar."""
    end = formats.literal(reasoning.close)
    thought = formats.sequence({"type": "any_text", "excludes": [reasoning.close]}, end)
    if thinking:
        return formats.sequence(thought, format)
    return formats.sequence(
        formats.optional(formats.sequence(formats.literal(reasoning.open), thought)), format
    )
