"""The gated delta rule chunk by chunk in plain PyTorch: what CPUs use for prompts."""

import torch
from torch import Tensor

from quickturn_kernels.ops.linear_attention import CHUNK
from quickturn_kernels.ops.linear_attention.boundaries import Boundaries
from quickturn_kernels.ops.linear_attention.reference import (
    decay_and_beta,
    kept,
    normed,
    per_value_head,
    read_states,
)
from quickturn_kernels.registry import Priority, register


@register("gated_delta_prefill", name="torch", priority=Priority.PORTABLE)
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
    decay, beta = (x.transpose(0, 1) for x in decay_and_beta(a, b, a_log, dt_bias))
    # Heads first from here on: [Hv, T, ...].
    wide_q = per_value_head(normed(q), heads).transpose(0, 1) * scale
    wide_k = per_value_head(normed(k), heads).transpose(0, 1)
    wide_v = v.float().transpose(0, 1)
    out = torch.zeros(v.shape, dtype=q.dtype, device=q.device)
    before = read_states(states, state_in, state_out, state_zero)
    starts, targets = query_start.tolist(), state_out.tolist()
    lens = None if context_lens is None else context_lens.tolist()
    for row, target in enumerate(targets):
        start, end = starts[row], starts[row + 1]
        if target < 0 or start == end:
            continue
        state = before[row].float()
        keeping = kept(boundaries, row, end - start, target)
        first = start
        while first < end:
            position = first - start if lens is None else lens[row] - (end - first)
            last = min(end, first + CHUNK - position % CHUNK)
            part = slice(first, last)
            chunk = _Chunk(
                wide_q[:, part], wide_k[:, part], wide_v[:, part], decay[:, part], beta[:, part], state
            )
            out[part] = chunk.out().transpose(0, 1).to(out.dtype)
            for tokens, block in keeping:
                if first < start + tokens <= last:
                    states[block] = chunk.state_after(start + tokens - first).to(states.dtype)
            state = chunk.state_after(last - first)
            first = last
    return out


class _Chunk:
    """Some tokens of one row whose corrections are solved for at once (the WY or UT transform of 2412.06464).

    q, k: [H, N, Dk]; v: [H, N, Dv]; decay (log): [H, N, 1 or Dk]; beta: [H, N]; state: [H, Dk, Dv]. The
    correction that token i writes is `u_i = beta_i (v_i - k_i^T S_i)`, where S_i holds the corrections before
    it: a unit triangular system.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> None:
        self.q, self.k, self.state = q, k, state
        self.total = decay.cumsum(1)
        system = self.overlap(k) * beta[:, :, None]
        wanted = beta[:, :, None] * (v - (k * self.total.exp()) @ state)
        self.corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)

    def overlap(self, x: Tensor) -> Tensor:
        """`sum_d x_i k_j e^(g_i - g_j)` for j <= i, [H, N, N]."""
        if self.total.shape[2] == 1:
            apart = (self.total - self.total.mT).tril()
            found: Tensor = (x @ self.k.mT * apart.exp()).tril()
        else:
            apart = (self.total[:, :, None] - self.total[:, None]).clamp(max=0.0)
            found = (x[:, :, None] * self.k[:, None] * apart.exp()).sum(-1).tril()
        return found

    def out(self) -> Tensor:
        """[H, N, Dv]."""
        old: Tensor = (self.q * self.total.exp()) @ self.state
        new: Tensor = self.overlap(self.q) @ self.corrections
        return old + new

    def state_after(self, tokens: int) -> Tensor:
        """[H, Dk, Dv]."""
        last = self.total[:, tokens - 1 : tokens]
        share = (last - self.total[:, :tokens]).exp()
        fresh: Tensor = (self.k[:, :tokens] * share).mT @ self.corrections[:, :tokens]
        return last.exp().mT * self.state + fresh
