"""The gated half of a feed-forward layer in one kernel: a tile has rows of the gate and theirs of up."""

import torch
from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.gated_linear.reference import linear_silu_and_mul as composed
from quickturn_kernels.ops.linear import PLAIN, LinearWeight
from quickturn_kernels.ops.linear.hopper_launch import choose, launch, takes
from quickturn_kernels.platform import HOPPER
from quickturn_kernels.registry import Priority, register

if cuda_build.available((9, 0)):

    @register(
        "linear_silu_and_mul",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN}, "rows": {"few"}},
        priority=Priority.SPECIALIZED,
    )
    def linear_silu_and_mul(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
        """See `quickturn_kernels.linear_silu_and_mul`."""
        plain = weight.tensors[0]
        if not takes(x, plain, bias):
            return composed(x, weight, bias)
        out = torch.empty((x.shape[0], plain.shape[0] // 2), dtype=x.dtype, device=x.device)
        launch(x, plain, bias, out, choose(x.shape[0], plain.shape[0], plain.shape[1], True), gated=True)
        return out
