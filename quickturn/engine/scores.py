"""Scores of prompts, as they travel to the client."""

from collections.abc import Iterator, Mapping

import numpy as np
import quickturn_control as control
from numpy.typing import NDArray

from quickturn.engine.live import LiveRequest
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


def scored_tokens(
    plan: control.StepPlan, slot_request: NDArray[np.int64], live: Mapping[int, LiveRequest]
) -> int:
    """How many tokens of prompts a plan scores. `slot_request`: whose each slot is before the plan's own
    changes.
    """
    if all(one.sampling.prompt_logprobs is None for one in live.values()):
        return 0
    request_of = slot_request.copy()
    request_of[plan.admitted.slots] = plan.admitted.ids
    rows = zip(
        request_of[plan.slots].tolist(), plan.query_lens.tolist(), plan.context_lens.tolist(), strict=True
    )
    return sum(
        # The last token of a prompt says what the answer begins with.
        max(0, min(length, live[id].prompt_len - 1 - context))
        for id, length, context in rows
        if live[id].sampling.prompt_logprobs is not None
    )
