"""Placements: legal from end to end, and true: ranks that hold what they declare compute the dense model."""

import copy
import re
import tokenize
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged import PagedCache, PagedRequest
from quickturn_kernels import LinearWeight, prepare_linear
from tiny import OPTIONS
from transformers import PreTrainedModel

import quickturn
from quickturn.cache.views import AnyCache, LayerCache, LayerState
from quickturn.layers.forward import ForwardBatch
from quickturn.loading.parameters import read
from quickturn.loading.source import take
from quickturn.models.base import Model, build
from quickturn.parallel.placement import (
    Partial,
    Placement,
    PlacementError,
    Replicate,
    Shard,
    Step,
    conversion,
    conversions,
)
from quickturn.parallel.weights import Cut, WeightSpec

PLACEMENTS: list[Placement] = [Replicate(), Partial(), Shard(0), Shard(-1)]


def place(whole: torch.Tensor, placement: Placement, rank: int, ranks: int) -> torch.Tensor:
    match placement:
        case Replicate():
            return whole
        case Partial():
            return whole if rank == 0 else torch.zeros_like(whole)
        case Shard(dim):
            return whole.chunk(ranks, dim)[rank]


def gather(parts: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    match placement:
        case Replicate():
            return parts[0]
        case Partial():
            return torch.stack(parts).sum(0)
        case Shard(dim):
            return torch.cat(parts, dim)


class StateDict:
    """A model's own tensors as a checkpoint."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tensors: dict[str, torch.Tensor] = model.state_dict()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def stored_bits(self, name: str) -> None:
        return None

    def read_into(self, name: str, out: torch.Tensor, cut: Cut | None = None) -> None:
        tensor = self.tensors[name]
        out.copy_((tensor if cut is None else take(tensor, cut)).reshape(out.shape))


def shard_weight(whole: torch.Tensor, spec: WeightSpec, rank: int, ranks: int) -> torch.Tensor:
    """Each segment by itself, as WeightSpec says; a stack's matrices one below the other."""
    if spec.stack:
        flat = shard_weight(whole.flatten(0, 1), replace(spec, stack=0), rank, ranks)
        return flat.unflatten(0, (spec.stack, -1))
    if spec.placement != Shard(0):
        return place(whole, spec.placement, rank, ranks).contiguous()
    for segment in spec.segments:
        assert segment.rows % (segment.unit * ranks) == 0
    segments = whole.split([segment.rows for segment in spec.segments])
    return torch.cat([place(segment, Shard(0), rank, ranks) for segment in segments])


def run_on_ranks(models: list[Model], batches: list[ForwardBatch]) -> torch.Tensor:
    """All ranks step by step; between steps data moves the dearest way: made whole, then placed."""
    ranks = len(models)
    xs = [batch.token_ids for batch in batches]
    residuals = xs
    for steps in zip(*(model.steps for model in models), strict=True):
        xs = [
            step.run(x, residual, batch)
            for step, x, residual, batch in zip(steps, xs, residuals, batches, strict=True)
        ]
        index = models[0].steps.index(steps[0])
        if steps[0].residual == "begin":
            residuals = xs
            xs = [x.clone() for x in xs]
        whole = gather(xs, steps[0].produces)
        if index + 1 == len(models[0].steps):
            return whole
        wanted = models[0].steps[index + 1].consumes
        xs = [place(whole, wanted, rank, ranks).clone() for rank in range(ranks)]
    raise AssertionError("no steps")


RANKED = ["llama-biases", "llama-tied", "qwen2", "qwen3-biases-tied"]
MIXED = ["qwen3-next", "qwen3-next-dense", "qwen3.5", "qwen3.5-moe", "qwen3-moe", "gemma3", "gpt-oss"]


@pytest.mark.parametrize("option", RANKED + MIXED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_compute_the_dense_model(
    option: str, ranks: int, pair: Callable[[str], tuple[PreTrainedModel, Model]]
) -> None:
    reference, dense = pair(option)
    source, cpu = StateDict(reference), torch.device("cpu")
    models = []
    for rank in range(ranks):
        parameters: dict[str, torch.Tensor | LinearWeight] = {}
        for spec in dense.architecture.weights():
            part = shard_weight(read(spec, source, torch.float32, cpu), spec, rank, ranks)
            parameters[spec.name] = prepare_linear(part) if spec.use == "linear" else part
        models.append(build(dense.architecture, parameters, 64, cpu))
    ids = torch.randint(3, 190, (17,), generator=torch.Generator().manual_seed(3)).tolist()
    cache = PagedCache(dense, num_blocks=8, block_tokens=4, seed=1)
    batch = cache.batch([(PagedRequest(), ids)])
    batches = []
    for _ in range(ranks):
        batches.append(replace(batch, caches=tuple(share(layer, ranks) for layer in batch.caches)))
    logits = run_on_ranks(models, batches)
    tolerance = 4e-3 if dense.architecture.recurrent() else 2e-4
    torch.testing.assert_close(logits, dense.forward(batch), atol=tolerance, rtol=tolerance)


def share(cache: AnyCache, ranks: int) -> AnyCache:
    """A rank's own cache, with its share of the heads."""
    if isinstance(cache, LayerState):
        recurrent, conv = (
            torch.zeros(x.shape[0], x.shape[1] // ranks, *x.shape[2:]) for x in (cache.recurrent, cache.conv)
        )
        return LayerState(cache.group, recurrent, conv)
    blocks, tokens, heads, dim = cache.k.shape
    k, v = (torch.zeros(blocks, tokens, heads // ranks, dim) for _ in range(2))
    return LayerCache(cache.group, k, v)


@pytest.mark.parametrize("option", OPTIONS)
def test_placements_chain(option: str, pair: Callable[[str], tuple[PreTrainedModel, Model]]) -> None:
    """One layer moves data twice: after attention and after the feed-forward."""
    _, model = pair(option)
    moves = conversions(model.steps)
    layers = len(model.architecture.layers)
    assert moves.count("all_reduce") == 2 * layers
    assert set(moves) == {"none", "all_reduce"}
    assert len({step.name for step in model.steps}) == len(model.steps)


def test_conversions_are_what_they_say() -> None:
    """Every pair of placements: either refused, or the collective's name fits what moves."""
    known = {
        (Replicate, Replicate): "none", (Partial, Partial): "none", (Replicate, Shard): "slice",
        (Partial, Replicate): "all_reduce", (Partial, Shard): "reduce_scatter",
        (Shard, Replicate): "all_gather",
    }  # fmt: skip
    for have in PLACEMENTS:
        for want in PLACEMENTS:
            if isinstance(have, Shard) and isinstance(want, Shard):
                assert conversion(have, want) == ("none" if have == want else "all_to_all")
            elif (type(have), type(want)) in known:
                assert conversion(have, want) == known[type(have), type(want)]
            else:
                with pytest.raises(PlacementError):
                    conversion(have, want)


def test_an_illegal_pair_names_both_steps(pair: Callable[[str], tuple[PreTrainedModel, Model]]) -> None:
    _, model = pair("llama")
    steps: list[Step] = [copy.copy(step) for step in model.steps]
    steps[3] = replace(steps[3], consumes=Partial())
    with pytest.raises(PlacementError, match=r"qkv_proj' is followed by step 'model.*\.attend'"):
        conversions(steps)


@pytest.mark.parametrize("package", ["models", "layers"])
def test_models_and_layers_know_no_ranks_and_no_hardware(package: str) -> None:
    """No collective, no mesh, no device name in what a model is made of."""
    words = re.compile(r"torch\.distributed|all_reduce|all_gather|world_size|local_rank|cuda|\.item\(|triton")
    for file in sorted((Path(quickturn.__file__).parent / package).glob("*.py")):
        code = "".join(token.string for token in tokens_of(file))
        assert not words.findall(code), file


def tokens_of(file: Path) -> list[tokenize.TokenInfo]:
    """The code of a file, without comments and docstrings."""
    with tokenize.open(file) as text:
        skipped = (tokenize.COMMENT, tokenize.STRING)
        return [token for token in tokenize.generate_tokens(text.readline) if token.type not in skipped]
