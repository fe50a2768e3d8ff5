"""Stop strings over streamed text: nothing of a stop string is ever shown, nothing else is withheld for
longer than needed."""

from collections.abc import Sequence


class StopStrings:
    """Looks for the stop string that ends first in a text that comes in pieces.

    Text that may still grow into a stop string is held back until it can't. Of stop strings that end at the
    same place the longest counts. Where the text is cut into pieces makes no difference: a match is decided
    by its end, and everything from its first character on is still held when the end arrives.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now. Once `found` names the stop string, all later text is dropped."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        self._held = ""
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            end, start, self.found = min(matches)
            return text[: end if self._include else start]
        held = max(_overlap(text, stop) for stop in self._stops)
        if held:
            self._held = text[-held:]
            return text[:-held]
        return text

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
