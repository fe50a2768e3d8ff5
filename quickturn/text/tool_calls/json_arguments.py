"""A call's arguments as one JSON value, passed on as it comes."""

from quickturn.text.parsing.formats import Parsing
from quickturn.text.parsing.json_stream import loads, stream_value, take_value
from quickturn.text.parsing.reader import Steps


def read_arguments(parsing: Parsing) -> Steps[None]:
    """Read the arguments of the call that is open. An object is streamed; null is none, and a string holds
    them as JSON.
    """
    first = yield from parsing.reader.peek()
    if first == "{":
        yield from stream_value(parsing.reader, parsing.out.arguments)
    elif first in ("[", '"') or first.isalnum():
        parsing.out.arguments(as_object((yield from take_value(parsing.reader))))


def as_object(text: str) -> str:
    """Arguments that weren't written as an object; '' for none."""
    value = loads(text)
    if value is None:
        return "" if text in ("", "null") else text
    return (value if value.strip() else "") if isinstance(value, str) else text
