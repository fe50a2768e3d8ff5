"""Rotary positions, with the norm of q and k before and the write to the cache after."""

from collections.abc import Callable

from torch import Tensor

from quickturn_kernels.ops.attention import cache_class
from quickturn_kernels.registry import Op, define

_Rotary = Callable[
    [
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor | None,
        Tensor | None,
        float,
        float,
        float,
    ],
    None,
]
_ROTARY: Op[_Rotary] = define("rotary_cache_write", "head_dim", "cache")


def rotary_cache_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Norm q and k per head (Qwen3, when weights are given), rotate them, keep q in place, write k and v to
    the cache.

    q: [T, Hq, D], changed in place. k, v: [T, Hkv, D], only read. All three may be strided views of one
    fused tensor; the last dim is contiguous. positions: [T] int64. cos_sin: [max_positions, rotary_dim]
    float32, the cosines of rotary_dim / 2 frequencies and then the sines. Of each head the first rotary_dim
    elements rotate, in halves (x1, x2): `(x1 cos - x2 sin, x2 cos + x1 sin)`, in float32. k_cache, v_cache:
    [num_blocks, block_tokens, Hkv, D], strided between blocks and tokens. slot_mapping: [T] int64,
    `block_id * block_tokens + offset`; -1 is a padding token: nothing is written for it and its q is
    unspecified. q_weight, k_weight: [D], the norm rounds as `rms_norm` does. Caches may be float8_e4m3fn:
    they get k, rounded to its dtype, over k_scale, and v over v_scale, to the nearest and at most 448 in
    size; the scales mean nothing to other caches.
    """
    key = (q.device, q.dtype, q.shape[2], cache_class(k_cache))
    function = _ROTARY.table.get(key)
    if function is None:
        function = _ROTARY.bind(*key)
    function(
        q,
        k,
        v,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slot_mapping,
        q_weight,
        k_weight,
        eps,
        k_scale,
        v_scale,
    )
