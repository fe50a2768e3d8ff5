"""Rotary and cache write in plain PyTorch."""

import torch
from torch import Tensor

from quickturn_kernels.ops.linear.fp8 import FP8, FP8_MAX
from quickturn_kernels.ops.norm.reference import rms_norm
from quickturn_kernels.registry import Priority, register


@register("rotary_cache_write", name="reference", priority=Priority.REFERENCE)
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
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    cos, sin = cos_sin[positions[kept]][:, None, :].chunk(2, dim=-1)
    blocks = slot_mapping[kept] // k_cache.shape[1]
    offsets = slot_mapping[kept] % k_cache.shape[1]
    q[kept] = _norm_and_rotate(q[kept], q_weight, cos, sin, eps)
    _write(k_cache, blocks, offsets, _norm_and_rotate(k[kept], k_weight, cos, sin, eps), k_scale)
    _write(v_cache, blocks, offsets, v[kept], v_scale)


def _write(cache: Tensor, blocks: Tensor, offsets: Tensor, values: Tensor, scale: float) -> None:
    if cache.dtype == FP8:
        # PyTorch indexes no 8-bit floats on every device, but bytes.
        narrow = (values.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        cache.view(torch.uint8)[blocks, offsets] = narrow.view(torch.uint8)
    else:
        cache[blocks, offsets] = values.to(cache.dtype)


def _norm_and_rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    if weight is not None:
        x = rms_norm(x, weight, eps)
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)
