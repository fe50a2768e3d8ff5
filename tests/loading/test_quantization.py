"""Matrices kept in fewer bits: files quantised alike lose nothing, and what can't be is refused."""

import numpy as np
import pytest
import quickturn_kernels
import torch

from quickturn.config import EngineConfig
from quickturn.engine.llm import LLM
from quickturn.loading.load import load_model
from quickturn.sampling_params import SamplingParams

CPU = torch.device("cpu")


def _can_quantize() -> bool:
    try:
        quickturn_kernels.prepare_linear(torch.zeros(32, 32), quantize="int4")
    except LookupError:
        return False
    return True


@pytest.mark.skipif(not _can_quantize(), reason="this processor has no kernel for quantised weights")
def test_a_quantised_file_keeps_its_numbers() -> None:
    """SmolLM2's matrices are Q4_1 and Q8_0; keeping them so moves logprobs by bfloat16's rounding only."""
    _, info = load_model(EngineConfig("embedded", dtype="bfloat16", quantization="stored"), CPU)
    assert info.weight_bytes < 110 << 20
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    first = []
    for quantization in ("none", "stored"):
        with LLM("embedded", dtype="bfloat16", quantization=quantization, memory=64 << 20) as llm:
            first.append(llm.chat(prompt, sampling)[0].logprobs[0])
    values = [dict(one.top) for one in first]
    shared = sorted(values[0].keys() & values[1].keys())
    assert len(shared) >= 15
    assert np.allclose([values[0][id] for id in shared], [values[1][id] for id in shared], atol=0.2)


def test_float32_and_quantised_weights_are_refused_together() -> None:
    with pytest.raises(ValueError, match="int8 computes in bfloat16"):
        load_model(EngineConfig("embedded", dtype="float32", quantization="int8"), CPU)
