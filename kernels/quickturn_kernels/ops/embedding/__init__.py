"""Rows of a table by token id."""

from collections.abc import Callable

from torch import Tensor

from quickturn_kernels.ops.linear import PLAIN, LinearWeight
from quickturn_kernels.registry import Op, define

_EMBEDDING: Op[Callable[[Tensor, Tensor], Tensor]] = define("embedding")
_PACKED_EMBEDDING: Op[Callable[[Tensor, LinearWeight], Tensor]] = define("packed_embedding", "layout")


def embedding(ids: Tensor, weight: Tensor | LinearWeight) -> Tensor:
    """`weight[ids]`, zeros where the id lies outside the table (padding tokens carry -1).

    ids: [T] int64. weight: [V, H], or what `prepare_linear` made of it for a tied head, so that the two share
    their memory (LookupError for a layout whose rows nobody can read). Returns a new [T, H] of weight.dtype.
    """
    if isinstance(weight, LinearWeight):
        if weight.layout != PLAIN:
            return _from_packed(ids, weight)
        weight = weight.tensors[0]
    function = _EMBEDDING.table.get((weight.device, weight.dtype))
    if function is None:
        function = _EMBEDDING.bind(weight.device, weight.dtype)
    return function(ids, weight)


def _from_packed(ids: Tensor, weight: LinearWeight) -> Tensor:
    key = (ids.device, weight.dtype, weight.layout)
    function = _PACKED_EMBEDDING.table.get(key)
    if function is None:
        function = _PACKED_EMBEDDING.bind(*key)
    return function(ids, weight)
