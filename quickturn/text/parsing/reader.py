"""The incremental core of all parsers: a parser is a generator that reads ahead as far as it must.

Whatever a parser needs it asks of a `Reader` with `yield from`; the generator pauses when the text so far
doesn't decide. Every decision depends on characters alone and never on where the text was cut, which is what
makes any chunking equal to all at once.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
Sink = Callable[[str], None]

SPACE = " \t\r\n"


class Reader:
    """Text that comes in pieces. `feed` and `end` belong to the driver, all else to the parser."""

    def __init__(self) -> None:
        self.buffer = ""
        self.ended = ""
        """Why no more text comes ('stop', 'length', ...); '' while it may."""
        self._logs: list[list[str]] = []
        self._sink: Sink | None = None
        self._firsts = ""

    def feed(self, text: str) -> None:
        """More text."""
        self.buffer += text

    def pass_on(self, text: str) -> bool:
        """Give `text` to where the parser would, if it waits for markers of which `text` can't hold the
        beginning: nearly all text of an answer goes this way, and wakes no parser. False: it has to be fed.
        """
        if self._sink is None or self.buffer or self._logs:
            return False
        for first in self._firsts:
            if first in text:
                return False
        self._sink(text)
        return True

    def end(self, reason: str) -> None:
        """No more text."""
        self.ended = reason

    def take(self, count: int) -> str:
        """Consume the next `count` characters."""
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        for log in self._logs:
            log.append(taken)
        return taken

    def record(self) -> None:
        """Remember what is consumed from here on, for `recorded`. Recordings may lie within each other."""
        self._logs.append([])

    def recorded(self) -> str:
        """What was consumed since the last `record`; ends that recording."""
        return "".join(self._logs.pop())

    def unread(self, text: str) -> None:
        """Put consumed text back. No recording may go on."""
        assert not self._logs
        self.buffer = text + self.buffer

    def until(self, markers: Sequence[str], sink: Sink, keep: bool = False) -> Steps[str]:
        """Give text to `sink` up to the first of `markers`, consume that too (unless `keep`), and return it;
        '' at the end.

        The marker that starts first counts, of those the longest. Text that may still become one is held
        back. Without markers all text is given away.
        """
        firsts = "".join({marker[0] for marker in markers})
        while True:
            start, found = self._find(markers)
            held = max((_overlap(self.buffer, marker) for marker in markers), default=0)
            undecided = held and len(self.buffer) - held <= start and not self.ended
            if found and not undecided:
                text = self.take(start)
                if text:
                    sink(text)
                return found if keep else self.take(len(found))
            text = self.take(len(self.buffer) - (0 if self.ended else held))
            if text:
                sink(text)
            if self.ended:
                return ""
            self._sink, self._firsts = sink, firsts
            yield
            self._sink = None

    def take_until(self, markers: Sequence[str], keep: bool = False) -> Steps[tuple[str, str]]:
        """The text before the first of `markers`, and that marker, consumed as `until` does."""
        parts: list[str] = []
        found = yield from self.until(markers, parts.append, keep)
        return "".join(parts), found

    def peek(self) -> Steps[str]:
        """The next character, not consumed; '' at the end."""
        while not self.buffer and not self.ended:
            yield
        return self.buffer[:1]

    def skip(self, chars: str = SPACE) -> Steps[str]:
        """Consume what consists of `chars`, and return it."""
        skipped = ""
        while (char := (yield from self.peek())) and char in chars:
            skipped += self.take(1)
        return skipped

    def accept(self, literal: str) -> Steps[bool]:
        """Consume `literal` if it is what comes next."""
        while len(self.buffer) < len(literal) and literal.startswith(self.buffer) and not self.ended:
            yield
        if not self.buffer.startswith(literal):
            return False
        self.take(len(literal))
        return True

    def _find(self, markers: Sequence[str]) -> tuple[int, str]:
        """Where the first marker starts, and which; (length of the buffer, '') for none."""
        start, found = len(self.buffer), ""
        for marker in markers:
            at = self.buffer.find(marker)
            if 0 <= at < start or (at == start and len(marker) > len(found)):
                start, found = at, marker
        return start, found


def _overlap(text: str, marker: str) -> int:
    """Length of the longest proper prefix of `marker` that `text` ends with."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
