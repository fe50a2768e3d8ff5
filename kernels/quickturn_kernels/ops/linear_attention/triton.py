"""Linear attention in Triton."""

from quickturn_kernels.ops.linear_attention import triton_conv, triton_decode, triton_prefill
from quickturn_kernels.platform import TRITON
from quickturn_kernels.registry import register
from quickturn_kernels.triton_common import FLOATS

register("causal_conv1d", name="triton", platform=TRITON, dtypes=FLOATS)(triton_conv.launch)
register("gated_delta_prefill", name="triton", platform=TRITON, dtypes=FLOATS)(triton_prefill.launch)
register("gated_delta_decode", name="triton", platform=TRITON, dtypes=FLOATS)(triton_decode.launch)
register("gated_rms_norm", name="triton", platform=TRITON, dtypes=FLOATS)(triton_decode.launch_norm)
