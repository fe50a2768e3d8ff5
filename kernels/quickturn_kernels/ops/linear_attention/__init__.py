"""Linear attention with state: causal convolution, the gated delta rule, and the norm behind it.

A row is one request's part of a step. Its state lies in block `state_in[r]` of the arena and goes to block
`state_out[r]` (they may be the same). Where `state_zero[r]` is set or `state_in[r]` is negative the row
begins with zeros, and nothing is read. A row whose `state_out[r]` is negative is padding: nothing is read
or written for it, and its outputs are zeros. A row without tokens leaves no state. No two rows of a step
share an output block, and none reads a block that another writes. State tensors are strided views of the
arena: a block's own elements are contiguous, blocks may lie any distance apart.
"""

from collections.abc import Callable

from torch import Tensor

from quickturn_kernels.ops.linear_attention.boundaries import Boundaries
from quickturn_kernels.registry import Op, define

CHUNK = 64
"""Tokens that `gated_delta_prefill` takes at once: the grid at which cutting a prompt changes no bit."""

_Conv = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, Tensor | None, Boundaries | None], Tensor
]
_Prefill = Callable[
    [
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor | None,
        int,
        float,
        Boundaries | None,
    ],
    Tensor,
]
_Decode = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor
]
_Step = Callable[
    [
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        Tensor,
        int,
        float,
        Tensor | None,
        Tensor | None,
        Tensor | None,
        float,
        bool,
    ],
    Tensor,
]
_CONV: Op[_Conv] = define("causal_conv1d", "width")
_PREFILL: Op[_Prefill] = define("gated_delta_prefill", "head_dim", "channelwise")
_DECODE: Op[_Decode] = define("gated_delta_decode", "head_dim", "channelwise")
_STEP: Op[_Step] = define("gated_delta_step", "head_dim", "channelwise")
_NORM: Op[Callable[[Tensor, Tensor, Tensor, float, str], Tensor]] = define("gated_rms_norm")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    state_zero: Tensor,
    query_start: Tensor,
    *,
    max_query_len: int,
    bias: Tensor | None = None,
    boundaries: Boundaries | None = None,
) -> Tensor:
    """Depthwise causal convolution along each row, then SiLU.

    `y[t] = silu(bias + sum_w weight[w] x[t - W + 1 + w])`, channel by channel. x: [T, C], rows may be
    strided; row r has the tokens query_start[r] .. query_start[r + 1] (int32, [R + 1]), at most
    max_query_len of them; one-token and long rows mix freely. weight: [C, W], bias: [C]. states: [blocks,
    C, W - 1] in x's dtype, a state being the last W - 1 inputs, oldest first. state_in, state_out: [R]
    int32; state_zero: [R] bool. Sums in float32. Returns a new [T, C] of x.dtype.
    """
    key = (x.device, x.dtype, weight.shape[1])
    function = _CONV.table.get(key)
    if function is None:
        function = _CONV.bind(*key)
    return function(
        x, weight, states, state_in, state_out, state_zero, query_start, max_query_len, bias, boundaries
    )


