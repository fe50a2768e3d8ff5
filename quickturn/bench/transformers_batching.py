"""The closed loop of `throughput` on the continuous batching of Hugging Face `transformers`, on the same
requests.
"""

import time
from pathlib import Path
from typing import Any

import torch

from quickturn.bench.throughput import Ask, Throughput, Turn, summary
from quickturn.bench.transformers_peer import load

WARM_ANSWER = 8
"""Tokens of the answers before the clock starts."""

PATIENCE = 1.0
"""Seconds between looks at whether the manager still runs."""


class BatchingPeer:
    """A `transformers` causal language model; greedy."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, *, random: bool) -> None:
        """Load the model; `random` draws the weights instead of reading them from `path`."""
        from transformers import GenerationConfig, __version__

        settings: Any = GenerationConfig
        self.name = f"transformers {__version__}, continuous batching"
        self.attention = ""
        self._device = device
        self._model = load(path, dtype, device, random=random)
        self._model.generation_config = settings(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def measure(self, asks: list[Ask], users: int) -> Throughput:
        """Run `asks`, `users` at a time. The manager is made for this load, its graphs are recorded and a
        short run is over before the clock starts. Raises RuntimeError if it gives up.
        """
        vocab_size = self._model.config.vocab_size
        warm = [Ask((ask.prompt + 1) % vocab_size, WARM_ANSWER) for ask in asks[:users]]
        with self._model.continuous_batching_context_manager(
            continuous_batching_config=_settings(users, self._device),
            workload_hints=_hints(asks, users),
            timeout=5,
        ) as manager:
            _run(manager, warm, users)
            turns = _run(manager, asks, users)
        self.attention = str(self._model.config._attn_implementation)
        return summary(turns, users)


def _settings(users: int, device: torch.device) -> Any:
    from transformers import ContinuousBatchingConfig

    # Blocks are shared only between requests that run together, which the engine does too.
    share = 0.05 if device.type == "cpu" else None
    return ContinuousBatchingConfig(max_requests_per_batch=users, max_memory_percent=share)


def _hints(asks: list[Ask], users: int) -> Any:
    from transformers.generation.continuous_batching.utils import WorkloadHints

    return WorkloadHints(
        max_prompt_length=max(len(ask.prompt) for ask in asks),
        max_generated_length=max(ask.answer for ask in asks),
        num_requests=users,
    )


def _run(manager: Any, asks: list[Ask], users: int) -> list[Turn]:
    waiting = iter(asks)
    running: dict[str, Turn] = {}
    turns: list[Turn] = []

    def send() -> None:
        ask = next(waiting, None)
        if ask is not None:
            turn = Turn(ask, time.perf_counter())
            id = manager.add_request(
                ask.prompt.tolist(), max_new_tokens=ask.answer, record_timestamps=True, eos_token_id=-1
            )
            running[id] = turn
            turns.append(turn)

    for _ in range(users):
        send()
    while running:
        result = manager.get_result(timeout=PATIENCE)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' continuous batching stopped; its own message stands above")
            continue
        if not result.is_finished():
            continue
        if result.error is not None:
            raise RuntimeError(f"transformers' continuous batching failed: {result.error}")
        turn = running.pop(result.request_id)
        turn.tokens = list(result.timestamps)
        send()
    return turns
