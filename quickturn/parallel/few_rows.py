"""The steps of a decode batch of few rows with norms inside the products behind them and additions inside the
products ahead, where the kernels say that this is faster. Found by what the steps are, so that model files
stay as they are; steps that nothing is known about, or that are faster alone, run as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from quickturn_kernels import (
    linear_add,
    linear_add_rows,
    norm_linear,
    norm_linear_rows,
    norm_linear_silu_and_mul,
    residual_moe_block,
    residual_moe_rows,
)

from quickturn.layers.forward import ForwardBatch
from quickturn.layers.linear import GatedLinear, Head, Linear
from quickturn.layers.moe import Mixture
from quickturn.layers.norm import AddNorm, Norm
from quickturn.parallel.placement import Run, Step

MOST_ROWS = 8

Product = Linear | GatedLinear | Head


@dataclass(frozen=True, slots=True)
class NormedProduct:
    """A norm of what comes, and the product behind it."""

    norm: Norm | AddNorm
    product: Product

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`[T, K] -> [T, N]`."""
        norm, product = self.norm, self.product
        match product:
            case GatedLinear():
                return norm_linear_silu_and_mul(x, norm.weight, norm.eps, product.weight, product.bias)
            case Head():
                logits = norm_linear(x, norm.weight, norm.eps, product.weight, None, torch.float32)
                return product.squashed(logits)
            case Linear():
                return norm_linear(x, norm.weight, norm.eps, product.weight, product.bias)


@dataclass(frozen=True, slots=True)
class AddedProduct:
    """A linear map that ends a block: its result goes to the residual stream."""

    product: Linear

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The stream, with the result in it."""
        linear_add(x, self.product.weight, self.product.bias, residual)
        return residual


@dataclass(frozen=True, slots=True)
class StreamMixture:
    """A norm and a mixture of experts, whose result goes to the residual stream. `adds`: what comes isn't the
    stream but a branch of it, which goes there first.
    """

    norm: AddNorm
    mixture: Mixture
    adds: bool

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The stream, with the result in it."""
        mixture = self.mixture
        residual_moe_block(
            residual,
            x if self.adds else None,
            self.norm.weight,
            self.norm.eps,
            mixture.router,
            mixture.experts,
            shared=mixture.shared,
            positions=mixture.positions(residual, batch),
        )
        return residual


@dataclass(frozen=True)
class FewRows:
    """Everything behind the embedding, for batches of some numbers of decode rows: what runs, by that
    number.
    """

    runs: Mapping[int, Sequence[Run]]

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether the batch is so many decode rows, every one of which is sampled."""
        return batch.prefill is None and batch.sample_rows is None and batch.num_decode in self.runs

    def __call__(self, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Embeddings `[R, H]` to float32 logits `[R, V]`; the embeddings are used up."""
        x = residual
        for run in self.runs[batch.num_decode]:
            x = run(x, residual, batch)
        return x


def fuse_few_rows(steps: Sequence[Step]) -> FewRows | None:
    """The other forms of a model's steps, the first of which is the embedding; None where no kernels are
    faster so.
    """
    runs = [step.run for step in steps]
    made = {rows: fused_runs(runs, rows) for rows in range(1, MOST_ROWS + 1)}
    faster = {rows: found for rows, found in made.items() if len(found) < len(runs) - 1}
    return FewRows(faster) if faster else None


def fused_runs(runs: Sequence[Run], rows: int) -> list[Run]:
    """What runs behind the first of `runs` for so many rows."""
    found: list[Run] = []
    added = False  # what comes is the stream, the block ahead is in it
    at = 1
    while at < len(runs):
        run = runs[at]
        match runs[at : at + 2]:
            case [Norm() | AddNorm() as norm, Linear() | GatedLinear() | Head() as product] if (
                added or isinstance(norm, Norm)
            ) and _normed(runs, at, rows):
                found.append(NormedProduct(norm, product))
                added, at = False, at + 2
            case [AddNorm() as norm, Mixture() as mixture] if _mixed(runs, at, rows):
                found.append(StreamMixture(norm, mixture, adds=not added))
                added, at = True, at + 2
            case [Linear() as product, AddNorm()] if linear_add_rows(product.weight) >= rows and (
                _normed(runs, at + 1, rows) or _mixed(runs, at + 1, rows)
            ):
                found.append(AddedProduct(product))
                added, at = True, at + 1
            case _:
                found.append(Norm(run.weight, run.eps) if added and isinstance(run, AddNorm) else run)
                added, at = False, at + 1
    return found


def _normed(runs: Sequence[Run], at: int, rows: int) -> bool:
    """Whether the norm at `at` goes into a product behind it. Not into one that ends a block: that one's
    result goes to the stream.
    """
    match runs[at : at + 3]:
        case [Norm() | AddNorm(), Linear() | GatedLinear() | Head(), AddNorm()]:
            return False
        case [Norm() | AddNorm(), Linear() | GatedLinear() | Head() as product, *_]:
            return norm_linear_rows(product.weight) >= rows
    return False


def _mixed(runs: Sequence[Run], at: int, rows: int) -> bool:
    """Whether the norm at `at` goes into a mixture behind it, and the next one finds its result added."""
    match runs[at : at + 3]:
        case [AddNorm(), Mixture(first=None, gathered=False) as mixture, AddNorm()]:
            return residual_moe_rows(mixture.router, mixture.experts, mixture.shared) >= rows
    return False
