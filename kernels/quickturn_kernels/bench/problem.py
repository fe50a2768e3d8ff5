"""One thing to measure."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One call of one op. `build` makes inputs of its own and returns the call; bytes are read and written,
    each once.
    """

    op: str
    shape: str
    moved: int
    flops: int
    build: Callable[[], Callable[[], object]]
