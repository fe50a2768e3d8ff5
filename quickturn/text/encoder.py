"""From texts, and parts that are tokens already, to one sequence of token ids; what was encoded lately is not
encoded again.

The prompt of a conversation's next turn is that of the turn before and a little more. It is cut into runs
(`text.runs`), and the ids of runs are remembered, so that only the new ones are work. They go to the
tokenizer all at once, which has the interpreter's lock released meanwhile.
"""

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from quickturn.text.runs import BEHIND, PLAIN, Cutter, Run

KNOWN_BYTES = 64 << 20

DATA_START, DATA_END = "\ufdd0", "\ufdd1"
"""Noncharacters (no text of anybody holds them) around a control token that was found in data, so that it is
encoded as plain text.
"""


@dataclass(frozen=True)
class Tokens:
    """A part that is tokens already, in the place of `length` characters of text."""

    ids: "array[int]"
    length: int


Part = str | Tokens


@dataclass(frozen=True)
class Encoded:
    """Token ids, and the token positions of the places that were asked for."""

    ids: "array[int]"
    places: tuple[int, ...] = ()


class KnownRuns:
    """Ids of the latest runs, within a bound of memory. Of each only what the same `scope` encoded is told:
    the time that an encoding takes would say what others have sent. Threads may share it.
    """

    def __init__(self, limit: int = KNOWN_BYTES) -> None:
        """Keep up to `limit` bytes."""
        self._limit = limit
        self._size = 0
        self._ids: OrderedDict[tuple[str, int, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, scope: str, runs: Sequence[Run]) -> list["array[int] | None"]:
        """The ids of each run; None where they aren't known."""
        found = []
        with self._lock:
            for run in runs:
                key = (scope, run.kind, run.text)
                ids = self._ids.get(key)
                if ids is not None:
                    self._ids.move_to_end(key)
                found.append(ids)
        return found

    def keep(self, scope: str, runs: Sequence[Run], ids: Sequence["array[int]"]) -> None:
        """Remember runs that were encoded."""
        with self._lock:
            for run, own in zip(runs, ids, strict=True):
                key = (scope, run.kind, run.text)
                if key not in self._ids:
                    self._ids[key] = own
                    self._size += _size(key, own)
            while self._size > self._limit:
                self._size -= _size(*self._ids.popitem(last=False))


def _size(key: tuple[str, int, str], ids: "array[int]") -> int:
    return 200 + sys.getsizeof(key[2]) + 4 * len(ids)


class Encoder:
    """Encodes with one tokenizer. Text has its control tokens recognised, except those between marks."""

    def __init__(
        self, backend: tokenizers.Tokenizer, control: re.Pattern[str], known: KnownRuns | None = None
    ) -> None:
        """`control` matches the tokens that mean something to the model; `known` may be given for a bound of
        its own.
        """
        self._backends = (backend, _without_added(backend))
        self._control = control
        self._cutter = Cutter(backend)
        self._known = known or KnownRuns()
        self._line_breaks = [
            array("i", each.encode("\n", add_special_tokens=False).ids) for each in self._backends
        ]

    def encode(self, parts: Sequence[Part], scope: str = "", places: Sequence[int] = ()) -> Encoded:
        """Ids of a rendered chat of which some parts are tokens already. Marked control tokens are encoded as
        text; a mark whose partner was cut away is dropped.

        `scope`: whose text it is. `places`: character positions whose token positions are wanted; the tokens
        before those are the same whatever text follows the place, as far as this one shows.
        """
        pieces: list[Run | Tokens] = []
        at = 0
        for part in parts:
            if isinstance(part, str):
                pieces += self._runs(part, at, bool(pieces))
                at += len(part)
            else:
                pieces.append(part)
                at += part.length
        runs = [piece for piece in pieces if isinstance(piece, Run)]
        encoded = iter(self._ids(runs, scope))
        ids, starts = array("i"), []
        for piece in pieces:
            starts.append(len(ids))
            ids += piece.ids if isinstance(piece, Tokens) else next(encoded)
        positions = [self._position(place, pieces, starts, ids, scope) for place in places]
        return Encoded(ids, tuple(positions))

    def _runs(self, text: str, start: int, behind: bool) -> list[Run]:
        runs: list[Run] = []
        before, *marked = text.split(DATA_START)
        self._add(runs, before, 0, start, behind)
        at = start + len(before)
        for piece in marked:
            at += 1
            quoted = self._control.match(piece)
            length = 0
            if quoted is not None and piece.startswith(DATA_END, quoted.end()):
                self._add(runs, quoted[0], PLAIN, at, behind)
                length = quoted.end() + 1
            self._add(runs, piece[length:], 0, at + length, behind)
            at += len(piece)
        return runs

    def _add(self, runs: list[Run], text: str, kind: int, start: int, behind: bool) -> None:
        """The runs of `text`, in which a mark has no partner."""
        for piece in text.split(DATA_END):
            runs += self._cutter.runs(piece, kind | BEHIND * (behind or bool(runs)), start)
            start += len(piece) + 1

    def _ids(self, runs: Sequence[Run], scope: str) -> list["array[int]"]:
        """The ids of each run."""
        found = self._known.find(scope, runs)
        missing = list(dict.fromkeys(run[1:] for run, ids in zip(runs, found, strict=True) if ids is None))
        if not missing:
            return [ids for ids in found if ids is not None]
        new: dict[tuple[int, str], array[int]] = {}
        for kind in sorted({kind for kind, _ in missing}):
            texts = [text for own, text in missing if own == kind]
            new.update(zip(((kind, text) for text in texts), self._encode(texts, kind), strict=True))
        self._known.keep(scope, [Run(0, *each) for each in missing], [new[each] for each in missing])
        return [new[run[1:]] if ids is None else ids for run, ids in zip(runs, found, strict=True)]

    def _encode(self, texts: list[str], kind: int) -> list["array[int]"]:
        backend = self._backends[bool(kind & PLAIN)]
        if not kind & BEHIND:
            return _batch(backend, texts)
        # SentencePiece tokenizers put a space before the first word of a text; behind a line break they
        # don't.
        line_break = self._line_breaks[bool(kind & PLAIN)]
        count = len(line_break)
        result = _batch(backend, ["\n" + text for text in texts])
        joined = [text for text, ids in zip(texts, result, strict=True) if ids[:count] != line_break]
        alone = dict(zip(joined, _batch(backend, joined), strict=True))
        return [
            alone[text] if text in alone else ids[count:] for text, ids in zip(texts, result, strict=True)
        ]

    def _position(
        self,
        place: int,
        pieces: Sequence[Run | Tokens],
        starts: Sequence[int],
        ids: "array[int]",
        scope: str,
    ) -> int:
        """Where the tokens of the text before `place` end; see `encode`."""
        at = 0
        for piece, start in zip(pieces, starts, strict=True):
            if isinstance(piece, Tokens):
                at += piece.length
                if place < at:
                    return start
                continue
            at = piece.start + len(piece.text)
            if place <= piece.start:
                return start
            if place < at:
                (head,) = self._ids([Run(0, piece.kind, piece.text[: place - piece.start])], scope)
                return start + _common(head, ids, start)
        return len(ids)


def _common(head: "array[int]", ids: "array[int]", start: int) -> int:
    """How many tokens of `head` stand in `ids` from `start` on; the last one of it may go on otherwise."""
    count = min(len(head) - 1, len(ids) - start)
    for index in range(max(count, 0)):
        if head[index] != ids[start + index]:
            return index
    return max(count, 0)


def _batch(backend: tokenizers.Tokenizer, texts: list[str]) -> list["array[int]"]:
    # encode_batch releases the interpreter lock, encode doesn't: a long prompt in a thread must not stall the
    # streams.
    if not texts:
        return []
    return [array("i", each.ids) for each in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _without_added(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer without added tokens: no text becomes a control token."""
    plain = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    return plain
