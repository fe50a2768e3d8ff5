"""One call as a JSON object with a name and arguments, which several families write."""

from quickturn.text.parsing.formats import Parsing
from quickturn.text.parsing.json_stream import skip_space, take_string, take_value
from quickturn.text.parsing.reader import Steps
from quickturn.text.tool_calls.json_arguments import as_object, read_arguments

_NAME = ("name",)
_ARGUMENTS = ("arguments", "parameters")


def read_call_object(parsing: Parsing, known_only: bool = False) -> Steps[bool]:
    """Read `{"name": ..., "arguments": {...}}`, keys in any order and others ignored, streaming the arguments
    as soon as the name is known. Returns False, with nothing written, when what comes is no such object;
    `known_only`: also when it names no tool.
    """
    reader, out = parsing.reader, parsing.out
    started, whole, pending, id = False, False, "", ""
    name: str | None = None
    if not (yield from reader.accept("{")):
        return False
    while True:
        yield from skip_space(reader)
        if (yield from reader.accept("}")):
            whole = True
            break
        if (yield from reader.accept(",")):
            continue
        key = yield from take_string(reader)
        yield from skip_space(reader)
        if key is None or not (yield from reader.accept(":")):
            break
        yield from skip_space(reader)
        if key in _NAME and name is None:
            name = yield from take_string(reader)
            if name is None or (known_only and name not in out.tools):
                return False
        elif key in _ARGUMENTS and name is not None and not started:
            started = True
            out.start_call(name, id)
            yield from read_arguments(parsing)
        elif key in _ARGUMENTS and not started:
            pending = yield from take_value(reader)
        elif key == "id":
            id = (yield from take_string(reader)) or ""
        else:
            yield from take_value(reader)
    if name is None or not (started or whole):
        return False
    if not started:
        out.start_call(name, id)
        out.arguments(as_object(pending))
    out.end_call()
    return True
