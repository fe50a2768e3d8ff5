"""Decode steps of few rows with norms and additions inside the products: the same logits, and only for the
batches that they are for.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import quickturn_kernels as kernels
import torch
from paged import PagedCache, PagedRequest
from quickturn_kernels.registry import unregister
from transformers import PreTrainedModel

from quickturn.layers.linear import GatedLinear, GeluGatedLinear, Head, Linear
from quickturn.layers.norm import AddNorm, Norm
from quickturn.models.base import Model, tail_of
from quickturn.parallel.few_rows import FewRows, fuse_few_rows, fused_runs
from quickturn.parallel.placement import Run

Pair = Callable[[str], tuple[PreTrainedModel, Model]]

QUERIES = ("norm_linear_rows", "linear_add_rows", "residual_moe_rows")
OPTIONS = [
    "llama-biases",
    "llama-tied",
    "qwen2-window",
    "qwen3-biases-tied",
    "qwen3-moe",
    "qwen3-moe-mixed",
    "qwen3-next-dense",
    "qwen3.5",
    "qwen3.5-moe",
    "gemma3-softcap",
    "gpt-oss",
]


@contextmanager
def faster(rows: int, *queries: str) -> Iterator[None]:
    """As if kernels were faster up to `rows` rows, for what these queries ask about; for nothing else."""
    for query in QUERIES:
        answer = rows if query in queries else 0
        kernels.register(query, name="as if")(lambda *weights, answer=answer: answer)
    try:
        with kernels.use(**dict.fromkeys(QUERIES, "as if")):
            yield
    finally:
        for query in QUERIES:
            unregister(query, "as if")


def fused(model: Model, rows: int, *queries: str) -> tuple[Model, FewRows]:
    """The model with what these kernels would be used for up to so many rows."""
    with faster(rows, *queries):
        few = fuse_few_rows(model.steps)
    assert few is not None
    assert list(few.runs) == list(range(1, rows + 1))
    tail = tail_of(model.architecture.declarations())
    return Model(model.architecture, model.steps, tail, few), few


def decoded(model: Model, steps: int = 4) -> tuple[torch.Tensor, Counter[tuple[str, str]]]:
    """Logits of three prompts and of some decode steps of them, one of which has a row of padding; and the
    calls of the last step.
    """
    cache = PagedCache(model, num_blocks=16, block_tokens=4, seed=1)
    requests = [PagedRequest() for _ in range(3)]
    found = [
        model.forward(cache.batch([(request, [7 + i] * (5 + 3 * i))])) for i, request in enumerate(requests)
    ]
    with kernels.counted() as calls:
        for token in range(11, 11 + steps):
            calls.clear()
            work = [(request, [token + i]) for i, request in enumerate(requests)]
            batch = replace(cache.batch(work, padding_rows=int(token == 12)), sample_rows=None)
            found.append(model.forward(batch)[:3])
    return torch.cat(found), +calls


@pytest.mark.parametrize("queries", [QUERIES, QUERIES[:2], QUERIES[:1]], ids=" ".join)
@pytest.mark.parametrize("option", OPTIONS)
def test_the_fused_step_is_its_steps(option: str, queries: tuple[str, ...], pair: Pair) -> None:
    _, model = pair(option)
    one, _ = fused(model, 8, *queries)
    want, plain = decoded(model)
    got, calls = decoded(one)
    assert torch.equal(got, want)
    folded = {"norm_linear", "norm_linear_silu_and_mul", "linear_add", "residual_moe_block"}
    assert not folded & {op for op, _ in plain}
    assert folded & {op for op, _ in calls}


def counts(model: Model, *queries: str) -> dict[str, int]:
    """Calls of a decode step, by op, of norms and what has them inside."""
    with kernels.use(linear="reference"):
        _, calls = decoded(fused(model, 8, *queries)[0])
    found: Counter[str] = Counter()
    for (op, _), count in calls.items():
        found[op] += count
    folded = {op: found[op] for op in ("norm_linear", "norm_linear_silu_and_mul", "linear_add")}
    return {op: count for op, count in folded.items() if count} | {
        op: found[op] for op in ("residual_moe_block",) if found[op]
    }


@pytest.mark.parametrize(
    ("option", "queries", "want"),
    [
        ("llama", QUERIES, {"norm_linear": 4, "norm_linear_silu_and_mul": 3, "linear_add": 6}),
        # A norm goes into a product where the stream is complete ahead of it, that is at the start.
        ("llama", QUERIES[:1], {"norm_linear": 1}),
        ("qwen3-moe", QUERIES, {"norm_linear": 4, "linear_add": 3, "residual_moe_block": 3}),
        ("qwen3-moe", QUERIES[2:], {"residual_moe_block": 3}),
        ("qwen3-moe", QUERIES[:2], {"norm_linear": 1}),
        ("qwen3.5", QUERIES, {"norm_linear": 5, "norm_linear_silu_and_mul": 4, "linear_add": 8}),
        # What a block gives is normed before it joins the stream.
        ("gemma3", QUERIES, {"norm_linear": 1}),
    ],
)
def test_what_is_fused(option: str, queries: tuple[str, ...], want: dict[str, int], pair: Pair) -> None:
    assert counts(pair(option)[1], *queries) == want


def test_only_few_sampled_decode_rows_are_taken(pair: Pair) -> None:
    _, model = pair("llama")
    few = fused(model, 2, *QUERIES)[1]
    cache = PagedCache(model, num_blocks=16, block_tokens=4, seed=1)
    requests = [PagedRequest() for _ in range(3)]
    prompts = replace(cache.batch([(request, [5, 6]) for request in requests]), sample_rows=None)
    assert not few.takes(prompts)
    assert not few.takes(replace(cache.batch([(request, [7]) for request in requests]), sample_rows=None))
    mixed = cache.batch([(requests[0], [7]), (requests[1], [8, 9])])
    assert not few.takes(replace(mixed, sample_rows=None))
    two = cache.batch([(request, [8]) for request in requests[:2]])
    assert not few.takes(two)
    assert few.takes(replace(two, sample_rows=None))


def test_nothing_changes_where_nothing_is_faster(pair: Pair) -> None:
    _, model = pair("llama")
    assert fuse_few_rows(model.steps) is None
    with faster(0, *QUERIES):
        assert fuse_few_rows(model.steps) is None


def test_every_number_of_rows_has_what_is_faster_for_it(pair: Pair) -> None:
    _, model = pair("llama")
    with faster(8, *QUERIES):
        kernels.register("norm_linear_rows", name="as if")(lambda weight: 2 if weight.shape[0] > 198 else 1)
        few = fuse_few_rows(model.steps)
    assert few is not None
    assert {rows: len(runs) for rows, runs in few.runs.items()} == {1: 16, 2: 20}


def any_steps(rng: random.Random) -> list[Run]:
    """Steps in any order, all of which map 16 features to 16, between what every model begins and ends
    with.
    """

    def matrix(rows: int) -> kernels.LinearWeight:
        values = [rng.gauss(0.0, 0.25) for _ in range(rows * 16)]
        return kernels.prepare_linear(torch.tensor(values).view(rows, 16))

    def norm(kind: type[Norm] | type[AddNorm]) -> Run:
        return kind(torch.tensor([rng.gauss(1.0, 0.3) for _ in range(16)]), 1e-5)

    kinds: list[Callable[[], Run]] = [
        lambda: norm(Norm),
        lambda: norm(AddNorm),
        lambda: norm(AddNorm),
        lambda: Linear(matrix(16), torch.tensor([rng.gauss(0.0, 0.3) for _ in range(16)])),
        lambda: Linear(matrix(16)),
        lambda: GatedLinear(matrix(32)),
        lambda: GeluGatedLinear(matrix(32)),
    ]
    inner = [rng.choice(kinds)() for _ in range(rng.randint(2, 14))]
    return [norm(Norm), *inner, norm(AddNorm), Head(matrix(24))]


def test_steps_in_any_order(pair: Pair) -> None:
    """Whatever the order, and whichever products the kernels take."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    cache = PagedCache(pair("llama")[1], num_blocks=16, block_tokens=4, seed=1)
    batch = cache.batch([(PagedRequest(), [1, 2, 3])])
    shortened = 0
    for _ in range(300):
        runs = any_steps(rng)
        with faster(8, *QUERIES):
            for query in QUERIES[:2]:
                refused = {id(run.weight) for run in runs if isinstance(run, Linear) and rng.random() < 0.2}
                kernels.register(query, name="as if")(
                    lambda weight, refused=refused: 0 if id(weight) in refused else 8
                )
            made = fused_runs([abs, *runs], 3)  # type: ignore[list-item]
        start = torch.tensor([rng.gauss(0.0, 1.0) for _ in range(48)]).view(3, 16)
        residual = start.clone()
        x = residual
        for run in runs:
            x = run(x, residual, batch)
        again = start.clone()
        y = again
        for run in made:
            y = run(y, again, batch)
        assert torch.equal(y, x), runs
        shortened += len(made) < len(runs)
    assert shortened > 100
