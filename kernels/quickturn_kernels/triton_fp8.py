"""e4m3 in Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def to_e4m3(value, like, ROUND: tl.constexpr):
    """float32 values within the range, as the e4m3 elements of the pointer `like`, ties to even. ROUND: by
    arithmetic first, for Triton's interpreter, whose own conversion drops carries.
    """
    if ROUND:
        # Added to 2^(e + 20), a value of exponent e keeps three bits behind its first; from 2^-6 on, the last
        # bit's weight stays the same.
        exponent = tl.maximum((value.to(tl.int32, bitcast=True) >> 23) & 255, 121)
        shift = ((exponent + 20) << 23).to(tl.float32, bitcast=True)
        size = (tl.abs(value) + shift) - shift
        value = tl.where(value < 0, -size, size)
    return value.to(like.dtype.element_ty)
