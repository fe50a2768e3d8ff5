"""Decode attention over a part of each row's keys, and what the parts of several ranks make together.

With `s_i` the score of key i and `l = log(sum exp(s_i))` over a part's keys, the softmax over all keys weighs
the part's own result with `exp(l)`: parts add up in any split of the keys (Dao et al. 2023, flash-decoding).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quickturn_kernels.ops.attention import cache_class
from quickturn_kernels.registry import Op, define

_Partial = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, float, int], Tensor]
_PARTIAL: Op[_Partial] = define("partial_attention_decode", "head_dim", "softcap", "cache")
_MERGE: Op[Callable[[Tensor, Tensor | None, torch.dtype], Tensor]] = define("merge_attention")


def partial_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    max_context_len: int,
) -> Tensor:
    """`paged_attention_decode` of the keys that are here, without window and sinks, and how much it weighs.

    context_lens: [R] int32, keys of each row that are here; 0 where there are none. The rest as in
    `paged_attention_decode`. Returns a new float32 [R, Hq, D + 1]: the result, and behind it `log(sum
    exp(scores))`, which is -inf (and the result zeros) for rows without keys.
    """
    key = (q.device, q.dtype, q.shape[2], softcap > 0.0, cache_class(k_cache))
    function = _PARTIAL.table.get(key)
    if function is None:
        function = _PARTIAL.bind(*key)
    out = function(q, k_cache, v_cache, block_tables, context_lens, scale * k_scale, softcap, max_context_len)
    if v_scale != 1.0:
        out[..., :-1] *= v_scale
    return out


def merge_attention(parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What attention over all keys gives, of `partial_attention_decode` over each part of them.

    parts: float32 [P, R, Hq, D + 1], contiguous. sinks: [Hq], one more logit a head in the softmax's
    denominator. Parts are added in their order. Returns a new contiguous [R, Hq, D] of `dtype`; zeros for
    rows without keys.
    """
    function = _MERGE.table.get((parts.device, dtype))
    if function is None:
        function = _MERGE.bind(parts.device, dtype)
    return function(parts, sinks, dtype)
