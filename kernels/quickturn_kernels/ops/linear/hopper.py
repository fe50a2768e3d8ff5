"""Linear maps of few bfloat16 rows on Hopper: the weight streams at the speed of memory."""

import torch
from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.linear import PLAIN, LinearWeight
from quickturn_kernels.ops.linear.hopper_launch import choose, launch, takes
from quickturn_kernels.ops.linear.torch import linear as cublas
from quickturn_kernels.platform import HOPPER
from quickturn_kernels.registry import Priority, register

if cuda_build.available((9, 0)):

    @register(
        "linear",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN}, "rows": {"few"}},
        priority=Priority.SPECIALIZED,
    )
    def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        """See `quickturn_kernels.linear`."""
        plain = weight.tensors[0]
        dtype = x.dtype if out_dtype is None else out_dtype
        if dtype not in (torch.bfloat16, torch.float32) or not takes(x, plain, bias):
            return cublas(x, weight, bias, out_dtype)
        out = torch.empty((x.shape[0], plain.shape[0]), dtype=dtype, device=x.device)
        launch(x, plain, bias, out, choose(x.shape[0], plain.shape[0], plain.shape[1], False))
        return out
