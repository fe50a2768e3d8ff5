"""How one request wants its tokens chosen and when it wants to end."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Constraint:
    """What an answer has to look like.

    `source` is the JSON of an xgrammar structural tag, which JSON schemas, regular expressions and EBNF
    grammars are wrapped in. It holds behind the model's thinking: `thinking` says that the prompt leaves the
    answer inside of it, the token ids of `think_close` end it, and one token of `think_open` may begin it
    where the answer begins. `closes`: JSON that would be cut by `max_tokens` is brought to an end before.
    """

    source: str
    think_open: tuple[int, ...] = ()
    think_close: tuple[int, ...] = ()
    thinking: bool = False
    closes: bool = False


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 switch the filter off. `seed` None
    takes a fresh random seed; with a seed, the tokens depend on the request alone, never on its neighbours.
    `logprobs` is the number of alternatives reported per token (None: no logprobs at all, 0: the chosen
    token only), `prompt_logprobs` the same for the tokens of the prompt.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        """Refuse values outside their range; the message starts with the field's name."""
        tops = {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        checks: tuple[tuple[str, bool, str], ...] = (
            *((name, top is None or 0 <= top <= 20, "between 0 and 20") for name, top in tops.items()),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "above 0 and at most 100"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens"),
        )
        for name, good, rule in checks:
            if not good:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")
        if self.constraint is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise ValueError(f"{name} can't be combined with a grammar, which says itself where to end")
