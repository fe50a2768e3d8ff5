"""Which tokens a constrained request may take next, step by step.

Thinking is free: the grammar holds from the first token behind it. A row's state advances by the tokens that
were accepted and can go back, so that drafts of several tokens may be tried.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quickturn.engine.closing import EVERY, HORIZON, SLACK, Ways
from quickturn.engine.grammar import GrammarPool
from quickturn.engine.messages import AddRequest, CheckConstraint, ConstraintChecked
from quickturn.sampling_params import Constraint

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher

ALL = -1
"""A bitmask word that allows its 32 tokens."""

SLOW_MASK_S = 0.2
"""A mask that takes longer makes every request of the batch wait."""


class ConstrainedRow:
    """The grammar state of one request."""

    def __init__(
        self, constraint: Constraint, compiled: "CompiledGrammar", ways: Ways | None = None, most: int = 0
    ) -> None:
        """The state before the first token. With `ways`, an answer of at most `most` tokens is brought to its
        end before they run out.
        """
        self._ways, self._most = ways, most
        self._way: list[int] = []
        self.cut = False
        """Whether it was brought to an end that the model hadn't in mind."""
        self._constraint = constraint
        self._compiled = compiled
        self._thinking = False
        self._restart()

    def accept(self, token: int) -> bool:
        """Advance by a token of the answer; False if the grammar doesn't allow it."""
        self._tokens.append(token)
        if self._way:
            self._way = self._way[1:] if self._way[0] == token else []
        if self._thinking:
            close = self._constraint.think_close
            if tuple(self._tokens[-len(close) :]) == close:
                self._thinking = False
            return True
        if self._opens_thinking(token):
            self._thinking = True
            return True
        if self._matcher.is_terminated():
            return False
        accepted = self._matcher.accept_token(token)
        self._matched += accepted
        return accepted

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        self._way = []
        if count <= self._matched and not self._thinking:
            if count:
                self._matcher.rollback(count)
                self._matched -= count
                del self._tokens[-count:]
            return
        kept = self._tokens[: len(self._tokens) - count]
        self._restart()
        for token in kept:
            self.accept(token)

    def fill(self, bitmask: torch.Tensor, row: int) -> bool:
        """Write the tokens that may come next to `bitmask[row]` (int32, 32 tokens a word, on the host);
        returns False when all may, the row being left as it was.
        """
        if self._thinking or self._matcher.is_terminated():
            return False
        if self._must_close():
            bitmask[row] = 0
            _allow(bitmask[row], self._way[0])
            return True
        if not self._matcher.fill_next_token_bitmask(bitmask, row):
            return False
        if not self._tokens and self._may_open():
            _allow(bitmask[row], self._constraint.think_open[0])
        return True

    def _must_close(self) -> bool:
        """Whether the next token is the first of the way out."""
        if self.cut and self._way:
            # A way is gone to its end: another look may begin another one.
            return True
        left = self._most - len(self._tokens)
        if self._ways is None or left > HORIZON or (left % EVERY and not self.cut):
            return False
        found = self._ways.out(self._matcher, left)
        if found is None:
            return False
        self.cut = self.cut or (bool(found) and len(found) + min(SLACK, self._most // 4) >= left)
        self._way = found or [self._ways.end]
        return self.cut

    @property
    def finished(self) -> bool:
        """Whether the grammar has seen its end."""
        return self._matcher.is_terminated()

    def _restart(self) -> None:
        import xgrammar

        self._matcher: GrammarMatcher = xgrammar.GrammarMatcher(self._compiled)
        self._matched = 0
        """Tokens that the matcher took."""
        self._tokens: list[int] = []
        self._thinking = self._constraint.thinking

    def _opens_thinking(self, token: int) -> bool:
        return len(self._tokens) == 1 and self._may_open() and token == self._constraint.think_open[0]

    def _may_open(self) -> bool:
        return bool(self._constraint.think_open) and not self._constraint.thinking


def _allow(words: torch.Tensor, token: int) -> None:
    """Set the bit of `token` in a row of int32 words."""
    word = int(words[token // 32]) | 1 << (token % 32)
    words[token // 32] = word - (1 << 32) if word >= 1 << 31 else word


def bitmask_words(vocab_size: int) -> int:
    """Words a row of a bitmask has."""
    return -(-vocab_size // 32)


class Waiting:
    """Requests whose grammar is being compiled, and questions whether a grammar can be."""

    def __init__(self, grammars: GrammarPool) -> None:
        self._grammars = grammars
        self._held: dict[int, AddRequest] = {}
        self._checks: list[CheckConstraint] = []

    def __bool__(self) -> bool:
        return bool(self._held or self._checks)

    def hold(self, request: AddRequest) -> None:
        """Keep a request until its grammar is decided."""
        self._held[request.id] = request

    def drop(self, id: int) -> None:
        """Forget a request that is no longer wanted."""
        self._held.pop(id, None)

    def check(self, request: CheckConstraint) -> None:
        """Take a question; `checked` answers it."""
        self._checks.append(request)

    def checked(self) -> list[ConstraintChecked]:
        """Answers to the questions that are decided."""
        answers, open_checks = [], []
        for request in self._checks:
            outcome = self._grammars.outcome(request.constraint)
            if outcome is None:
                open_checks.append(request)
            else:
                answers.append(ConstraintChecked(request.id, outcome if isinstance(outcome, str) else ""))
        self._checks = open_checks
        return answers

    def decided(self) -> list[AddRequest]:
        """The requests whose grammar is compiled or refused now; they are no longer held."""
        if not self._held:
            return []
        ready = [
            request
            for request in self._held.values()
            if request.sampling.constraint is None
            or self._grammars.outcome(request.sampling.constraint) is not None
        ]
        for request in ready:
            del self._held[request.id]
        return ready


class MaskTable:
    """The tokens that the sampled rows of a step may take, on the host."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        """Room for so many rows; allocated when first used."""
        self._shape = (rows, bitmask_words(vocab_size))
        self._words: torch.Tensor | None = None

    def fill(self, rows: Sequence[ConstrainedRow | None]) -> tuple[torch.Tensor | None, list[int]]:
        """int32 [S, words], or None if all tokens may come; and the rows whose grammar took long. What was
        filled before is overwritten.
        """
        if self._words is None:
            self._words = torch.empty(self._shape, dtype=torch.int32, pin_memory=torch.cuda.is_available())
        mask = self._words[: len(rows)]
        mask.fill_(ALL)
        restricts = False
        slow: list[int] = []
        for index, row in enumerate(rows):
            if row is None:
                continue
            began = time.perf_counter()
            restricts |= row.fill(mask, index)
            if time.perf_counter() - began > SLOW_MASK_S:
                slow.append(index)
        return mask if restricts else None, slow
