"""The grammar of most models' answers: thinking, text and sections of calls, in any order."""

from collections.abc import Mapping

from quickturn.text.parsing.events import ToolArgumentsDelta, ToolCallStart
from quickturn.text.parsing.formats import Parsing, ReasoningFormat, ToolFormat
from quickturn.text.parsing.json_stream import loads
from quickturn.text.parsing.output import Output
from quickturn.text.parsing.reader import Reader, Steps
from quickturn.text.tools import call_is_valid


def read_answer(
    parsing: Parsing, tools: ToolFormat | None, reasoning: ReasoningFormat | None, thinking: bool
) -> Steps[None]:
    """Read one answer to its end. `thinking`: it begins inside of thinking."""
    if thinking and reasoning is not None:
        yield from _thought(parsing, tools, reasoning)
    elif reasoning is not None and not _is_token(parsing, reasoning.open):
        yield from _opening_thought(parsing, tools, reasoning)
    openers = {parsing.spell(opener): opener for opener in (tools.openers if tools else ())}
    thoughts = _thought_markers(parsing, reasoning)
    may_start = True
    while True:
        if tools is not None and tools.at_start is not None and may_start:
            yield from tools.at_start(parsing)
        found = yield from parsing.reader.until((*openers, *thoughts), parsing.out.text)
        may_start = found in thoughts and not parsing.out.wrote_text
        if not found:
            return
        if found in openers:
            assert tools is not None
            yield from tools.section(parsing, openers[found])
        elif reasoning is not None and found == parsing.spell(reasoning.open):
            yield from _thought(parsing, tools, reasoning)


def _thought_markers(parsing: Parsing, reasoning: ReasoningFormat | None) -> tuple[str, ...]:
    """Markup that may begin thinking anywhere, and its stray end: only where it can't be mere text."""
    if reasoning is None:
        return ()
    both = (reasoning.open, reasoning.close)
    return tuple(parsing.spell(marker) for marker in both if _is_token(parsing, marker))


def _is_token(parsing: Parsing, marker: str) -> bool:
    return parsing.spell(marker) != marker


def _opening_thought(parsing: Parsing, tools: ToolFormat | None, reasoning: ReasoningFormat) -> Steps[None]:
    """Thinking whose marker is plain text counts at the answer's very beginning only."""
    parsing.reader.record()
    yield from parsing.reader.skip()
    opened = yield from parsing.reader.accept(reasoning.open)
    before = parsing.reader.recorded()
    if opened:
        yield from _thought(parsing, tools, reasoning)
    elif before:
        parsing.out.text(before)


def _thought(parsing: Parsing, tools: ToolFormat | None, reasoning: ReasoningFormat) -> Steps[None]:
    close = parsing.spell(reasoning.close)
    openers = {parsing.spell(opener): opener for opener in (tools.openers if tools else ())}
    while True:
        found = yield from parsing.reader.until((close, *openers), parsing.out.reasoning)
        is_call = found in openers
        if tools is not None and is_call:
            is_call = yield from _calls_in_thought(parsing, tools, found, openers)
            if not is_call:
                continue
        parsing.out.end_reasoning()
        return


def _calls_in_thought(
    parsing: Parsing, tools: ToolFormat, spelled: str, openers: Mapping[str, str]
) -> Steps[bool]:
    """Whether thinking ends here with complete calls that their tools accept; else the opener `spelled` was
    prose.

    A model that stops right behind such calls, without having closed its thinking, meant them.
    """
    reader, out = parsing.reader, parsing.out
    trial = Output(out.alphabet, tuple(out.tools.values()), out.new_id)
    reader.record()
    yield from reader.skip()
    first = yield from reader.peek()
    if first and (tools.first is None or first in tools.first):
        found = spelled
        while found:
            yield from tools.section(parsing.on(trial), openers[found])
            yield from reader.skip()
            found = yield from _accepted(reader, openers)
        at_end = not (yield from reader.peek())
        if at_end and reader.ended == "stop" and _are_calls(trial):
            reader.recorded()
            out.end_reasoning()
            out.adopt(trial)
            return True
    consumed = reader.recorded()
    out.reasoning(spelled)
    reader.unread(consumed)
    return False


def _accepted(reader: Reader, openers: Mapping[str, str]) -> Steps[str]:
    """The opener that comes next, consumed; '' for none."""
    for spelled in openers:
        if (yield from reader.accept(spelled)):
            return spelled
    return ""


def _are_calls(trial: Output) -> bool:
    trial.end_call()
    names: list[str] = []
    texts: list[str] = []
    for event in trial.peek():
        if isinstance(event, ToolCallStart):
            names.append(event.name)
            texts.append("")
        elif isinstance(event, ToolArgumentsDelta):
            texts[-1] += event.text
    tools = tuple(trial.tools.values())
    return (
        bool(names)
        and not trial.wrote_text
        and all(call_is_valid(tools, name, loads(text)) for name, text in zip(names, texts, strict=True))
    )
