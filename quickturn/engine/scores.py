"""Scores of prompts, as they travel to the client."""

from collections.abc import Iterator

import numpy as np

from quickturn.engine.messages import PromptScores
from quickturn.execution.scoring import ScoredChunk

MAX_PIECE = 512
"""Prompt tokens of one message."""


def pieces(id: int, chunk: ScoredChunk, heard: int) -> Iterator[PromptScores]:
    """Messages about the tokens of a chunk from position `heard` on; a request that was retracted scores some
    of its tokens again.
    """
    end = chunk.start + len(chunk.logprobs)
    assert chunk.start <= heard, f"prompt tokens {heard} to {chunk.start} were never scored"
    for start in range(heard, end, MAX_PIECE):
        rows = slice(start - chunk.start, min(start + MAX_PIECE, end) - chunk.start)
        yield PromptScores(
            id,
            start,
            np.ascontiguousarray(chunk.logprobs[rows], dtype="<f4").tobytes(),
            np.ascontiguousarray(chunk.ranks[rows], dtype="<i4").tobytes(),
            np.ascontiguousarray(chunk.top_tokens[rows], dtype="<i4").tobytes(),
            np.ascontiguousarray(chunk.top_logprobs[rows], dtype="<f4").tobytes(),
        )
