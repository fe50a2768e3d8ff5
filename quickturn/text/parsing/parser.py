"""The parser of one running answer: tokens in, events out."""

import codecs
from array import array
from collections.abc import Sequence

from quickturn.text.parsing.alphabet import Alphabet
from quickturn.text.parsing.content import read_answer
from quickturn.text.parsing.events import ParsedEvent
from quickturn.text.parsing.formats import AnswerFormat, Parsing, ReasoningFormat
from quickturn.text.parsing.output import Output, long_id
from quickturn.text.parsing.reader import Reader
from quickturn.text.tokenizer import Tokenizer
from quickturn.text.tools import Tool
from quickturn.text.vocabulary import Vocabulary


class AnswerParser:
    """Turns the tokens of one answer into events.

    The law: the events joined (texts and arguments concatenated) are the same however the tokens were cut
    into pushes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: AnswerFormat,
        alphabet: Alphabet,
        *,
        tools: tuple[Tool, ...] = (),
        thinking: bool = False,
        skip_special: bool = True,
    ) -> None:
        """`tools`: those that the answer may call; without any, markup of calls is text. `thinking`: the
        prompt left the answer inside of thinking.
        """
        self._decoder = _MarkedDecoder(tokenizer.vocabulary, alphabet, skip_special)
        self._reader = Reader()
        tool_format = format.tools if tools else None
        self._out = Output(
            alphabet,
            tools,
            tool_format.new_id if tool_format else long_id,
            show_hidden=not skip_special,
            trim=bool(tools),
        )
        parsing = Parsing(self._reader, self._out, alphabet.spell)
        self._steps = (
            format.whole(parsing)
            if format.whole is not None
            else read_answer(parsing, tool_format, format.reasoning, thinking)
        )
        self._done = False

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._out.calls

    def push(self, tokens: Sequence[int]) -> list[ParsedEvent]:
        """The events that `tokens` complete."""
        text = self._decoder.push(tokens)
        if text and not self._reader.pass_on(text):
            self._reader.feed(text)
            self._advance()
        return self._out.collect()

    def finish(self, reason: str) -> list[ParsedEvent]:
        """The answer is over ('stop', 'length', ...): the events that were held back."""
        self._reader.feed(self._decoder.flush())
        self._reader.end(reason)
        self._advance()
        self._out.finish()
        return self._out.collect()

    def _advance(self) -> None:
        if self._done:
            self._reader.buffer = ""
            return
        try:
            next(self._steps)
        except StopIteration:
            self._done = True


def begins_thinking(
    prompt: Sequence[int], tokenizer: Tokenizer, reasoning: ReasoningFormat | None, alphabet: Alphabet
) -> bool:
    """Whether the prompt leaves the answer inside of thinking: its last thinking marker opens it."""
    if reasoning is None:
        return False
    if reasoning.starts_open:
        return True
    if reasoning.open in alphabet.chars and reasoning.close in alphabet.chars:
        by_char = {char: index for index, char in alphabet.ids.items()}
        packed = array("i", prompt).tobytes()
        opened, closed = (
            _last(packed, by_char[alphabet.chars[m]]) for m in (reasoning.open, reasoning.close)
        )
        return opened > closed
    tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special=False)
    return tail.rstrip().endswith(reasoning.open)


_TAIL_TOKENS = 64


def _last(packed: bytes, token: int) -> int:
    """Where the last `token` of packed ids stands, in bytes; -1 for nowhere."""
    wanted = array("i", (token,)).tobytes()
    at = packed.rfind(wanted)
    while at > 0 and at % len(wanted):
        at = packed.rfind(wanted, 0, at + len(wanted) - 1)
    return at


class _MarkedDecoder:
    """Tokens to the text that parsers read: control tokens as their characters."""

    def __init__(self, vocabulary: Vocabulary, alphabet: Alphabet, skip_special: bool) -> None:
        self._vocabulary = vocabulary
        self._marks = alphabet.ids
        self._skipped = vocabulary.special_ids if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._waits = False
        self._at_start = vocabulary.strip_first

    def push(self, tokens: Sequence[int]) -> str:
        if len(tokens) == 1 and not self._waits:
            token = tokens[0]
            if token not in self._marks and token not in self._skipped:
                text = self._vocabulary.whole_text(token)
                if text is not None:
                    return self._strip(text)
        parts: list[str] = []
        for token in tokens:
            mark = self._marks.get(token)
            if mark is not None:
                parts += (self.flush(), mark)
            elif token not in self._skipped:
                parts.append(self._utf8.decode(self._vocabulary.token_bytes(token)))
        self._waits = bool(self._utf8.getstate()[0])
        return self._strip("".join(parts))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)

    def _strip(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
