"""How the work of attention is cut must not show in its result, nor may a host bound that is looser than
need be.
"""

import random

import pytest
import torch

from quickturn_kernels import numerics, platform, triton_common
from quickturn_kernels.numerics.attention import Shape, attention_case

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not platform.interpreter_works(), reason="needs Triton's interpreter"
)


@pytest.mark.parametrize("workers", [1, 2, 5, 40])
def test_decode_with_any_number_of_workers(
    workers: int, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_common, "INTERPRETED_UNITS", workers)
    draw = random.Random(seed + workers)
    contexts = [draw.choice((0, 1, 63, 64, 65, draw.randrange(1, 400))) for _ in range(draw.randrange(1, 5))]
    shape = Shape(
        f"contexts {contexts}, {workers} multiprocessors",
        contexts,
        heads=6,
        block_tokens=draw.choice((16, 32, 64, 128)),
        window=draw.choice((0, 0, 90)),
        sinks=draw.random() < 0.5,
        dtype=torch.float32,
    )
    numerics.check(attention_case("paged_attention_decode", shape), "triton", seed, device)


@pytest.mark.parametrize("units", [1, 8, 60])
def test_prefill_with_any_number_of_splits(
    units: int, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_common, "INTERPRETED_UNITS", units)
    draw = random.Random(seed + units)
    contexts = [draw.randrange(1, 700) for _ in range(draw.randrange(1, 4))]
    contexts[0] = 1500
    shape = Shape(
        f"contexts {contexts}, {units} multiprocessors",
        contexts,
        [min(context, draw.randrange(0, 40)) for context in contexts],
        block_tokens=draw.choice((16, 32, 64, 128)),
        window=draw.choice((0, 0, 1100)),
        sinks=draw.random() < 0.5,
        padding=draw.randrange(3),
        dtype=torch.float32,
    )
    numerics.check(attention_case("paged_attention_prefill", shape), "triton", seed, device)
