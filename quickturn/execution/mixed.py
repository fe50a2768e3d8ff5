"""Which steps of decode rows beside a piece of one prompt are worth a graph, and which graph a step takes.

Run kernel by kernel such a step takes as long as the host takes to launch it, however few its tokens are:
longer than a user who is being answered may wait. A graph of it is made for so many decode rows and so many
tokens in all, and is filled up. Tokens are counted in all, because products work in tiles of rows.
"""

from collections.abc import Collection
from dataclasses import dataclass

DECODE_ROWS = (32, 8, 1, 16, 4, 2)
"""Numbers of decode rows, those first that serve most without the others."""
TOKENS = ((16, 64, 256), (512, 128, 32), (384, 192, 96, 48))
"""Numbers of tokens of a step: each of these groups makes what the ones before it pad less than half as
long. Beyond the last the device takes longer than the host."""
LEAST_PROMPT = 8
"""Tokens of the prompt that a recorded step has room for, at least."""


@dataclass(frozen=True, order=True)
class MixedSize:
    """Of a recorded step: tokens of all rows, and how many of those are decode rows."""

    tokens: int
    rows: int

    @property
    def prompt(self) -> int:
        """How many are the prompt's."""
        return self.tokens - self.rows


def mixed_sizes(max_requests: int, max_step_tokens: int) -> list[MixedSize]:
    """The steps worth a graph, those first whose graphs save most. One request is the prompt's."""
    most = max_requests - 1
    rows = dict.fromkeys(min(size, most) for size in DECODE_ROWS if most)
    sizes = [MixedSize(tokens, size) for some in TOKENS for tokens in some for size in rows]
    return [size for size in sizes if size.prompt >= LEAST_PROMPT and size.tokens <= max_step_tokens]


def mixed_size_for(sizes: Collection[MixedSize], rows: int, prompt: int) -> MixedSize | None:
    """The smallest of `sizes` that holds so many decode rows and tokens of a prompt; None: there is none."""
    return min((size for size in sizes if size.rows >= rows and size.prompt >= prompt), default=None)
