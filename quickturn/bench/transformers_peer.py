"""The same figures from Hugging Face `transformers`, for the comparison in one run."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from quickturn.bench.offline import DECODE_PROMPT, DecodeFigure, PrefillFigure, Spread, spread


class TransformersPeer:
    """A `transformers` causal language model on the CPU or GPU; greedy `generate` with its own cache."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        """Load a directory of safetensors or a `.gguf` file."""
        started = time.perf_counter()
        self._model = load(path, dtype, device)
        self.start_seconds = time.perf_counter() - started
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def prefill(self, length: int, repeats: int) -> PrefillFigure:
        """One prompt to the logits of its last token."""
        speeds = []
        for _ in range(repeats + 1):
            ids = self._prompts(1, length)
            started = time.perf_counter()
            int(self._model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
            speeds.append(length / (time.perf_counter() - started))
        return PrefillFigure(length, spread(speeds[1:]))

    @torch.inference_mode()
    def decode(self, batch: int, steps: int, repeats: int) -> DecodeFigure:
        """`generate` of `steps` tokens after a short prompt, less the time of generating one."""
        speeds, step_ms = [], []
        for _ in range(repeats):
            ids = self._prompts(batch, DECODE_PROMPT)
            seconds = self._generate(ids, steps + 1) - self._generate(ids, 1)
            speeds.append(batch * steps / seconds)
            step_ms.append(seconds / steps * 1e3)
        return DecodeFigure(batch, spread(speeds), spread(step_ms), Spread(0.0, 0.0, 0.0))

    def _generate(self, ids: torch.Tensor, count: int) -> float:
        started = time.perf_counter()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - started

    def _prompts(self, rows: int, length: int) -> torch.Tensor:
        vocab = self._model.config.vocab_size
        return torch.randint(0, vocab, (rows, length), generator=self._generator).to(self._device)


def load(path: Path, dtype: torch.dtype, device: torch.device, *, random: bool = False) -> Any:
    """The model of a directory of safetensors or a `.gguf` file; `random`: of a directory's config alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    if random:
        with device:
            return auto.from_config(AutoConfig.from_pretrained(path), dtype=dtype).eval()
    options: dict[str, Any] = {}
    if path.suffix == ".gguf":
        options = {"gguf_file": path.name} | _dense()
    return auto.from_pretrained(path.parent if options else path, dtype=dtype, **options).to(device).eval()


def _dense() -> dict[str, Any]:
    """Options that give plain matrices of the dtype asked for: kept in GGUF blocks, as newer versions of
    transformers do by themselves, they compute in float32 and decode at a third of the speed.
    """
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def run(
    peer: TransformersPeer,
    *,
    prefill: list[int],
    decode: list[int],
    steps: int,
    repeats: int,
    log: Callable[[str], None],
) -> dict[str, object]:
    """All measurements of the peer, in the shape of the engine's own results."""
    from transformers import __version__

    prefills = [peer.prefill(length, repeats) for length in prefill]
    decodes = [peer.decode(batch, steps, repeats) for batch in decode]
    for one in prefills:
        log(f"transformers prefill {one.prompt_tokens:>6}: {one.tokens_per_second.median:9.1f} tokens/s")
    for each in decodes:
        log(f"transformers decode batch {each.batch:>3}: {each.tokens_per_second.median:7.1f} tokens/s")
    return {
        "name": f"transformers {__version__}",
        "start_seconds": peer.start_seconds,
        "prefill": [asdict(figure) for figure in prefills],
        "decode": [asdict(figure) for figure in decodes],
    }
