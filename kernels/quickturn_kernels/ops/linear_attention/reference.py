"""Linear attention in plain PyTorch: token by token in float32."""

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from quickturn_kernels.ops.linear_attention import causal_conv1d as convolve
from quickturn_kernels.ops.linear_attention import gated_delta_decode as decode
from quickturn_kernels.ops.linear_attention import gated_rms_norm as norm
from quickturn_kernels.ops.linear_attention.boundaries import Boundaries
from quickturn_kernels.registry import Priority, register

L2_EPS = 1e-6


def decay_and_beta(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(log of the decay [T, Hv, 1 or Dk], beta [T, Hv]) in float32."""
    if a.dim() == 2:
        a, dt_bias = a[:, :, None], dt_bias[:, None]
    rate = -a_log.float().exp()[:, None]
    return rate * softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def normed(x: Tensor) -> Tensor:
    """x in float32, l2-normed over its last dim."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2_EPS)


def per_value_head(x: Tensor, heads: int) -> Tensor:
    """[T, Hk, D] to [T, heads, D]: each k head serves neighbouring v heads."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def read_states(states: Tensor, state_in: Tensor, state_out: Tensor, state_zero: Tensor) -> Tensor:
    """A row's state each, [R, ...] of states.dtype; zeros where nothing may be read."""
    reading = (state_in >= 0) & (state_out >= 0) & ~state_zero.bool()
    found = states.new_zeros((state_in.shape[0], *states.shape[1:]))
    found[reading] = states[state_in[reading].long()]
    return found


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: q, k [..., Dk], v [..., Dv], decay (factors) [..., 1 or Dk], beta [...], state
    [..., Dk, Dv]. Returns (q^T S, S).
    """
    state = state * decay[..., None]
    delta = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
    state = state + k[..., None] * delta[..., None, :]
    return (state * q[..., None]).sum(-2), state


@register("causal_conv1d", name="reference", priority=Priority.REFERENCE)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    state_zero: Tensor,
    query_start: Tensor,
    max_query_len: int,
    bias: Tensor | None,
    boundaries: Boundaries | None,
) -> Tensor:
    """See `quickturn_kernels.causal_conv1d`."""
    channels, width = weight.shape
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    before = read_states(states, state_in, state_out, state_zero)
    starts, targets = query_start.tolist(), state_out.tolist()
    wide_bias = None if bias is None else bias.float()
    for row, target in enumerate(targets):
        start, end = starts[row], starts[row + 1]
        if target < 0 or start == end:
            continue
        inputs = torch.cat((before[row], x[start:end].T.to(states.dtype)), dim=1)
        summed = conv1d(inputs.float(), weight.float()[:, None], wide_bias, groups=channels)
        out[start:end] = silu(summed).T.to(x.dtype)
        for tokens, block in kept(boundaries, row, end - start, target):
            states[block] = inputs[:, tokens : tokens + width - 1]
    return out


@register("gated_delta_prefill", name="reference", priority=Priority.REFERENCE)
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
    context_lens: Tensor | None,
    max_query_len: int,
    scale: float,
    boundaries: Boundaries | None,
) -> Tensor:
    """See `quickturn_kernels.gated_delta_prefill`."""
    heads = v.shape[1]
    decay, beta = decay_and_beta(a, b, a_log, dt_bias)
    wide_q, wide_k = (per_value_head(normed(x), heads) for x in (q, k))
    out = torch.zeros(v.shape, dtype=q.dtype, device=q.device)
    before = read_states(states, state_in, state_out, state_zero)
    starts, targets = query_start.tolist(), state_out.tolist()
    for row, target in enumerate(targets):
        start, end = starts[row], starts[row + 1]
        if target < 0 or start == end:
            continue
        state = before[row].float()
        keeping = dict(kept(boundaries, row, end - start, target))
        for token in range(start, end):
            result, state = delta_rule(
                wide_q[token], wide_k[token], v[token].float(), decay[token].exp(), beta[token], state
            )
            out[token] = (result * scale).to(out.dtype)
            if token + 1 - start in keeping:
                states[keeping[token + 1 - start]] = state.to(states.dtype)
        states[target] = state.to(states.dtype)
    return out


@register("gated_delta_decode", name="reference", priority=Priority.REFERENCE)
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
    scale: float,
) -> Tensor:
    """See `quickturn_kernels.gated_delta_decode`."""
    heads = v.shape[1]
    decay, beta = decay_and_beta(a, b, a_log, dt_bias)
    before = read_states(states, state_in, state_out, state_zero).float()
    wide_q, wide_k = (per_value_head(normed(x), heads) for x in (q, k))
    out, after = delta_rule(wide_q, wide_k, v.float(), decay.exp(), beta, before)
    living = state_out >= 0
    states[state_out[living].long()] = after[living].to(states.dtype)
    return torch.where(living[:, None, None], out * scale, 0.0).to(q.dtype)


@register("gated_delta_step", name="reference", priority=Priority.REFERENCE)
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
    key_heads: int,
    scale: float,
    conv_bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    settled: bool,
) -> Tensor:
    """See `quickturn_kernels.gated_delta_step`: the ops that it's made of, each in the tier that suits."""
    rows = qkv.shape[0]
    _, heads, key_dim, value_dim = states.shape
    query_start = torch.arange(rows + 1, dtype=torch.int32, device=qkv.device)
    mixed = convolve(
        qkv,
        conv_weight,
        conv_states,
        state_in,
        state_out,
        state_zero,
        query_start,
        max_query_len=1,
        bias=conv_bias,
    )
    q, k, v = mixed.split_with_sizes((key_heads * key_dim, key_heads * key_dim, heads * value_dim), dim=1)
    out = decode(
        q.view(rows, key_heads, key_dim),
        k.view(rows, key_heads, key_dim),
        v.view(rows, heads, value_dim),
        a,
        b,
        a_log,
        dt_bias,
        states,
        state_in,
        state_out,
        state_zero,
        scale=scale,
    )
    if gate is None or norm_weight is None:
        return out
    return norm(out, gate, norm_weight, eps)


@register("gated_rms_norm", name="reference", priority=Priority.REFERENCE)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """See `quickturn_kernels.gated_rms_norm`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    opened = silu(gate.float()) if activation == "silu" else gate.float().sigmoid()
    return (weight * wide.to(x.dtype) * opened).to(x.dtype)


def kept(boundaries: Boundaries | None, row: int, length: int, target: int) -> list[tuple[int, int]]:
    """(tokens, block) of every state that a row leaves, its last one at the end."""
    found = []
    if boundaries is not None:
        first, last = boundaries.row_start[row : row + 2].tolist()
        found = list(
            zip(boundaries.tokens[first:last].tolist(), boundaries.rows[first:last].tolist(), strict=True)
        )
    return [*found, (length, target)]
