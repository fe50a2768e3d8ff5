"""The request fields that every generating endpoint shares, and what they mean for the engine."""

from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request

from quickturn.sampling_params import Constraint, SamplingParams
from quickturn.server.errors import ApiError, invalid, not_supported
from quickturn.server.generation import Routing
from quickturn.text.tokenizer import Tokenizer

TENANT = "quickturn.tenant"
"""Where the gate leaves the name of a request's API key in its scope."""

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_TOKEN_LIST = 1024
MAX_RETENTION_S = 24 * 3600.0
_SEED_MASK = (1 << 63) - 1


class StreamOptions(msgspec.Struct):
    """`stream_options` of a streaming request."""

    include_usage: bool | None = None


class CommonFields(msgspec.Struct, kw_only=True):
    """Fields by their OpenAI names, then the extensions that vLLM made common. Unknown ones are ignored."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_cache_key: str | None = None

    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    retention: float | None = None
    """Seconds for which the cache of this turn is worth keeping once it is over."""

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


def choice_count(fields: CommonFields) -> int:
    """`n`, checked."""
    count = 1 if fields.n is None else fields.n
    if not 1 <= count <= MAX_CHOICES:
        raise invalid("n", f"n must be between 1 and {MAX_CHOICES}, got {count}")
    return count


def sampling_params(
    fields: CommonFields,
    tokenizer: Tokenizer,
    vocab_size: int,
    max_tokens: int,
    logprobs: int | None,
    constraint: Constraint | None = None,
) -> SamplingParams:
    """The engine's view of `fields`, with the model's own defaults where the client says nothing.

    `max_tokens` is already clamped to the context. Raises ApiError naming the field that is out of range.
    """
    defaults = tokenizer.sampling_defaults
    ends = () if fields.ignore_eos else tokenizer.eos_ids
    top_k = _first(fields.top_k, defaults.get("top_k"), 0)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=float(_first(fields.temperature, defaults.get("temperature"), 1.0)),
            top_k=0 if top_k == -1 or top_k >= vocab_size else int(top_k),
            top_p=float(_first(fields.top_p, defaults.get("top_p"), 1.0)),
            min_p=float(_first(fields.min_p, defaults.get("min_p"), 0.0)),
            seed=_seed(fields.seed),
            presence_penalty=_first(fields.presence_penalty, None, 0.0),
            frequency_penalty=_first(fields.frequency_penalty, None, 0.0),
            repetition_penalty=float(
                _first(fields.repetition_penalty, defaults.get("repetition_penalty"), 1.0)
            ),
            logit_bias=_logit_bias(fields.logit_bias, vocab_size),
            logprobs=logprobs,
            stop=_stop_strings(fields.stop),
            stop_token_ids=tuple(dict.fromkeys((*ends, *_stop_ids(fields.stop_token_ids, vocab_size)))),
            include_stop_str=bool(fields.include_stop_str_in_output),
            ignore_eos=bool(fields.ignore_eos),
            min_tokens=_first(fields.min_tokens, None, 0),
            constraint=constraint,
        )
    except ValueError as error:
        raise invalid(str(error).split(" ", 1)[0], str(error)) from error


def tenant_of(request: Request) -> str:
    """Whose request it is: a name for its API key; '' where the server asks for none."""
    return str(request.scope.get(TENANT, ""))


def routing_of(fields: CommonFields, tenant: str) -> Routing:
    """What the scheduler and the cache are told about a request of `tenant`: nobody reuses what another
    computed, since a hit would tell that the other sent the same. Raises ApiError naming the wrong field.
    """
    if not -(1 << 31) <= (fields.priority or 0) < 1 << 31:
        raise invalid("priority", f"priority must fit 32 bits, got {fields.priority}")
    retention = fields.retention or 0.0
    if not 0.0 <= retention <= MAX_RETENTION_S:
        raise invalid("retention", f"retention must be 0 to {MAX_RETENTION_S:.0f} seconds, got {retention}")
    session, salt = fields.prompt_cache_key or "", fields.cache_salt or ""
    if tenant:
        session, salt = f"{tenant}/{session}" if session else "", f"{tenant}/{salt}"
    return Routing(session, salt, fields.priority or 0, retention)


def check_top_logprobs(count: int | None) -> None:
    """Raise ApiError for more alternatives a token than are kept."""
    if not 0 <= (count or 0) <= 20:
        raise invalid("top_logprobs", f"top_logprobs must be between 0 and 20, got {count}")


def check_prompt_logprobs(count: int | None, stream: bool) -> None:
    """Raise ApiError for more alternatives a token than are kept, and in streams, which have no place for
    them.
    """
    if not 0 <= (count or 0) <= 20:
        raise invalid("prompt_logprobs", f"prompt_logprobs must be between 0 and 20, got {count}")
    if stream and count is not None:
        raise not_supported("prompt_logprobs", "prompt_logprobs can't be streamed: ask for it without stream")


def checked_ids(ids: list[Any], place: str, vocab_size: int) -> list[int]:
    """Token ids that a client sent. Raises ApiError naming the one that isn't in the vocabulary."""
    for index, value in enumerate(ids):
        if type(value) is not int or not 0 <= value < vocab_size:
            here = f"{place}[{index}]"
            raise invalid(here, f"{here} must be a token id from 0 to {vocab_size - 1}, got {value!r}")
    return ids


