"""What a session asks, as lengths: how each turn grows out of an earlier one, and by what.

A turn's prompt is the first `keep` tokens of the conversation after its `parent` turn (prompt and answer),
then `new` pieces. A piece is a name and a length: equal names are equal text, in every session.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Piece:
    """`tokens` tokens of the text that `key` names."""

    key: str
    tokens: int


@dataclass(frozen=True)
class Turn:
    """One request: `parent` is the index of an earlier turn or -1; `think` are the seconds between the answer
    before and this request.
    """

    parent: int
    keep: int
    new: tuple[Piece, ...]
    answer: int
    think: float = 0.0

    @property
    def prompt(self) -> int:
        """Tokens of the prompt, where every answer has the length that was asked for."""
        return self.keep + sum(piece.tokens for piece in self.new)


@dataclass(frozen=True)
class Session:
    """Turns of one user, in order."""

    name: str
    turns: tuple[Turn, ...]


def scaled(session: Session, prompt: float, answer: float) -> Session:
    """The session with other lengths; what is shared stays shared, and every length is at least 1.

    Pieces are cut at rounded positions of the prompt, so that many small ones don't add up to another length.
    """
    turns: list[Turn] = []
    for turn in session.turns:
        old = session.turns[turn.parent] if turn.parent >= 0 else None
        grown = turns[turn.parent] if turn.parent >= 0 else None
        if old is None or grown is None:
            keep = 0
        elif turn.keep >= old.prompt:
            keep = grown.prompt + round((turn.keep - old.prompt) / max(1, old.answer) * _length(old, answer))
        else:
            keep = min(grown.prompt, round(turn.keep * prompt))
        turns.append(
            replace(turn, keep=keep, new=_scaled_pieces(turn.new, prompt), answer=_length(turn, answer))
        )
    return replace(session, turns=tuple(turns))


def limited(session: Session, turns: int | None = None, context: int | None = None) -> Session:
    """The first `turns` turns, as far as prompt and answer fit into `context` tokens."""
    kept = list(session.turns[:turns])
    if context is not None:
        for index, turn in enumerate(kept):
            if turn.prompt + turn.answer > context:
                kept = kept[:index]
                break
    return replace(session, turns=tuple(kept))


def prepared(
    sessions: Iterable[Session],
    *,
    scale: float = 1.0,
    answer_scale: float = 1.0,
    turns: int | None = None,
    context: int | None = None,
) -> list[Session]:
    """Scaled and limited sessions, those without a turn left out. Raises ValueError if none is left."""
    if scale <= 0 or answer_scale <= 0:
        raise ValueError(f"scales must be above 0, got {scale} and {answer_scale}")
    made = [limited(scaled(session, scale, answer_scale), turns, context) for session in sessions]
    left = [session for session in made if session.turns]
    if not left:
        raise ValueError(
            f"no session has a first turn within {context} tokens: scale it down, or allow a longer context"
        )
    return left


def salted(session: Session, salt: str) -> Session:
    """The same session with other text: it shares nothing with what doesn't have this salt."""
    turns = tuple(
        replace(turn, new=tuple(replace(piece, key=f"{salt}:{piece.key}") for piece in turn.new))
        for turn in session.turns
    )
    return replace(session, turns=turns)


def repeated(sessions: Sequence[Session], count: int) -> list[Session]:
    """`count` sessions; beyond the first round each is a user of its own, who shares nothing with others."""
    made = []
    for index in range(count):
        session, again = sessions[index % len(sessions)], index // len(sessions)
        if again:
            session = replace(salted(session, str(again)), name=f"{session.name}#{again}")
        made.append(session)
    return made


def _length(turn: Turn, scale: float) -> int:
    return max(1, round(turn.answer * scale))


def _scaled_pieces(pieces: tuple[Piece, ...], scale: float) -> tuple[Piece, ...]:
    made, at, end = [], 0, 0
    for index, piece in enumerate(pieces):
        end += piece.tokens
        upto = max(1, round(end * scale)) if index == len(pieces) - 1 else round(end * scale)
        if upto > at:
            made.append(Piece(piece.key, upto - at))
            at = upto
    return tuple(made)
