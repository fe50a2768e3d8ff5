"""Scores of a prompt, joined from the parts in which the engine sends them."""

import itertools
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from quickturn.engine.messages import PromptScores, TokenLogprobs

Number = TypeVar("Number", int, float)


@dataclass
class ScoredPrompt:
    """What is known of a prompt's tokens but the first: `logprobs` and `ranks` begin with the second."""

    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def add(self, scores: PromptScores) -> Sequence[TokenLogprobs]:
        """Take the next part; returns its log-probabilities."""
        values = _floats(scores.logprobs)
        tokens, tops = _integers(scores.top_tokens), _floats(scores.top_logprobs)
        count = len(tops) // len(values)
        new = [
            TokenLogprobs(value, list(zip(tokens[at : at + count], tops[at : at + count], strict=True)))
            for value, at in zip(values, itertools.count(step=count))
        ]
        self.logprobs += new
        self.ranks += _integers(scores.ranks)
        return new


def _floats(data: bytes) -> list[float]:
    return _swapped(array("f", data)).tolist()


def _integers(data: bytes) -> list[int]:
    return _swapped(array("i", data)).tolist()


def _swapped(numbers: "array[Number]") -> "array[Number]":
    """What travels little-endian, in this machine's order."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
