"""Access to the compiled CPU kernels, for the `cpu` tier of every op family."""

from collections.abc import Callable, Container, Hashable, Mapping
from typing import Any, TypeVar

import torch  # loads its OpenMP runtime, whose threads the extension shares
from torch import Tensor

from quickturn_kernels.platform import CPU
from quickturn_kernels.registry import Priority, register

try:
    from quickturn_kernels import _cpu
except ImportError:  # another processor, or an install without a compiler: the PyTorch tiers do the work
    AVAILABLE = False
else:
    AVAILABLE = True

HAS_TILES = AVAILABLE and _cpu.has_tiles()
"""Whether this processor has AMX tiles, and so the layouts that need them."""

F = TypeVar("F", bound=Callable[..., Any])

CODES = {torch.float32: 0, torch.bfloat16: 1}
"""The extension's numbers for dtypes."""

MAX_HEAD_DIM = 256


def register_native(
    op: str,
    *,
    dtypes: tuple[torch.dtype, ...] = tuple(CODES),
    traits: Mapping[str, Container[Hashable]] | None = None,
) -> Callable[[F], F]:
    """Register a function that uses the extension, if there is one."""
    if not AVAILABLE:
        return lambda function: function
    return register(op, name="cpu", platform=CPU, dtypes=dtypes, traits=traits, priority=Priority.PERFORMANCE)


def rows_of(x: Tensor) -> Tensor:
    """x, or a copy whose last dim is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def heads_of(x: Tensor) -> Tensor:
    """x [T, heads, D], or a copy in which each token's heads are contiguous."""
    _, head_stride, stride = x.stride()
    return x if stride == 1 and (head_stride == x.shape[2] or x.shape[1] == 1) else x.contiguous()


def address(x: Tensor | None) -> int:
    """The address of a tensor's first element, 0 for None."""
    return 0 if x is None else x.data_ptr()


def paged_cache(k_cache: Tensor, v_cache: Tensor) -> "_cpu.PagedCache":
    """Describe one layer's caches, [num_blocks, block_tokens, Hkv, D] with [Hkv, D] contiguous."""
    _, block_tokens, kv_heads, head_dim = k_cache.shape
    k_block, k_token, _, _ = k_cache.stride()
    v_block, v_token, _, _ = v_cache.stride()
    return _cpu.PagedCache(
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_block,
        v_block,
        k_token,
        v_token,
        block_tokens,
        kv_heads,
        head_dim,
    )
