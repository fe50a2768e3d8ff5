"""Rotary and cache write through the compiled CPU kernels."""

from torch import Tensor

from quickturn_kernels.cpu_native import AVAILABLE, CODES, address, heads_of, paged_cache, register_native
from quickturn_kernels.ops.attention import SAME
from quickturn_kernels.ops.norm.reference import rms_norm

if AVAILABLE:
    from quickturn_kernels import _cpu


@register_native("rotary_cache_write", traits={"head_dim": range(513), "cache": {SAME}})
def rotary_cache_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    k_scale: float,
    v_scale: float,
) -> None:
    """See `quickturn_kernels.rotary_cache_write`."""
    if k_cache.dtype != q.dtype:
        raise ValueError(f"q is {q.dtype} and the cache {k_cache.dtype}")
    turned, k, v = heads_of(q), heads_of(k), heads_of(v)
    if q_weight is not None and k_weight is not None and q_weight.dtype != q.dtype:
        turned.copy_(rms_norm(turned, q_weight, eps))
        k, q_weight, k_weight = rms_norm(k, k_weight, eps), None, None
    tokens, heads, _ = q.shape
    _cpu.rotary_cache_write(
        CODES[q.dtype],
        turned.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        turned.stride(0),
        k.stride(0),
        v.stride(0),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.shape[1],
        cos_sin.stride(0),
        slot_mapping.data_ptr(),
        address(q_weight),
        address(k_weight),
        eps,
        tokens,
        heads,
        paged_cache(k_cache, v_cache),
    )
    if turned is not q:
        q.copy_(turned)
