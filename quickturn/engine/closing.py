"""How JSON that is half written comes to its end, in few tokens.

An answer that runs out of tokens in the middle of a string is no JSON. When few are left, the grammar's own
masks show a way out: close what is open, and of what has to be written yet take the shortest.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from xgrammar import GrammarMatcher, TokenizerInfo

HORIZON = 256
"""Tokens before the last one from which the way out is watched."""

EVERY = 2
"""Tokens between two looks at it."""

SLACK = 64
"""Tokens by which the way out may grow between two looks, as when an object is opened that must have much; no
more than a quarter of the answer.
"""

_CLOSERS = tuple(b'}]",:0n-[{tf')
"""Single characters in the order in which they are taken: ends first, then what is shortest to end."""

_QUOTE = ord('"')
_IN_TEXT = tuple(b"qzQ")
"""Where one of these may come, text is being written, and a bracket would be text, too."""

_MARKS = tuple(b"@.+-/: Z_09aAbB")
"""What may be missing in a text of a pattern or a format, each tried once before another is tried again."""


class Ways:
    """What all answers over one vocabulary share: the tokens that close, and how long tokens are."""

    def __init__(self, info: "TokenizerInfo") -> None:
        """Reads the vocabulary once."""
        words: Sequence[bytes] = info.decoded_vocab
        singles = {word[0]: index for index, word in reversed(list(enumerate(words))) if len(word) == 1}
        self._closers, self._in_text, self._marks = (
            [singles[byte] for byte in which if byte in singles] for which in (_CLOSERS, _IN_TEXT, _MARKS)
        )
        self._quote, self._zero = singles.get(_QUOTE, 0), singles.get(ord("0"), 0)
        self._ends = list(info.stop_token_ids)
        self.end = self._ends[0]
        """A token that ends an answer."""
        self._lengths: NDArray[np.int64] = np.array([len(word) for word in words], dtype=np.int64)
        self._mask = torch.empty((1, -(-len(words) // 32)), dtype=torch.int32)

    def out(self, matcher: "GrammarMatcher", most: int) -> list[int] | None:
        """Tokens that lead from the matcher's state to where the answer may end, fewer than `most`; None if
        no such way was found. The matcher is left as it was.
        """
        way: list[int] = []
        try:
            while len(way) < most:
                token = self._next(matcher, way)
                if token is None:
                    return way
                if not matcher.accept_token(token):
                    return None
                way.append(token)
            return None
        finally:
            if way:
                matcher.rollback(len(way))

    def _next(self, matcher: "GrammarMatcher", way: Sequence[int]) -> int | None:
        """The token to take behind `way`; None where the answer may end."""
        self._mask.fill_(-1)
        matcher.fill_next_token_bitmask(self._mask, 0)
        words: NDArray[np.int32] = self._mask[0].numpy()

        def allowed(token: int) -> bool:
            return bool(words[token // 32] >> (token % 32) & 1)

        if any(allowed(token) for token in self._ends):
            return None
        if any(allowed(token) for token in self._in_text):
            if allowed(self._quote):
                return self._quote
        else:
            for token in self._closers:
                # Digits may go on for ever where something else has to come.
                if allowed(token) and not (token == self._zero and way and way[-1] == token):
                    return token
        marks = [token for token in self._marks if allowed(token)]
        if len(marks) > 1:
            recent = list(way[-len(self._marks) :])
            return min(marks, key=recent.count)
        # What is left is mostly a text that has to be written: the longest token is furthest along.
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(self._lengths)]
        return int((self._lengths * bits).argmax())
