"""Norms and additions inside the products of few bfloat16 rows on Hopper."""

import torch
from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.linear import PLAIN, LinearWeight
from quickturn_kernels.ops.norm_linear import reference
from quickturn_kernels.ops.norm_linear.hopper_launch import (
    MAX_ADD_ROWS,
    launch_add,
    launch_norm,
    rows_that_pay,
    takes_add,
    takes_norm,
)
from quickturn_kernels.platform import HOPPER
from quickturn_kernels.registry import Priority, register

if cuda_build.available((9, 0)):

    @register(
        "norm_linear",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN}, "rows": {"few"}},
        priority=Priority.SPECIALIZED,
    )
    def norm_linear(
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: LinearWeight,
        bias: Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        """See `quickturn_kernels.norm_linear`."""
        plain = weight.tensors[0]
        dtype = x.dtype if out_dtype is None else out_dtype
        if dtype not in (torch.bfloat16, torch.float32) or not takes_norm(x, norm_weight, plain, bias):
            return reference.norm_linear(x, norm_weight, eps, weight, bias, out_dtype)
        out = torch.empty((x.shape[0], plain.shape[0]), dtype=dtype, device=x.device)
        launch_norm(x, norm_weight, eps, plain, bias, out)
        return out

    @register(
        "norm_linear_silu_and_mul",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN}, "rows": {"few"}},
        priority=Priority.SPECIALIZED,
    )
    def norm_linear_silu_and_mul(
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: LinearWeight,
        bias: Tensor | None,
    ) -> Tensor:
        """See `quickturn_kernels.norm_linear_silu_and_mul`."""
        plain = weight.tensors[0]
        if not takes_norm(x, norm_weight, plain, bias):
            return reference.norm_linear_silu_and_mul(x, norm_weight, eps, weight, bias)
        out = torch.empty((x.shape[0], plain.shape[0] // 2), dtype=x.dtype, device=x.device)
        launch_norm(x, norm_weight, eps, plain, bias, out, gated=True)
        return out

    @register(
        "linear_add",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN}, "rows": {"few"}},
        priority=Priority.SPECIALIZED,
    )
    def linear_add(x: Tensor, weight: LinearWeight, bias: Tensor | None, residual: Tensor) -> None:
        """See `quickturn_kernels.linear_add`."""
        plain = weight.tensors[0]
        if takes_add(x, plain, bias, residual):
            launch_add(x, plain, bias, residual)
        else:
            reference.linear_add(x, weight, bias, residual)

    @register(
        "norm_linear_rows",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN}},
        priority=Priority.SPECIALIZED,
    )
    def norm_linear_rows(weight: LinearWeight) -> int:
        """See `quickturn_kernels.norm_linear_rows`."""
        return rows_that_pay(*weight.shape)

    @register(
        "linear_add_rows",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN}},
        priority=Priority.SPECIALIZED,
    )
    def linear_add_rows(weight: LinearWeight) -> int:
        """See `quickturn_kernels.linear_add_rows`."""
        return MAX_ADD_ROWS if weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0 else 0
