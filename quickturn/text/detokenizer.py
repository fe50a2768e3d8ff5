"""The text side of one running answer: tokens in, text and the reason of its end out."""

from collections.abc import Sequence
from typing import NamedTuple

from quickturn.sampling_params import SamplingParams
from quickturn.text.stop import StopStrings
from quickturn.text.tokenizer import Tokenizer
from quickturn.text.vocabulary import TokenDecoder


class NewText(NamedTuple):
    """Newly visible text; how many of the pushed tokens count; why the answer ended ('' while it runs).

    `stopped_here` says that a stop string ended it on this side, so that the engine still has to be told.
    """

    text: str
    tokens: int
    finish: str = ""
    stopped_here: bool = False

    @property
    def content(self) -> str:
        """The text, by the name that news of every kind have."""
        return self.text


class Detokenizer:
    """Incremental detokenisation with stop strings.

    The law: the texts of all deltas joined are the same however the tokens were cut into pushes. A stop
    string therefore ends the answer at the token that completes it, even when more tokens came in the same
    push.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, skip_special: bool = True) -> None:
        self._decoder = TokenDecoder(tokenizer.vocabulary, skip_special)
        self._stop = StopStrings(sampling.stop, sampling.include_stop_str)
        self._one_by_one = bool(sampling.stop)
        self._stop_ids = (
            frozenset(sampling.stop_token_ids) if not sampling.include_stop_str else frozenset[int]()
        )

    def push(self, tokens: Sequence[int], finish: str = "") -> NewText:
        """Text of the next `tokens`; with `finish` ('stop', 'length', ...) they are the last and held-back
        text comes out.

        A stop token that ended the answer is not shown unless stop strings are, too.
        """
        shown = tokens[:-1] if finish == "stop" and tokens and tokens[-1] in self._stop_ids else tokens
        if not self._one_by_one:
            text = self._decoder.push(shown)
            return NewText(text + self._decoder.flush() if finish else text, len(tokens), finish)
        parts: list[str] = []
        for count, token in enumerate(shown, 1):
            parts.append(self._stop.push(self._decoder.push((token,))))
            if self._stop.found is not None:
                return NewText("".join(parts), count, "stop", stopped_here=not finish)
        if finish:
            parts.append(self._stop.push(self._decoder.flush()))
            parts.append(self._stop.flush())
        return NewText("".join(parts), len(tokens), finish)
