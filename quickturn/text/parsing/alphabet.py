"""Control tokens as single characters, so that markup and data that looks like it can't be confused.

A parser reads text in which each control token stands as one lone surrogate (U+DC00 and up). Decoded UTF-8
never holds one, so a marker that is a token of its own is found by its id, and the same characters spelled by
other tokens, as in a quoted file, are plain text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from quickturn.text.tokenizer import Tokenizer

_FIRST, _COUNT = 0xDC00, 0x400


@dataclass(frozen=True)
class Alphabet:
    """`chars`: the character of each control token by its text; `ids`: the same by its id."""

    chars: Mapping[str, str] = field(default_factory=dict)
    ids: Mapping[int, str] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    """Characters of special tokens: not shown where they mean nothing."""

    @staticmethod
    def of(tokenizer: Tokenizer, markers: frozenset[str]) -> "Alphabet":
        """The alphabet of a model whose markup is spelled with `markers` (token texts; those that aren't one
        token of the vocabulary stay text).
        """
        added = sorted(tokenizer.backend.get_added_tokens_decoder().items())
        used = [(index, token) for index, token in added if token.content in markers][:_COUNT]
        chars = {token.content: chr(_FIRST + place) for place, (_, token) in enumerate(used)}
        return Alphabet(
            chars=chars,
            ids={index: chars[token.content] for index, token in used},
            hidden=frozenset(chars[token.content] for _, token in used if token.special),
        )

    def spell(self, text: str) -> str:
        """`text` as a parser sees it when the model writes it as markup."""
        return self._tokens.sub(lambda found: self.chars[found[0]], text)

    def read(self, text: str, show_hidden: bool = False) -> str:
        """`text` of a parser as people read it; special tokens are dropped unless `show_hidden`."""
        return text if text.isascii() else text.translate(self._shown if show_hidden else self._visible)

    @cached_property
    def _tokens(self) -> re.Pattern[str]:
        longest_first = sorted(self.chars, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def _shown(self) -> dict[int, str]:
        return {ord(char): text for text, char in self.chars.items()}

    @cached_property
    def _visible(self) -> dict[int, str]:
        return {ord(char): "" if char in self.hidden else text for text, char in self.chars.items()}
