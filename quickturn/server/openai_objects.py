"""Pieces of OpenAI objects that more than one endpoint answers with."""

import uuid
from collections.abc import Sequence
from typing import Any

from quickturn.engine.messages import TokenLogprobs
from quickturn.server.generation import Usage
from quickturn.text.vocabulary import Vocabulary


def new_id(prefix: str) -> str:
    """A fresh id, such as `chatcmpl-...`."""
    return f"{prefix}-{uuid.uuid4().hex}"


def usage_object(usage: Usage) -> dict[str, Any]:
    """The `usage` object, cached tokens included."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def chat_logprobs(
    vocabulary: Vocabulary, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any]]:
    """The entries of a chat choice's `logprobs.content`."""
    return [
        {
            **_token_logprob(vocabulary, token, entry.logprob),
            "top_logprobs": [_token_logprob(vocabulary, other, value) for other, value in entry.top],
        }
        for token, entry in zip(tokens, logprobs, strict=False)
    ]


def completion_logprobs(
    vocabulary: Vocabulary,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """The `logprobs` object of a completion choice; `offsets` are where the tokens begin in its text. A
    prompt's first token has no logprob.
    """
    return {
        "tokens": [vocabulary.token_text(token) for token in tokens],
        "token_logprobs": [entry and _finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [
            entry and _top_logprobs(vocabulary, token, entry)
            for token, entry in zip(tokens, logprobs, strict=True)
        ],
        "text_offset": list(offsets),
    }


def _top_logprobs(vocabulary: Vocabulary, token: int, entry: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens, and the chosen one if it isn't among them. Of several that look alike (parts of
    characters) the likeliest counts.
    """
    found: dict[str, float] = {}
    for other, value in (*entry.top, (token, entry.logprob)):
        found.setdefault(vocabulary.token_text(other), _finite(value))
    return found


def prompt_logprobs(
    vocabulary: Vocabulary,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    ranks: Sequence[int],
) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` list of vLLM's APIs: for each token of a prompt but the first, which has null,
    the likeliest tokens and itself by their ids; `logprobs` and `ranks` begin with the second token.
    """

    def entry(token: int, value: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(value), "rank": rank, "decoded_token": vocabulary.token_text(token)}

    return [
        None,
        *(
            {
                str(token): entry(token, own.logprob, rank),
                **{
                    str(other): entry(other, value, place)
                    for place, (other, value) in enumerate(own.top, 1)
                    if other != token
                },
            }
            for token, own, rank in zip(tokens[1:], logprobs, ranks, strict=True)
        ),
    ]


def _finite(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI uses this value for tokens that can't be drawn."""
    return max(logprob, -9999.0)


def _token_logprob(vocabulary: Vocabulary, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": vocabulary.token_text(token),
        "logprob": _finite(logprob),
        "bytes": list(vocabulary.token_bytes(token)),
    }
