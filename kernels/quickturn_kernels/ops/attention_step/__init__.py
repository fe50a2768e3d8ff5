"""All that a decoder layer does between its projections, for rows of one new token each, as one op."""

from collections.abc import Callable

from torch import Tensor

from quickturn_kernels.ops.attention import cache_class
from quickturn_kernels.registry import Op, define

_Step = Callable[
    [
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        float,
        Tensor | None,
        Tensor | None,
        float,
        int,
        int,
        bool,
        float,
        float,
        Tensor | None,
    ],
    Tensor,
]
_STEP: Op[_Step] = define("rotary_attention_decode", "head_dim", "cache")


def rotary_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    window: int = 0,
    max_context_len: int,
    settled: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    gate: Tensor | None = None,
) -> Tensor:
    """`rotary_cache_write` of one token a row, then `paged_attention_decode` of its query.

    Shapes and meaning as there, with T = R and `positions[r] == context_lens[r] - 1` but for padding rows,
    whose context is 0. q's content is unspecified afterwards. `settled`: everything that this op reads but
    q, k and v was complete before the kernel ahead of this one could start, so that reading may begin while
    that kernel still runs. gate: [R, Hq D] or None, rows may lie apart; the result is multiplied by its
    sigmoid, as `sigmoid_gate` does. Returns a new [R, Hq, D].
    """
    key = (q.device, q.dtype, q.shape[2], cache_class(k_cache))
    function = _STEP.table.get(key)
    if function is None:
        function = _STEP.bind(*key)
    return function(
        q,
        k,
        v,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slot_mapping,
        block_tables,
        context_lens,
        scale,
        q_weight,
        k_weight,
        eps,
        window,
        max_context_len,
        settled,
        k_scale,
        v_scale,
        gate,
    )
