"""Two ranks on a tiny checkpoint, driven by hand."""

from pathlib import Path

import numpy as np
import torch
from driving import Checkpoint, Driver, assert_drawn, assert_greedy, random_prompts
from tiny import random_checkpoint

from quickturn.config import EngineConfig
from quickturn.engine.leader import Leader

BROKEN = 7
"""A token whose embedding is NaN. It is never the likeliest, but may be drawn."""
SECONDS = 300.0
"""Longest wait for another rank."""


def broken_checkpoint(path: Path) -> Checkpoint:
    """What engines load has the broken token, the reference that they are compared with hasn't."""
    reference = random_checkpoint("llama", {})
    with torch.no_grad():
        reference.lm_head.weight[BROKEN] = 0.0
    saved = {name: value.clone() for name, value in reference.state_dict().items()}
    saved["model.embed_tokens.weight"][BROKEN] = float("nan")
    reference.save_pretrained(path, state_dict=saved)
    return Checkpoint(path, reference, "cpu")


def config(checkpoint: Checkpoint, **options: object) -> EngineConfig:
    chosen: dict[str, object] = {
        "dtype": "float32",
        "device": "cpu",
        "memory": 1 << 20,
        "block_tokens": 4,
        "max_requests": 8,
        "max_step_tokens": 32,
        "rank_timeout": SECONDS,
    } | options
    return EngineConfig(str(checkpoint.path), **chosen)  # type: ignore[arg-type]


def driver_of(leader: Leader) -> Driver:
    return Driver(leader)  # type: ignore[arg-type]


def ranks_of(leader: Leader) -> list[int]:
    return [member.process.pid for member in leader._crew.members if member.process is not None]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def prompts_of(rng: np.random.Generator, lengths: list[int]) -> list[list[int]]:
    """Random prompts without the broken token."""
    return [[token if token != BROKEN else 8 for token in one] for one in random_prompts(rng, lengths)]


def sound_part(tokens: list[int]) -> list[int]:
    """Up to the broken token, which may be drawn, too."""
    return tokens[: tokens.index(BROKEN) + 1] if BROKEN in tokens else tokens


def check(checkpoint: Checkpoint, prompt: list[int], tokens: list[int], seed: int | None) -> None:
    """Each token is the likeliest, or the one that the seed draws."""
    tokens = sound_part(tokens)
    if seed is None:
        assert_greedy(checkpoint.reference, prompt, tokens, len(tokens))
    else:
        assert_drawn(checkpoint.reference, prompt, tokens, seed=seed, temperature=0.8)


def arrive(
    driver: Driver, rng: np.random.Generator, prompts: list[list[int]], most: int
) -> list[tuple[int, list[int], int | None]]:
    """The prompts one after the other, some with a seed, with up to `most` steps between them; all run to
    their end. Returns ids, prompts and seeds.
    """
    added = []
    for index, prompt in enumerate(prompts):
        seed = index if index % 3 == 0 else None
        options = {} if seed is None else {"temperature": 0.8, "seed": seed}
        id = driver.add(prompt, max_tokens=int(rng.integers(1, 20)), **options)
        added.append((id, prompt, seed))
        for _ in range(int(rng.integers(0, most + 1))):
            if driver.core.has_work():
                driver.step()
    driver.drain()
    return added
