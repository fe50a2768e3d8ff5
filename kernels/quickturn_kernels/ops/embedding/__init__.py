"""Rows of a table by token id."""

from collections.abc import Callable

from torch import Tensor

from quickturn_kernels.registry import Op, define

_EMBEDDING: Op[Callable[[Tensor, Tensor], Tensor]] = define("embedding")


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """`weight[ids]`, zeros where the id lies outside the table (padding tokens carry -1).

    ids: [T] int64. weight: [V, H]. Returns a new [T, H] of weight.dtype.
    """
    function = _EMBEDDING.table.get((weight.device, weight.dtype))
    if function is None:
        function = _EMBEDDING.bind(weight.device, weight.dtype)
    return function(ids, weight)
