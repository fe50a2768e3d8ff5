"""Conversations as they are really sent: prompts made of earlier ones and of the answers that came.

Each talk also writes itself as bytes for the ceiling, so that two prompts share exactly the beginning that
their bytes share, and knows how many tokens those bytes are.
"""

import json
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quickturn.bench.agent import content
from quickturn.bench.agent.ceiling import PrefixTree
from quickturn.bench.agent.sessions import Session, Turn

_TOKEN_BYTES = 4


@dataclass(frozen=True)
class Answer:
    """What came back: text and reasoning, token ids where they are known, tokens by the server's count."""

    text: str = ""
    reasoning: str = ""
    ids: tuple[int, ...] = ()
    tokens: int = 0


class Talk(Protocol):
    """One session being held."""

    path: str
    """Of the API that it speaks."""

    def body(self, index: int) -> dict[str, Any]:
        """Fields of the request of turn `index` that carry its prompt."""

    def sending(self, index: int) -> int:
        """Right before turn `index` is sent: bytes of its beginning that were sent or answered before, in any
        talk of the run. From now on it counts as sent.
        """

    def ceiling(self, index: int, known: int, prompt_tokens: int) -> int:
        """What `known` bytes of the prompt of turn `index` are in tokens, when all are `prompt_tokens`: what
        an infinite cache would not compute again.
        """

    def answered(self, index: int, prompt_tokens: int, answer: Answer) -> None:
        """Take in the answer of turn `index`."""


class TokenTalk:
    """Prompts as token ids. Where an answer's ids don't come back, random ones of its length stand for it."""

    path = "/completions"

    def __init__(self, session: Session, seen: PrefixTree, low: int, high: int) -> None:
        """Ids from `low` up to `high` exclusive; `seen` holds what all talks of the run sent."""
        self._session = session
        self._seen = seen
        self._range = low, high
        self._fresh = [content.ids(turn.new, low, high) for turn in session.turns]
        self._prompts: list[NDArray[np.int32]] = []
        self._after: list[NDArray[np.int32]] = []

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Token ids of the prompt of turn `index`; every turn before must have been asked for."""
        if index == len(self._prompts):
            turn = self._session.turns[index]
            kept = self._after[turn.parent][: turn.keep] if turn.parent >= 0 else self._fresh[0][:0]
            self._prompts.append(np.concatenate((kept, self._fresh[index])))
            self._after.append(self._prompts[index])
        return self._prompts[index]

    def body(self, index: int) -> dict[str, Any]:
        """The prompt as a list of ids."""
        return {"prompt": self.prompt(index).tolist()}

    def sending(self, index: int) -> int:
        """Bytes of the ids."""
        return _known(self._seen, self.prompt(index).tobytes())

    def ceiling(self, index: int, known: int, prompt_tokens: int) -> int:
        """Exact, but for the last token of a prompt, which is always computed."""
        return min(known // _TOKEN_BYTES, prompt_tokens - 1)

    def answered(self, index: int, prompt_tokens: int, answer: Answer) -> None:
        """Its ids count as sent where they are known; what stands for unknown ones does not."""
        prompt = self.prompt(index)
        if answer.ids:
            self._after[index] = np.concatenate((prompt, np.array(answer.ids, dtype=np.int32)))
            self._seen.add(self._after[index].tobytes())
            return
        stands = np.random.default_rng((index, len(prompt))).integers(
            *self._range, answer.tokens, dtype=np.int32
        )
        self._after[index] = np.concatenate((prompt, stands))


@dataclass(frozen=True)
class _Message:
    role: str
    text: str
    tokens: int
    """As planned; what the server counts differs by the template's own."""
    reasoning: str = ""

    def sent(self) -> dict[str, str]:
        message = {"role": self.role, "content": self.text}
        return message | {"reasoning_content": self.reasoning} if self.reasoning else message


