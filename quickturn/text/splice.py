"""Answers as the model wrote them, put back where a client returns them.

A template that renders an earlier answer again writes other tokens than the model did: other white space in
JSON, other key order, another way to cut a text into tokens. Each difference ends the reuse of what the cache
holds. So the tokens of answers are kept for a while, and take the place of the rendered text where both say
the same: thinking, text and calls each by themselves, since templates drop old thinking.
"""

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quickturn.text.answer_format import AnswerMarkup
from quickturn.text.encoder import DATA_END, DATA_START, Part, Tokens
from quickturn.text.tokenizer import Tokenizer

STORE_BYTES = 128 << 20
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Piece:
    """A run of an answer's tokens: thinking with its marks, visible text, or a section of calls."""

    kind: str
    text: str
    tokens: "array[int]"


@dataclass(frozen=True)
class Written:
    """An answer that was kept. `calls`: names and arguments as the client got them."""

    content: str
    calls: tuple[tuple[str, str], ...]
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return 64 + sum(200 + 4 * len(piece.tokens) + 2 * len(piece.text) for piece in self.pieces)


class AnswerStore:
    """The latest answers, by what a client sends back of them, within a bound of memory. Threads may share
    it.
    """

    def __init__(self, limit: int = STORE_BYTES) -> None:
        """Keep up to `limit` bytes."""
        self._limit = limit
        self._size = 0
        self._answers: OrderedDict[tuple[str, ...], Written] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, scope: str, ids: Sequence[str], answer: Written) -> None:
        """Remember an answer; `ids` are those of its calls, `scope` is who may get it back."""
        key = _key(scope, ids, answer.content)
        with self._lock:
            if key in self._answers:
                self._size -= self._answers.pop(key).size
            self._answers[key] = answer
            self._size += answer.size
            while self._size > self._limit:
                self._size -= self._answers.popitem(last=False)[1].size

    def find(self, scope: str, messages: Sequence[Mapping[str, Any]]) -> Written | None:
        """The answer that neighbouring assistant messages of the chat form repeat, if they say the same."""
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        content = "".join(str(message.get("content") or "") for message in messages)
        key = _key(scope, [str(call.get("id")) for call in calls], content)
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None:
                self._answers.move_to_end(key)
        if answer is None or len(calls) != len(answer.calls):
            return None
        if answer.content != content and _compact(answer.content) != _compact(content):
            return None
        for call, (name, arguments) in zip(calls, answer.calls, strict=True):
            function = call["function"]
            if function["name"] != name or _value(function.get("arguments")) != _value(arguments):
                return None
        return answer


def written(
    tokenizer: Tokenizer,
    markup: AnswerMarkup,
    tokens: Sequence[int],
    thinking: bool,
    content: str,
    calls: Sequence[tuple[str, str]],
) -> Written | None:
    """An answer's tokens (without the one that ended it), cut into pieces. None if the model's markup has no
    tokens of its own to cut at.
    """
    tools, reasoning = markup.format.tools, markup.format.reasoning
    ids = {markup.alphabet.chars.get(text): text for text in markup.alphabet.chars}
    names = {index: ids[char] for index, char in markup.alphabet.ids.items()}
    if markup.format.whole is not None or (calls and (tools is None or not tools.closer)):
        return None
    pieces: list[Piece] = []
    kind, run = ("thinking" if thinking else "text"), array("i")
    vocabulary = tokenizer.vocabulary

    def end() -> None:
        nonlocal run
        if run:
            pieces.append(Piece(kind, tokenizer.decode(run, skip_special=False), run))
        run = array("i")

    for token in tokens:
        name = names.get(token)
        if not run and pieces and pieces[-1].kind == "thinking" and vocabulary.token_bytes(token).isspace():
            # Goes with the thinking where a template drops that.
            pieces[-1].tokens.append(token)
            continue
        if kind == "text" and reasoning is not None and name == reasoning.open:
            end()
            kind = "thinking"
        elif kind == "text" and tools is not None and name in tools.openers:
            end()
            kind = "calls"
        run.append(token)
        closes = reasoning is not None and kind == "thinking" and name == reasoning.close
        if closes or (tools is not None and kind == "calls" and name == tools.closer):
            end()
            kind = "text"
    if kind != "text":
        return None
    end()
    return Written(content, tuple(calls), tuple(pieces))


