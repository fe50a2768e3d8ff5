"""Texts cut into runs that are encoded by themselves, and whose ids joined are those of the whole.

Two kinds of places are safe. A tokenizer takes its added tokens out of a text before all else and treats what
is between them piece by piece, so a run may begin with any of them that doesn't reach to its left. And the
patterns of byte-level vocabularies never join a line break with a letter behind it, so a long text may be cut
there. What is encoded in runs can be encoded on several cores, and what was encoded once need not be again.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import tokenizers
import tokenizers.models

from quickturn.text.gguf_tokenizer import CUTS

LONG = 16 << 10
"""Characters from which on a text is cut at line breaks."""

BEHIND, PLAIN = 1, 2
"""Bits of a run's `kind`: other tokens come before it; none of its text is a control token."""

_LINE = re.compile(r"[!-~]\n(?=[A-Za-z])")
_PATTERNS = frozenset(cut.pattern for cut in CUTS.values() if cut.pattern is not None)


class Run(NamedTuple):
    """A text of one `kind`, and where it starts in the whole (in characters)."""

    start: int
    kind: int
    text: str


class Cutter:
    """Knows where one tokenizer's texts may be cut."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Reads the added tokens and the pre-tokenizer, once."""
        added = [token for token in backend.get_added_tokens_decoder().values() if token.content]
        raw = sorted((token.content for token in added if not token.normalized), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, raw)) or r"(?!)")
        self._begins_run = frozenset(
            token.content
            for token in added
            if not token.lstrip and not token.single_word and not token.content[0].isspace()
        )
        reach_left = any(token.lstrip or "\n" in token.content for token in added)
        self._at_lines = not reach_left and _parts_lines(backend)

    def runs(self, text: str, kind: int = 0, start: int = 0) -> Iterator[Run]:
        """The runs of `text`, which stands at `start` of the whole. `kind` says what comes before the first
        of them, and whether control tokens are none here.
        """
        at = 0
        for found in () if kind & PLAIN else self._added.finditer(text):
            if found[0] not in self._begins_run:
                continue
            if found.start() > at:
                yield from self._lines(text[at : found.start()], kind, start + at)
            at, kind = found.start(), 0
        if at < len(text):
            yield from self._lines(text[at:], kind, start + at)

    def _lines(self, text: str, kind: int, start: int) -> Iterator[Run]:
        at = 0
        while self._at_lines and len(text) - at > LONG:
            found = _LINE.search(text, at + LONG)
            if found is None:
                break
            yield Run(start + at, kind, text[at : found.end()])
            at, kind = found.end(), kind & ~BEHIND
        yield Run(start + at, kind, text[at:] if at else text)


def _parts_lines(backend: tokenizers.Tokenizer) -> bool:
    """Whether no token holds a line break and the letter behind it, nor depends on both."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE) or model.dropout:
        return False
    if _state(backend.normalizer).get("type", "NFC") != "NFC":
        return False
    whole = _state(backend.pre_tokenizer)
    steps = whole.get("pretokenizers", []) if whole.get("type") == "Sequence" else [whole]
    return any(map(_parts_words, steps)) and all(
        _parts_words(step)
        or step.get("type") == "Digits"
        or (step.get("type") == "ByteLevel" and not step.get("add_prefix_space"))
        for step in steps
    )


def _parts_words(step: dict[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return bool(step.get("use_regex")) and not step.get("add_prefix_space")
    pattern = step.get("pattern")
    return (
        step.get("type") == "Split"
        and isinstance(pattern, dict)
        and pattern.get("Regex") in _PATTERNS
        and step.get("behavior") == "Isolated"
        and not step.get("invert")
    )


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as its JSON has it; empty for none."""
    if part is None:
        return {}
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state