class ChatTalk:
    """Prompts as messages: the session's own answers are what its next turns carry."""

    path = "/chat/completions"

    def __init__(self, session: Session, seen: PrefixTree, tokens_per_word: float) -> None:
        """`seen` holds what all talks of the run sent."""
        self._session = session
        self._seen = seen
        self._fresh = [content.words(turn.new, tokens_per_word) for turn in session.turns]
        self._prompts: list[tuple[_Message, ...]] = []
        self._after: list[tuple[_Message, ...]] = []
        self._marks: dict[int, tuple[tuple[int, int], ...]] = {}
        """By turn: lengths in bytes of which the tokens are known, in order."""

    def prompt(self, index: int) -> tuple[_Message, ...]:
        """Messages of turn `index`; every turn before must have been asked for."""
        if index == len(self._prompts):
            turn = self._session.turns[index]
            fresh = _Message("user", self._fresh[index], sum(piece.tokens for piece in turn.new))
            kept = self._kept(turn)
            if kept and kept[-1].role == "user":
                # Templates want roles that take turns: what was cut and what is new are one message.
                last = kept[-1]
                fresh = _Message("user", f"{last.text} {fresh.text}", last.tokens + fresh.tokens)
                kept = kept[:-1]
            self._prompts.append((*kept, fresh))
            self._after.append(self._prompts[index])
        return self._prompts[index]

    def _kept(self, turn: Turn) -> tuple[_Message, ...]:
        if turn.parent < 0:
            return ()
        before = self._session.turns[turn.parent]
        # An answer that is kept is kept whole, whatever its length became.
        whole = turn.keep >= before.prompt + before.answer
        after = self._after[turn.parent]
        return after if whole else _cut(after, turn.keep)

    def body(self, index: int) -> dict[str, Any]:
        """The messages."""
        return {"messages": [message.sent() for message in self.prompt(index)]}

    def sending(self, index: int) -> int:
        """Bytes of the messages' texts."""
        return _known(self._seen, _written(self.prompt(index)))

    def ceiling(self, index: int, known: int, prompt_tokens: int) -> int:
        """Bytes between those of which the server counted the tokens (the prompt and the answer that this one
        grew out of, and the prompt itself) count in proportion.
        """
        length = len(_written(self.prompt(index)))
        marks = self._marks.get(self._session.turns[index].parent, ((0, 0),))
        table = np.array([mark for mark in marks if mark[0] < length] + [(length, prompt_tokens)])
        return min(int(np.interp(known, table[:, 0], table[:, 1])), prompt_tokens - 1)

    def answered(self, index: int, prompt_tokens: int, answer: Answer) -> None:
        """An answer with reasoning counts as sent up to the prompt's end only: templates drop what the model
        thought, and with it what stands behind.
        """
        prompt = self.prompt(index)
        reply = _Message("assistant", answer.text, answer.tokens, answer.reasoning)
        self._after[index] = (*prompt, reply)
        self._marks[index] = (0, 0), (len(_written(prompt)), prompt_tokens)
        if not answer.reasoning:
            whole = _written(self._after[index])
            self._seen.add(whole)
            self._marks[index] += ((len(whole), prompt_tokens + answer.tokens),)


def encoded(body: dict[str, Any]) -> bytes:
    """A request's body as JSON."""
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def _known(seen: PrefixTree, data: bytes) -> int:
    known = seen.longest(data)
    seen.add(data)
    return known


def _written(messages: tuple[_Message, ...]) -> bytes:
    return "".join(f"\0{message.role}\0{message.text}" for message in messages).encode()


def _cut(messages: tuple[_Message, ...], tokens: int) -> tuple[_Message, ...]:
    """The first `tokens` tokens of a conversation, by the planned lengths; a message that is cut becomes the
    user's.
    """
    kept = []
    for message in messages:
        if message.tokens <= tokens:
            kept.append(message)
            tokens -= message.tokens
            continue
        said = message.text.split(" ")
        share = len(said) * tokens // message.tokens
        if share:
            kept.append(_Message("user", " ".join(said[:share]), tokens))
        break
    if len(kept) > 1 and kept[-1].role == "user" and kept[-2].role == "user":
        first, second = kept[-2:]
        kept[-2:] = [_Message("user", f"{first.text} {second.text}", first.tokens + second.tokens)]
    return tuple(kept)