def gated_delta_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    state_zero: Tensor,
    query_start: Tensor,
    *,
    max_query_len: int,
    scale: float,
    context_lens: Tensor | None = None,
    boundaries: Boundaries | None = None,
) -> Tensor:
    """The gated delta rule over ragged rows (Yang et al., "Gated Delta Networks", 2412.06464).

    With k and q l2-normed over their last dim (x / sqrt(sum x^2 + 1e-6)), `decay = exp(-exp(a_log) *
    softplus(a + dt_bias))` and `beta = sigmoid(b)`, for each token in turn:
    `S *= decay; S += k (beta (v - k^T S))^T; out = scale * q^T S`.

    q, k: [T, Hk, Dk]; v: [T, Hv, Dv]; a, b: [T, Hv]; all may be strided views, last dims contiguous. Hv is a
    multiple of Hk: v head h belongs to k head h * Hk // Hv. a_log, dt_bias: [Hv]. With a [T, Hv, Dk] and
    dt_bias [Hv, Dk] each row of S has a decay of its own (Kimi Delta Attention, 2510.26692).

    states: [blocks, Hv, Dk, Dv] float32 or bfloat16. query_start: [R + 1] int32. context_lens: [R] int32,
    tokens known to a row with this step's, as attention has them; with it chunks of 64 lie at positions that
    are multiples of 64, so that cutting a prompt there, or going on from a state kept there, gives the same
    bits as not doing so (if states are float32). Without it chunks count from each row's first token.
    boundaries may lie anywhere.

    Arithmetic in float32, or with operands rounded to q's dtype on matrix units. Returns a new [T, Hv, Dv]
    of q.dtype. A row's result doesn't depend on the other rows.
    """
    key = (q.device, q.dtype, v.shape[2] if v.shape[2] == q.shape[2] else 0, a.dim() == 3)
    function = _PREFILL.table.get(key)
    if function is None:
        function = _PREFILL.bind(*key)
    return function(
        q,
        k,
        v,
        a,
        b,
        a_log,
        dt_bias,
        states,
        state_in,
        state_out,
        state_zero,
        query_start,
        context_lens,
        max_query_len,
        scale,
        boundaries,
    )


def gated_delta_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    state_zero: Tensor,
    *,
    scale: float,
) -> Tensor:
    """`gated_delta_prefill` of rows of one token each, T = R, in float32. Returns a new [R, Hv, Dv]."""
    key = (q.device, q.dtype, v.shape[2] if v.shape[2] == q.shape[2] else 0, a.dim() == 3)
    function = _DECODE.table.get(key)
    if function is None:
        function = _DECODE.bind(*key)
    return function(q, k, v, a, b, a_log, dt_bias, states, state_in, state_out, state_zero, scale)


def gated_delta_step(
    qkv: Tensor,
    conv_weight: Tensor,
    conv_states: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    state_zero: Tensor,
    *,
    key_heads: int,
    scale: float,
    conv_bias: Tensor | None = None,
    gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    settled: bool = False,
) -> Tensor:
    """All that a layer does between its projections, for rows of one token: `causal_conv1d`, then
    `gated_delta_decode`, then, if gate is given, `gated_rms_norm`.

    qkv: [R, C], C = 2 key_heads Dk + Hv Dv, the channels of q, then k, then v, each head by head.
    conv_weight: [C, W]; conv_states: [blocks, C, W - 1]; both kinds of state go by the same block ids. gate:
    [R, Hv, Dv] with norm_weight [Dv]. The rest as in those ops. settled: everything that this op reads but
    qkv, a, b and gate was complete before the kernel ahead of this one could start, so that reading may
    begin while that kernel still runs. Returns a new [R, Hv, Dv] of qkv.dtype.
    """
    key = (qkv.device, qkv.dtype, states.shape[3] if states.shape[3] == states.shape[2] else 0, a.dim() == 3)
    function = _STEP.table.get(key)
    if function is None:
        function = _STEP.bind(*key)
    return function(
        qkv,
        conv_weight,
        conv_states,
        a,
        b,
        a_log,
        dt_bias,
        states,
        state_in,
        state_out,
        state_zero,
        key_heads,
        scale,
        conv_bias,
        gate,
        norm_weight,
        eps,
        settled,
    )


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, activation: str = "silu"
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight * silu(gate)` over the last dim; sigmoid(gate) with activation
    "sigmoid".

    x, gate: [..., D] of one shape; gate may be strided. weight: [D]. In float32, but the quotient is rounded
    to x.dtype, and, if weight has that dtype, its product with weight, too, as transformers' norms of this
    kind do. Returns a new tensor of x's shape and dtype. Raises ValueError for another activation.
    """
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"the gate's activation is silu or sigmoid, not {activation!r}")
    key = (x.device, x.dtype)
    function = _NORM.table.get(key)
    if function is None:
        function = _NORM.bind(*key)
    return function(x, gate, weight, eps, activation)
