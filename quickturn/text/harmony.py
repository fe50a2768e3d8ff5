"""gpt-oss: an answer is messages on channels, `<|channel|>NAME to=RECIPIENT<|message|>BODY<|end|>`.

The channel `analysis` is thinking, `final` and `commentary` are text, and a recipient makes a call of it.
"""

import re

from quickturn.text.parsing.formats import AnswerFormat, Parsing
from quickturn.text.parsing.reader import Steps
from quickturn.text.tool_calls.json_arguments import read_arguments

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TOKENS = frozenset((START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN))
_RECIPIENT = re.compile(r"to=([^\s\udc00-\udfff]+)")


def _answer(parsing: Parsing) -> Steps[None]:
    reader, spell = parsing.reader, parsing.spell
    headers = (spell(CHANNEL), spell(START))
    ends = (spell(END), spell(CALL), spell(RETURN))
    first = yield from reader.peek()
    if first == " ":
        # ' to=functions.f' right behind '<|start|>assistant'
        yield from _message(parsing)
    while (found := (yield from reader.until((*headers, *ends), parsing.out.text, keep=True))) != "":
        if found in ends:
            yield from reader.accept(found)
        else:
            yield from _message(parsing)


def _message(parsing: Parsing) -> Steps[None]:
    reader, out, spell = parsing.reader, parsing.out, parsing.spell
    header, found = yield from reader.take_until((spell(MESSAGE),))
    if not found:
        out.text(header)
        return
    ends = (spell(END), spell(CALL), spell(RETURN))
    borders = (*ends, spell(START), spell(CHANNEL))
    recipient = _RECIPIENT.search(header)
    channel = header.rpartition(spell(CHANNEL))[2].strip()
    if recipient is not None and recipient[1] != "assistant" and out.tools:
        out.start_call(recipient[1].removeprefix("functions."))
        yield from reader.skip()
        yield from read_arguments(parsing)
        out.end_call()
        found = (yield from reader.take_until(borders, keep=True))[1]
    elif channel.startswith("analysis"):
        found = yield from reader.until(borders, out.reasoning, keep=True)
        out.end_reasoning()
    else:
        found = yield from reader.until(borders, out.text, keep=True)
    if found in ends:
        yield from reader.accept(found)


FORMAT = AnswerFormat(whole=_answer, tokens=TOKENS)
