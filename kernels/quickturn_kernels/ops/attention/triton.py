"""The Triton tier of paged attention: registers both ops."""

from quickturn_kernels.ops.attention import triton_decode, triton_prefill

__all__ = ["triton_decode", "triton_prefill"]
