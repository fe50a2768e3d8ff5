"""Writes answers as completion objects, whole or in chunks, with their prompts in front where they are
echoed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quickturn.engine.messages import TokenLogprobs
from quickturn.engine.prompt_scores import ScoredPrompt
from quickturn.server.generation import Generation, Piece
from quickturn.server.openai_objects import completion_logprobs, new_id, prompt_logprobs, usage_object
from quickturn.server.streaming import DONE, event_of
from quickturn.text.tokenizer import Tokenizer
from quickturn.text.vocabulary import TokenDecoder, Vocabulary


@dataclass(frozen=True)
class Asked:
    """What of an answer the client wants to see. `no_answer`: the prompt alone."""

    logprobs: bool
    prompt_logprobs: bool
    no_answer: bool
    wants_usage: bool
    skip_special: bool


class CompletionReply:
    """The answers of one generation."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        generation: Generation[str],
        model: str,
        asked: Asked,
        echoed: Sequence[str | None] | None,
    ) -> None:
        """`echoed`: the texts of the prompts that come in front of their answers, None for one that was given
        as tokens; None for no echo.
        """
        self._vocabulary = tokenizer.vocabulary
        self._generation = generation
        self._asked = asked
        self._head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        prompts = generation.prompts
        self._each = generation.choices // len(prompts)
        self._scored = [ScoredPrompt() for _ in prompts]
        self._shares: list[list[str]] | None = None
        if echoed is not None:
            self._shares = [
                shares(self._vocabulary, prompt.tokens, text)
                for prompt, text in zip(prompts, echoed, strict=True)
            ]
        self._places = [Places(self._vocabulary, asked.skip_special) for _ in range(generation.choices)]
        self._held: dict[int, list[Piece[str]]] = {index: [] for index in range(generation.choices)}

    async def whole(self) -> bytes:
        """The one JSON object of an answer that isn't streamed."""
        count = self._generation.choices
        collected: list[list[Piece[str]]] = [[] for _ in range(count)]

        def take(piece: Piece[str]) -> None:
            if piece.scores is None:
                collected[piece.index].append(piece)
            else:
                self._scored[piece.index // self._each].add(piece.scores)

        await self._generation.run(take)
        choices = [self._whole(index, collected[index]) for index in range(count)]
        return msgspec.json.encode({**self._head, "choices": choices, "usage": self._usage()})

    def begin(self) -> bytes:
        """The prompts that are echoed; where their log-probabilities belong beside, the first token of
        each.
        """
        if self._shares is None:
            return b""
        events = []
        for index in range(self._generation.choices):
            shares = self._shares[index // self._each]
            if self._asked.logprobs:
                events.append(self._echo(index, 0, [None]))
            else:
                events.append(self._event(self._choice(index, "".join(shares), None)))
        return b"".join(events)

    def more(self, piece: Piece[str]) -> bytes:
        """The piece's text, if there is news."""
        number = piece.index // self._each
        if piece.scores is not None:
            start = piece.scores.start
            new = self._scored[number].add(piece.scores)
            choices = range(number * self._each, (number + 1) * self._each)
            events = [self._echo(index, start, new) for index in choices]
            if not self._waits(number):
                events += [self._piece(held) for index in choices for held in self._held.pop(index)]
            return b"".join(events)
        if self._waits(number):
            self._held[piece.index].append(piece)
            return b""
        return self._piece(piece)

    def end(self) -> bytes:
        """Usage if asked for, and `[DONE]`."""
        if not self._asked.wants_usage:
            return DONE
        return event_of({**self._head, "choices": [], "usage": self._usage()}) + DONE

    def _waits(self, number: int) -> bool:
        """Whether the scores of a prompt, which come first, aren't complete: those of its first choice serve
        the others.
        """
        if self._shares is None or not self._asked.logprobs:
            return False
        return len(self._scored[number].logprobs) + 1 < len(self._shares[number])

    def _echo(self, index: int, start: int, entries: Sequence[TokenLogprobs | None]) -> bytes:
        """The event of some tokens of a choice's prompt."""
        assert self._shares is not None
        number = index // self._each
        stop = start + len(entries)
        shown = self._shares[number][start:stop]
        tokens = self._generation.prompts[number].tokens[start:stop]
        places = self._places[index].of_prompt(shown)
        logprobs = completion_logprobs(self._vocabulary, tokens, entries, places)
        return self._event(self._choice(index, "".join(shown), logprobs))

    def _piece(self, piece: Piece[str]) -> bytes:
        if not (piece.content or piece.logprobs or piece.finish):
            return b""
        if self._asked.no_answer:
            if not piece.finish:
                return b""
            return self._event(self._choice(piece.index, "", None, "length"))
        return self._event(
            self._choice(piece.index, piece.content, self._logprobs(piece), piece.finish or None)
        )

    def _whole(self, index: int, pieces: Sequence[Piece[str]]) -> dict[str, Any]:
        number = index // self._each
        prompt, scored = self._generation.prompts[number], self._scored[number]
        text, parts = "", []
        if self._shares is not None:
            text = "".join(self._shares[number])
            if self._asked.logprobs:
                places = self._places[index].of_prompt(self._shares[number])
                entries = [None, *scored.logprobs]
                parts.append(completion_logprobs(self._vocabulary, prompt.tokens, entries, places))
        finish = pieces[-1].finish if pieces else ""
        if self._asked.no_answer:
            finish = "length"
        else:
            text += "".join(piece.content for piece in pieces)
            parts += [part for piece in pieces if (part := self._logprobs(piece)) is not None]
        choice = self._choice(index, text, _joined(parts) if self._asked.logprobs else None, finish or None)
        if self._asked.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(
                self._vocabulary, prompt.tokens, scored.logprobs, scored.ranks
            )
        return choice

    def _logprobs(self, piece: Piece[str]) -> dict[str, Any] | None:
        if not self._asked.logprobs:
            return None
        places = self._places[piece.index].of_answer(piece.tokens)
        return completion_logprobs(self._vocabulary, piece.tokens, piece.logprobs, places)

    def _choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _event(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self._asked.wants_usage else {}
        return event_of({**self._head, "choices": [choice], **usage})

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        return usage_object(replace(usage, completion=0) if self._asked.no_answer else usage)


class Places:
    """Where the tokens of one choice begin in its text: a token that is a later part of a character begins
    where that does, one that isn't shown where the next one does.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special: bool) -> None:
        self._decoder = TokenDecoder(vocabulary, skip_special)
        self._at = 0

    def of_prompt(self, shares: Sequence[str]) -> list[int]:
        """Of the next tokens of the prompt, which add so much text each."""
        return [self._go_on(len(share)) for share in shares]

    def of_answer(self, tokens: Sequence[int]) -> list[int]:
        """Of the next tokens of the answer."""
        return [self._go_on(len(self._decoder.push((token,)))) for token in tokens]

    def _go_on(self, length: int) -> int:
        at = self._at
        self._at += length
        return at


def shares(vocabulary: Vocabulary, tokens: Sequence[int], text: str | None) -> list[str]:
    """What each token adds to the prompt's text: joined, they are `text`, if the prompt was given as such."""
    decoder = TokenDecoder(vocabulary, skip_special=False)
    each = [decoder.push((token,)) for token in tokens]
    each[-1] += decoder.flush()
    joined = "".join(each)
    if text is None or text == joined:
        return each
    if not joined.endswith(text):
        # The tokenizer wrote it in another way. Nobody can say which token is which part of it.
        return [text, *[""] * (len(each) - 1)]
    # In front is what the model wants there, and the client didn't write.
    extra = len(joined) - len(text)
    for index, share in enumerate(each):
        each[index] = share[extra:]
        extra = max(0, extra - len(share))
    return each


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for part in parts for value in part[name]] for name in names}
