"""Llama 3.2 and 4: an answer that is a list of Python calls, `[f(a=1, b="x"), g()]`."""

import ast
import json
import re

from quickturn.text.parsing.formats import Parsing, ToolFormat
from quickturn.text.parsing.output import ArgumentWriter, is_json
from quickturn.text.parsing.reader import Reader, Steps

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
_SURROGATE = re.compile("[\ud800-\udfff]")
_PAIRS = {"[": "]", "{": "}", "(": ")"}


def _at_start(parsing: Parsing) -> Steps[bool]:
    reader = parsing.reader
    reader.record()
    yield from reader.skip()
    name = ""
    if (yield from reader.accept("[")):
        yield from reader.skip()
        name, _ = yield from reader.take_until(("(", "[", "{", '"', "'", " ", ",", "]", "\n"), keep=True)
    is_call = name in parsing.out.tools and (yield from reader.accept("("))
    before = reader.recorded()
    if not is_call:
        if before:
            parsing.out.text(before)
        return False
    while True:
        parsing.out.start_call(name)
        yield from _arguments(parsing, name)
        parsing.out.end_call()
        yield from reader.skip(", \n\t")
        if (yield from reader.accept("]")):
            return True
        name, found = yield from reader.take_until(("(",))
        if not found:
            return True


def _arguments(parsing: Parsing, name: str) -> Steps[None]:
    reader = parsing.reader
    writer = ArgumentWriter(parsing.out, name)
    while True:
        yield from reader.skip(", \n\t")
        if (yield from reader.accept(")")):
            break
        key, found = yield from reader.take_until(("=",))
        if not found:
            return
        text = yield from _expression(reader)
        writer.key(key.strip())
        parsing.out.arguments(_json_of(parsing.out.alphabet.read(text, True)))
    writer.end()


def _expression(reader: Reader) -> Steps[str]:
    """One Python expression, up to a comma or bracket that isn't its own."""
    text, closers, quote = "", "", ""
    while char := (yield from reader.peek()):
        if not quote and not closers and char in ",)":
            break
        text += reader.take(1)
        if quote:
            if char == "\\":
                yield from reader.peek()
                text += reader.take(1)
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in _PAIRS:
            closers += _PAIRS[char]
        elif closers.endswith(char):
            closers = closers[:-1]
    return text


def _json_of(text: str) -> str:
    """JSON for a Python literal; what is JSON stays as it is, and anything else is a string."""
    text = text.strip()
    if is_json(text):
        return text
    try:
        value = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    # Half of a surrogate pair is a character in Python, but no text.
    return value if value.isascii() or not _SURROGATE.search(value) else json.dumps(text, ensure_ascii=False)


def _section(parsing: Parsing, opener: str) -> Steps[None]:
    if (yield from _at_start(parsing)):
        yield from parsing.reader.take_until((parsing.spell(CLOSE),))


FORMAT = ToolFormat(
    "pythonic", (OPEN,), _section, tokens=frozenset((OPEN, CLOSE)), first="[", at_start=_at_start
)
