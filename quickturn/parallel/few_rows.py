"""The steps of a decode batch of few rows with the norms inside the products and the additions behind them.
Found by what the steps are, so that model files stay as they are; steps that nothing is known about run as
they are, in between.

What a step gets is either the residual stream itself, complete, or a branch that the stream still lacks. A
norm inside a product reads both and changes neither: then the branch travels on, until the next linear map
that ends a block adds it together with its own result.
"""

from collections.abc import Sequence
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

Flow = tuple[torch.Tensor, torch.Tensor | None]
"""The activations, and the branch that the residual stream lacks beside them."""

Product = Linear | GatedLinear | Head


@dataclass(frozen=True, slots=True)
class Alone:
    """A step as it is."""

    run: Run

    def __call__(
        self, x: torch.Tensor, branch: torch.Tensor | None, residual: torch.Tensor, batch: ForwardBatch
    ) -> Flow:
        """The step of x; the branch goes on."""
        return self.run(x, residual, batch), branch


@dataclass(frozen=True, slots=True)
class NormedProduct:
    """A norm and the product behind it. `lacks`: its input is a branch that the stream lacks, else what is
    normed itself.
    """

    norm: Norm | AddNorm
    product: Product
    lacks: bool

    def __call__(
        self, x: torch.Tensor, branch: torch.Tensor | None, residual: torch.Tensor, batch: ForwardBatch
    ) -> Flow:
        """The product; with `lacks`, x goes on as a branch."""
        stream, added = (residual, x) if self.lacks else (x, None)
        norm, product = self.norm, self.product
        match product:
            case GatedLinear():
                made = norm_linear_silu_and_mul(
                    stream, added, norm.weight, norm.eps, product.weight, product.bias
                )
            case Head():
                logits = norm_linear(
                    stream, added, norm.weight, norm.eps, product.weight, None, torch.float32
                )
                made = product.squashed(logits)
            case Linear():
                made = norm_linear(stream, added, norm.weight, norm.eps, product.weight, product.bias)
        return made, x if self.lacks else branch


@dataclass(frozen=True, slots=True)
class AddedProduct:
    """A linear map that ends a block: its result, and the branch if there is one, go to the stream."""

    product: Linear

    def __call__(
        self, x: torch.Tensor, branch: torch.Tensor | None, residual: torch.Tensor, batch: ForwardBatch
    ) -> Flow:
        """The stream, complete."""
        linear_add(x, self.product.weight, self.product.bias, residual, branch)
        return residual, None


@dataclass(frozen=True, slots=True)
class StreamMixture:
    """A norm and a mixture of experts, whose result goes to the stream. `lacks`: its input is a branch that
    the stream lacks, else the stream.
    """

    norm: AddNorm
    mixture: Mixture
    lacks: bool

    def __call__(
        self, x: torch.Tensor, branch: torch.Tensor | None, residual: torch.Tensor, batch: ForwardBatch
    ) -> Flow:
        """The stream, complete."""
        mixture = self.mixture
        residual_moe_block(
            residual,
            x if self.lacks else None,
            self.norm.weight,
            self.norm.eps,
            mixture.router,
            mixture.experts,
            shared=mixture.shared,
            positions=mixture.positions(residual, batch),
        )
        return residual, None


Piece = Alone | NormedProduct | AddedProduct | StreamMixture


@dataclass(frozen=True)
class FewRows:
    """Everything behind the embedding, for batches of up to `rows` decode rows."""

    pieces: tuple[Piece, ...]
    rows: int

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether the batch is few decode rows, every one of which is sampled."""
        return batch.prefill is None and batch.sample_rows is None and batch.num_decode <= self.rows

    def __call__(self, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Embeddings `[R, H]` to float32 logits `[R, V]`; the embeddings are used up."""
        x, branch = residual, None
        for piece in self.pieces:
            x, branch = piece(x, branch, residual, batch)
        return x


def fuse_few_rows(steps: Sequence[Step]) -> FewRows | None:
    """The steps of a model, the embedding first, as such pieces; None where no kernel is faster so."""
    made = _Fuser([step.run for step in steps]).pieces()
    return FewRows(*made) if made is not None else None


class _Fuser:
    """One pass over the steps."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs

    def pieces(self) -> tuple[tuple[Piece, ...], int] | None:
        """The pieces and for how many rows they are; None if none is made of two steps."""
        pieces: list[Piece] = []
        limits: list[int] = []
        complete = True  # x is the stream, which lacks nothing
        pending = False  # a branch travels beside x
        at = 1
        while at < len(self._runs):
            run, behind = self._runs[at], self._at(at + 1)
            lacks = isinstance(run, AddNorm) and not complete
            if rows := self._normed_rows(at):
                if not lacks or self._taken_up(at + 2):
                    assert isinstance(run, Norm | AddNorm)
                    assert isinstance(behind, Product)
                    pieces.append(NormedProduct(run, behind, lacks))
                    limits.append(rows)
                    complete, pending, at = False, pending or lacks, at + 2
                    continue
            elif rows := self._mixture_rows(at):
                assert isinstance(run, AddNorm)
                assert isinstance(behind, Mixture)
                pieces.append(StreamMixture(run, behind, lacks))
                limits.append(rows)
                complete, at = True, at + 2
                continue
            elif (rows := self._added_rows(at)) and (
                pending or self._normed_rows(at + 1) or self._mixture_rows(at + 1)
            ):
                assert isinstance(run, Linear)
                pieces.append(AddedProduct(run))
                limits.append(rows)
                complete, pending, at = True, False, at + 1
                continue
            plain = Norm(run.weight, run.eps) if isinstance(run, AddNorm) and complete else run
            pieces.append(Alone(plain))
            complete, at = False, at + 1
        return (tuple(pieces), min(limits)) if limits else None

    def _at(self, index: int) -> Run | None:
        return self._runs[index] if index < len(self._runs) else None

    def _normed_rows(self, at: int) -> int:
        """For how many rows the norm at `at` goes into a product behind it. One that ends a block doesn't
        take it: its result goes to the stream.
        """
        norm, product = self._at(at), self._at(at + 1)
        if not isinstance(norm, Norm | AddNorm) or not isinstance(product, Product):
            return 0
        return 0 if isinstance(self._at(at + 2), AddNorm) else norm_linear_rows(product.weight)

    def _mixture_rows(self, at: int) -> int:
        """The same of a mixture of experts, which also adds its result."""
        norm, mixture = self._at(at), self._at(at + 1)
        if not isinstance(norm, AddNorm) or not isinstance(mixture, Mixture) or mixture.first is not None:
            return 0
        if not isinstance(self._at(at + 2), AddNorm):
            return 0
        return residual_moe_rows(mixture.router, mixture.experts, mixture.shared)

    def _added_rows(self, at: int) -> int:
        """For how many rows the linear map at `at` adds its result to the stream itself."""
        product = self._at(at)
        if not isinstance(product, Linear) or not isinstance(self._at(at + 1), AddNorm):
            return 0
        return linear_add_rows(product.weight)

    def _taken_up(self, at: int) -> bool:
        """Whether a branch that the stream lacks is added before anyone else asks for the stream, from step
        `at` on; or nobody does any more.
        """
        for index in range(at, len(self._runs)):
            if isinstance(self._at(index + 1), AddNorm):
                return self._added_rows(index) > 0
        return True
