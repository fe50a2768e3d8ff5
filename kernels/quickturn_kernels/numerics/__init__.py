"""The numerics suite: every implementation of an op against the reference, on the same inputs.

`for case in cases(): check(case, implementation, seed, device)` raises AssertionError where one differs.
Plugins can run it over their own implementations. Inputs are random; memory that an implementation must not
read holds NaN (unused cache slots, table entries past a context point at a NaN block), and freshly
allocated outputs hold NaN too.
"""

from quickturn_kernels.numerics.attention import attention_cases
from quickturn_kernels.numerics.attention_partial import attention_partial_cases
from quickturn_kernels.numerics.attention_step import attention_step_cases
from quickturn_kernels.numerics.batch import batch_cases
from quickturn_kernels.numerics.check import Case, Result, check, check_repeats, poisoned
from quickturn_kernels.numerics.decode_stack import decode_stack_cases
from quickturn_kernels.numerics.dense import dense_cases
from quickturn_kernels.numerics.fp8 import fp8_cases
from quickturn_kernels.numerics.linear_attention import linear_attention_cases
from quickturn_kernels.numerics.moe import moe_cases
from quickturn_kernels.numerics.norm_linear import norm_linear_cases
from quickturn_kernels.numerics.rotary import rotary_cases
from quickturn_kernels.numerics.sampling import sampling_cases

__all__ = ["Case", "Result", "cases", "check", "check_repeats", "poisoned"]


def cases() -> tuple[Case, ...]:
    """Every case of every op."""
    return (
        *dense_cases(),
        *norm_linear_cases(),
        *fp8_cases(),
        *rotary_cases(),
        *attention_cases(),
        *attention_partial_cases(),
        *attention_step_cases(),
        *decode_stack_cases(),
        *linear_attention_cases(),
        *batch_cases(),
        *sampling_cases(),
        *moe_cases(),
    )
