"""Drive an `EngineCore` by hand and compare it with transformers."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from quickturn_kernels.ops.sampling.noise import gumbel
from routers import decided_logits
from tiny import TINY
from transformers import PreTrainedModel

from quickturn.config import EngineConfig
from quickturn.engine.core import EngineCore
from quickturn.engine.messages import AddRequest, TokenOutput
from quickturn.sampling_params import SamplingParams

MAX_STEPS = 100_000

TIE = 1e-4
"""Logits of size 10 in float32 whose sums were added up in another order differ by less."""
RECURRENT_TIE = 1e-2
"""The same where a recurrence passes rounding on: transformers' own two ways differ by more than 1e-3."""


@dataclass
class Answer:
    """Everything the engine said of one request."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    cached_tokens: int = -1
    error: str = ""
    outputs: list[TokenOutput] = field(default_factory=list)


class Driver:
    """Adds requests to a core and collects their answers."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.answers: dict[int, Answer] = {}

    def add(
        self,
        prompt: list[int],
        *,
        salt: str = "",
        session: str = "",
        boundaries: tuple[int, ...] = (),
        priority: int = 0,
        **sampling: object,
    ) -> int:
        """Add a greedy request (unless `sampling` says otherwise) and return its id."""
        id = len(self.answers) + 1
        options: dict[str, object] = {"temperature": 0.0, "ignore_eos": True} | sampling
        self.answers[id] = Answer()
        self.core.add(
            AddRequest(
                id=id,
                tokens=np.array(prompt, dtype=np.int32).tobytes(),
                sampling=SamplingParams(**options),  # type: ignore[arg-type]
                arrival=time.monotonic(),
                cache_salt=salt,
                session=session,
                boundaries=boundaries,
                priority=priority,
            )
        )
        return id

    def step(self) -> None:
        for output in self.core.step().outputs:
            answer = self.answers[output.id]
            assert not answer.finish, f"request {output.id} got {output} after its end"
            answer.tokens += output.tokens
            answer.finish = output.finish
            answer.error = output.error
            answer.outputs.append(output)
            if output.cached_tokens >= 0:
                answer.cached_tokens = output.cached_tokens

    def drain(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError("the engine never finished")

    def run(self, prompt: list[int], **options: object) -> Answer:
        """One request alone, to its end."""
        id = self.add(prompt, **options)  # type: ignore[arg-type]
        self.drain()
        return self.answers[id]


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@dataclass(frozen=True)
class Checkpoint:
    """A saved random model, its transformers twin, and the device that engines on it take."""

    path: Path
    reference: PreTrainedModel
    device: str

    def driver(self, **options: object) -> Driver:
        """A fresh float32 engine on it; `options` override the configuration."""
        chosen: dict[str, object] = {
            "dtype": "float32",
            "device": self.device,
            "memory": 8 << 20,
            "block_tokens": 4,
            "max_requests": 8,
            "max_step_tokens": 64,
        } | options
        return Driver(EngineCore(EngineConfig(str(self.path), **chosen)))  # type: ignore[arg-type]


Checkpoints = Callable[[str], Checkpoint]


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens of transformers, with its own cache."""
    ids = torch.tensor([prompt])
    cache = None
    tokens: list[int] = []
    for _ in range(count):
        out = model(ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        tokens.append(int(out.logits[0, -1].argmax()))
        ids = torch.tensor([[tokens[-1]]])
    return tokens


@torch.inference_mode()
def assert_greedy(model: PreTrainedModel, prompt: list[int], tokens: list[int], count: int) -> None:
    """`tokens` are `count` greedy tokens of `model`: each has the largest logit behind the ones before it.

    Random weights draw level once in some ten thousand tokens: a token within `TIE` of the largest logit is
    right, too.
    """
    assert_all_greedy(model, [prompt], [tokens], count)


@torch.inference_mode()
def assert_all_greedy(
    model: PreTrainedModel, prompts: list[list[int]], answers: list[list[int]], count: int
) -> None:
    """`assert_greedy` of several, whose prompts are of one length."""
    tie = RECURRENT_TIE if "linear_attention" in (getattr(model.config, "layer_types", None) or ()) else TIE
    assert {len(tokens) for tokens in answers} == {count}
    whole = [prompt + tokens for prompt, tokens in zip(prompts, answers, strict=True)]
    if not count:
        return
    start = len(prompts[0]) - 1
    for first in range(0, len(whole), 64):
        ids = torch.tensor(whole[first : first + 64])
        logits, decided = (found[:, start:-1] for found in decided_logits(model, ids))
        behind = decided * (logits.max(-1).values - logits.gather(2, ids[:, start + 1 :, None])[..., 0])
        row, token = divmod(int(behind.argmax()), count)
        worst = behind[row, token]
        assert worst <= tie, f"token {token} of answer {first + row} is {worst} behind the best"


def assert_same_or_level(model: PreTrainedModel, prompt: list[int], one: list[int], other: list[int]) -> None:
    """Two greedy answers to a prompt are equal, or part where two tokens are level: computed beside other
    rows, logits differ in their last bits.
    """
    assert len(one) == len(other)
    if one != other:
        assert_all_greedy(model, [prompt, prompt], [one, other], len(one))


def penalised(
    logits: torch.Tensor,
    prompt: list[int],
    answer: list[int],
    presence: float,
    frequency: float,
    repeat: float,
) -> torch.Tensor:
    """The logits [V] behind `answer` after the penalties, by their formula."""
    logits = logits.clone()
    for token in set(prompt + answer):
        logits[token] = logits[token] / repeat if logits[token] > 0 else logits[token] * repeat
    for token in set(answer):
        logits[token] -= presence + frequency * answer.count(token)
    return logits


@torch.inference_mode()
def assert_drawn(
    model: PreTrainedModel,
    prompt: list[int],
    tokens: list[int],
    *,
    seed: int,
    temperature: float,
    presence: float = 0.0,
    repeat: float = 1.0,
) -> None:
    """`tokens` are the draws of this seed from `model`: each has the largest logit / temperature + noise
    behind the ones before it, or one within `TIE` of it.
    """
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    positions = torch.arange(len(prompt), len(prompt) + len(tokens))
    noise = gumbel(torch.full_like(positions, seed), positions, logits.shape[1])
    for i, token in enumerate(tokens):
        scores = penalised(logits[i], prompt, tokens[:i], presence, 0.0, repeat) / temperature + noise[i]
        behind = float(scores.max() - scores[token])
        assert behind <= TIE / min(1.0, temperature), f"token {i} is {token}, {behind} behind the best"


def random_prompts(
    rng: np.random.Generator, lengths: list[int], vocab: int = TINY["vocab_size"]
) -> list[list[int]]:
    """One prompt of random ids for each length."""
    return [rng.integers(3, vocab, length).tolist() for length in lengths]
