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
    vocabulary: Vocabulary, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int
) -> dict[str, Any]:
    """The `logprobs` object of a completion choice; `offset` is where the first token's text starts."""
    texts = [vocabulary.token_text(token) for token in tokens[: len(logprobs)]]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [
            {vocabulary.token_text(other): value for other, value in entry.top} or None for entry in logprobs
        ],
        "text_offset": offsets,
    }


def _token_logprob(vocabulary: Vocabulary, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": vocabulary.token_text(token),
        # JSON has no minus infinity; OpenAI uses this value for tokens that can't be drawn.
        "logprob": max(logprob, -9999.0),
        "bytes": list(vocabulary.token_bytes(token)),
    }