def spliced(regions: Sequence[str], answer: Written, markup: AnswerMarkup) -> list[Part] | None:
    """The texts behind the headers of one answer, with the answer's own tokens in their place; None where
    they don't say the same.

    There are several where a client has cut an answer of thinking, calls and thinking again into messages.
    """
    parts: list[Part] = []
    place, rest, reached = 0, regions[0], 0
    for piece in answer.pieces:
        rank = _ORDER.index(piece.kind)
        if rank < reached and place + 1 < len(regions) and not piece.text.isspace():
            place, reached = place + 1, 0
            rest = regions[place]
        reached = max(rank, reached)
        found = _THE_SAME[piece.kind](piece, rest, markup)
        if found is None:
            return None
        before, length = found
        if length == 0 and (piece.kind == "thinking" or not parts):
            continue
        behind = rest[length:]
        if piece.text[-1:].isspace():
            behind = behind.lstrip(_SPACE)
        parts += [rest[:before]] if before else []
        parts.append(Tokens(piece.tokens, len(rest) - len(behind) - before))
        rest = behind
    return [*parts, rest] if place == len(regions) - 1 else None


_ORDER = ("thinking", "text", "calls")

Found = tuple[int, int]
"""How much of a text stays in front of a piece's tokens, and how much of it they replace (with that)."""


def _same_thinking(piece: Piece, rest: str, markup: AnswerMarkup) -> Found | None:
    """Nothing is replaced where the template has dropped the thinking."""
    reasoning = markup.format.reasoning
    assert reasoning is not None
    space = len(rest) - len(rest.lstrip(_SPACE))
    found = _section(rest[space:], reasoning.open, reasoning.close)
    if found is None:
        return 0, 0
    inner = piece.text.strip(_SPACE).removeprefix(reasoning.open).removesuffix(reasoning.close).strip()
    if _plain(found[len(reasoning.open) : -len(reasoning.close)]).strip() != inner:
        return None
    before = 0
    if not piece.text.startswith(reasoning.open):
        # The prompt had opened the thinking: that part stays as the template writes it.
        opened = space + len(reasoning.open)
        before = opened + len(rest[opened:]) - len(rest[opened:].lstrip(_SPACE))
    return before, space + len(found)


def _same_text(piece: Piece, rest: str, markup: AnswerMarkup) -> Found | None:
    bare = rest.lstrip(_SPACE)
    length = _matched(bare, piece.text.strip(_SPACE))
    return None if length is None else (0, len(rest) - len(bare) + length if length else 0)


def _same_calls(piece: Piece, rest: str, markup: AnswerMarkup) -> Found | None:
    """What calls say was compared already; here it matters where they stand."""
    tools = markup.format.tools
    assert tools is not None
    bare = rest.lstrip(_SPACE)
    for opener in tools.openers:
        found = _section(bare, opener, tools.closer)
        if found is not None:
            return 0, len(rest) - len(bare) + len(found)
    return None


_THE_SAME: dict[str, Callable[[Piece, str, AnswerMarkup], Found | None]] = {
    "thinking": _same_thinking,
    "text": _same_text,
    "calls": _same_calls,
}


def _section(text: str, opener: str, closer: str) -> str | None:
    """The section of `text` from `opener`, which it begins with, to `closer`, both as markup."""
    if not text.startswith(opener):
        return None
    found = re.search(rf"(?<!{DATA_START}){re.escape(closer)}(?!{DATA_END})", text)
    return None if found is None else text[: found.end()]


def _matched(marked: str, text: str) -> int | None:
    """How much of `marked` spells `text`, marks of data aside; None if it doesn't."""
    if marked.startswith(text):
        return len(text)
    at = 0
    for char in text:
        while marked[at : at + 1] in (DATA_START, DATA_END) and at < len(marked):
            at += 1
        if marked[at : at + 1] != char:
            return None
        at += 1
    return at


def _plain(text: str) -> str:
    return text.replace(DATA_START, "").replace(DATA_END, "")


def _key(scope: str, ids: Sequence[str], content: str) -> tuple[str, ...]:
    return (scope, *ids) if ids else (scope, "", content.strip())


def _compact(text: str) -> str:
    return "".join(text.split())


def _value(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments
