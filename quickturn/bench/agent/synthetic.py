"""Synthetic sessions of the shape that EvalScope's multi-turn SWE-smith load has.

A first turn of 50,000 tokens, 800 new tokens in every later one, 10 to 15 turns, answers of 500 tokens.
"""

from dataclasses import dataclass

import numpy as np

from quickturn.bench.agent.sessions import Piece, Session, Turn


@dataclass(frozen=True)
class Shape:
    """Tokens of the first prompt and of what each later turn adds to the conversation, turns from and to,
    tokens of an answer, seconds between turns; the first `shared` tokens are the same for all users.
    """

    first: int = 50_000
    grow: int = 800
    turns: tuple[int, int] = (10, 15)
    answer: int = 500
    think: float = 0.0
    shared: int = 0

    def __post_init__(self) -> None:
        """Refuse shapes that can't be made."""
        if min(self.first, self.grow, self.answer, self.turns[0]) < 1 or self.turns[1] < self.turns[0]:
            raise ValueError(f"a shape's lengths and turns must be at least 1 and in order, got {self}")
        if not 0 <= self.shared < self.first:
            raise ValueError(f"shared must be less than the first prompt, {self.first} tokens")


def sessions(shape: Shape, count: int, seed: int = 0) -> list[Session]:
    """`count` sessions; the same `seed` gives the same sessions, another one shares no text with them."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        name = f"synthetic{seed}-{number}"
        head = [Piece(f"synthetic{seed}/shared", shape.shared)] if shape.shared else []
        turns = [Turn(-1, 0, (*head, Piece(f"{name}/0", shape.first - shape.shared)), shape.answer)]
        for index in range(1, int(rng.integers(shape.turns[0], shape.turns[1] + 1))):
            keep = turns[-1].prompt + turns[-1].answer
            fresh = (Piece(f"{name}/{index}", shape.grow),)
            turns.append(Turn(index - 1, keep, fresh, shape.answer, shape.think))
        made.append(Session(name, tuple(turns)))
    return made
