"""A dense decoder as one op computes what its steps do, and other models stay as they are."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from paged import PagedCache, PagedRequest
from transformers import PreTrainedModel

from quickturn.models.base import Model
from quickturn.parallel import fuse
from quickturn.parallel.fuse import FusedDecode, decoder_stack

DENSE = ["llama-biases", "llama-tied", "qwen2", "qwen3-biases-tied"]
Pair = Callable[[str], tuple[PreTrainedModel, Model]]


def with_fused(model: Model, rows: int) -> Model:
    """The model, its steps fused whatever the kernels of this machine prefer."""
    stack = decoder_stack([step.run for step in model.steps])
    assert stack is not None
    tail = len(model.steps) - 5
    return Model(model.architecture, model.steps, tail, FusedDecode(stack, rows))


@pytest.mark.parametrize("option", DENSE)
def test_the_fused_step_is_its_steps(option: str, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair(option)
    calls: list[int] = []
    original = fuse.decode_stack
    monkeypatch.setattr(fuse, "decode_stack", lambda *a, **k: calls.append(len(a[1])) or original(*a, **k))
    logits = []
    for one in (model, with_fused(model, 3)):
        cache = PagedCache(model, num_blocks=16, block_tokens=4, seed=1)
        requests = [PagedRequest() for _ in range(3)]
        found = [
            one.forward(cache.batch([(request, [7 + i] * (5 + 3 * i))])) for i, request in enumerate(requests)
        ]
        for token in (11, 12, 13):
            batch = cache.batch([(request, [token]) for request in requests], padding_rows=0)
            found.append(one.forward(replace(batch, sample_rows=None)))
        logits.append(torch.cat(found))
    assert torch.equal(*logits)
    assert calls == [3, 3, 3]


def test_only_few_sampled_decode_rows_are_taken(pair: Pair) -> None:
    _, model = pair("llama")
    fused = with_fused(model, 2)._fused
    assert fused is not None
    cache = PagedCache(model, num_blocks=16, block_tokens=4, seed=1)
    requests = [PagedRequest() for _ in range(3)]
    prompts = replace(cache.batch([(request, [5, 6]) for request in requests]), sample_rows=None)
    assert not fused.takes(prompts)
    assert not fused.takes(replace(cache.batch([(request, [7]) for request in requests]), sample_rows=None))
    two = cache.batch([(request, [8]) for request in requests[:2]])
    assert not fused.takes(two)
    assert fused.takes(replace(two, sample_rows=None))


def test_other_steps_are_left_alone(pair: Pair) -> None:
    _, model = pair("llama")
    runs = [step.run for step in model.steps]
    assert decoder_stack(runs) is not None
    assert decoder_stack(runs[:-1]) is None
    assert decoder_stack([*runs[:2], *runs[9:]]) is None
    assert decoder_stack([*runs[:8], runs[1], *runs[9:]]) is None
    attend = runs[3]
    for change in ({"softcap": 30.0}, {"window": 8}, {"gated": True}, {"eps": 0.5}, {"layer": 9}):
        assert decoder_stack([*runs[:3], replace(attend, **change), *runs[4:]]) is None, change  # type: ignore[type-var]