def clamp_max_tokens(
    asked: int | None, param: str, prompt_tokens: int, prompt_param: str, max_context: int
) -> int:
    """How many tokens the answer may have: what was asked for in `param`, at most what the context has left.

    Raises ApiError `context_length_exceeded` when the prompt alone fills the context.
    """
    if asked is not None and asked < 1:
        raise invalid(param, f"{param} must be at least 1, got {asked}")
    left = max_context - prompt_tokens
    if left < 1:
        raise ApiError(
            400,
            f"This model's maximum context length is {max_context} tokens, but the prompt has "
            f"{prompt_tokens} tokens. Shorten the prompt so that at least one token is left for the answer.",
            param=prompt_param,
            code="context_length_exceeded",
        )
    return left if asked is None else min(asked, left)


def seeds(sampling: SamplingParams, count: int) -> tuple[SamplingParams, ...]:
    """`count` variants of `sampling` that differ in their seed, if it has one, so that choices differ
    reproducibly. One of them scores the prompt for all."""
    first = sampling.seed
    others = replace(sampling, prompt_logprobs=None)
    return (
        sampling,
        *(
            others if first is None else replace(others, seed=(first + index) & _SEED_MASK)
            for index in range(1, count)
        ),
    )


def check_refused(refused: dict[str, Any], harmless: dict[str, tuple[Any, ...]], why: dict[str, str]) -> None:
    """Raise for the first field of `refused` whose value asks for something (isn't None, empty, or
    harmless)."""
    for name, value in refused.items():
        if value is None or value in ([], {}, False) or value in harmless.get(name, ()):
            continue
        raise ApiError(
            400, why.get(name, f"{name} is not supported"), param=name, code="unsupported_parameter"
        )


def _first(given: Any, default: Any, otherwise: Any) -> Any:
    if given is not None:
        return given
    return otherwise if default is None else default


def _seed(seed: int | None) -> int | None:
    if seed is not None and not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"seed must fit 64 bits, got {seed}")
    return None if seed is None else seed & _SEED_MASK


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    if bias and len(bias) > MAX_TOKEN_LIST:
        raise ValueError(f"logit_bias must hold at most {MAX_TOKEN_LIST} tokens, got {len(bias)}")
    result = {}
    for key, value in (bias or {}).items():
        if not key.isdecimal() or len(key) > 9 or int(key) >= vocab_size:
            raise ValueError(f"logit_bias must have token ids below {vocab_size} as keys, got {key[:20]!r}")
        if not -100.0 <= value <= 100.0:
            raise ValueError(f"logit_bias must be between -100 and 100, got {value} for token {key}")
        result[int(key)] = value
    return result


def _stop_ids(ids: list[int] | None, vocab_size: int) -> list[int]:
    if ids and len(ids) > MAX_TOKEN_LIST:
        raise ValueError(f"stop_token_ids must hold at most {MAX_TOKEN_LIST} ids, got {len(ids)}")
    for value in ids or ():
        if not 0 <= value < vocab_size:
            raise ValueError(f"stop_token_ids must be token ids from 0 to {vocab_size - 1}, got {value}")
    return ids or []


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise ValueError(f"stop must hold at most {MAX_STOPS} strings, got {len(stops)}")
    if any(not text or len(text) > MAX_STOP_LENGTH for text in stops):
        raise ValueError(f"stop must hold non-empty strings of at most {MAX_STOP_LENGTH} characters")
    return stops
