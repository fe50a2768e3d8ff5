"""What each token id stands for, in bytes.

Tokens are joined as bytes and only then read as UTF-8, one token at a time. So the text of a sequence can't
depend on how it was cut into pieces: decoding everything at once and decoding token by token are the same
computation.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from quickturn.text.byte_alphabet import spelled_bytes

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Vocabulary:
    """Bytes of token ids, found on first use.

    `byte_level`: GPT-2's alphabet, else SentencePiece's (U+2581 for a space, `<0x0A>` for a byte).
    `strip_first`: the answer's first space was put there by the tokenizer and is dropped.
    """

    backend: tokenizers.Tokenizer
    byte_level: bool
    strip_first: bool
    special_ids: frozenset[int]
    _known: dict[int, bytes] = field(default_factory=dict)
    _whole: dict[int, str | None] = field(default_factory=dict)

    @staticmethod
    def of(backend: tokenizers.Tokenizer) -> "Vocabulary":
        """Read the kind of vocabulary from the tokenizer's decoder. Raises ValueError for a kind that isn't
        known."""
        steps = _decoder_steps(backend)
        kinds = {step["type"] for step in steps}
        byte_level = "ByteLevel" in kinds
        if not byte_level and not kinds & {"ByteFallback", "Metaspace", "Replace"}:
            raise ValueError(f"tokenizers that decode by {sorted(kinds) or 'nothing'} are not supported")
        strip_first = any(
            (step["type"] == "Strip" and step.get("start", 0) > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        added = backend.get_added_tokens_decoder().items()
        special = frozenset(index for index, token in added if token.special)
        return Vocabulary(backend, byte_level, strip_first and not byte_level, special)

    def token_bytes(self, index: int) -> bytes:
        """The bytes of one token; none for an id that the vocabulary lacks (padding rows of the output
        layer)."""
        found = self._known.get(index)
        if found is None:
            token = self.backend.id_to_token(index)
            found = b"" if token is None else self._spell(token)
            self._known[index] = found
        return found

    def token_text(self, index: int) -> str:
        """One token as text by itself, for log probabilities; bytes that are no UTF-8 become U+FFFD."""
        return self.token_bytes(index).decode("utf-8", "replace")

    def whole_text(self, index: int) -> str | None:
        """The token's text if its bytes are whole characters, as nearly all are: None if they only are with
        other tokens'.
        """
        try:
            return self._whole[index]
        except KeyError:
            try:
                text = self.token_bytes(index).decode("utf-8")
            except UnicodeDecodeError:
                text = None
            self._whole[index] = text
            return text

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of a whole sequence."""
        decoder = TokenDecoder(self, skip_special)
        return decoder.push(list(ids)) + decoder.flush()

    def _spell(self, token: str) -> bytes:
        if self.byte_level:
            return spelled_bytes(token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode("utf-8")


class TokenDecoder:
    """Turns the tokens of one answer into text as they come; a character cut between tokens waits for its
    rest."""

    def __init__(self, vocabulary: Vocabulary, skip_special: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._waits = False
        self._at_start = vocabulary.strip_first

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        if len(ids) == 1 and not self._waits and ids[0] not in self._skipped:
            text = self._vocabulary.whole_text(ids[0])
            if text is not None:
                return self._strip(text)
        spelled = [self._vocabulary.token_bytes(index) for index in ids if index not in self._skipped]
        text = self._utf8.decode(b"".join(spelled))
        self._waits = bool(self._utf8.getstate()[0])
        return self._strip(text)

    def flush(self) -> str:
        """The end: a character that never became whole is U+FFFD."""
        return self._strip(self._utf8.decode(b"", True))

    def _strip(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps
