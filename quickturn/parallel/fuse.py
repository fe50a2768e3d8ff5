"""Runs of neighbouring steps that have a faster form together. Found by what the steps are, so that model
files stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from quickturn_kernels import DecoderStack, StackLayer, decode_stack, decode_stack_rows

from quickturn.layers.attention import Attention
from quickturn.layers.embedding import Embedding
from quickturn.layers.forward import ForwardBatch
from quickturn.layers.linear import GatedLinear, Head, Linear
from quickturn.layers.norm import AddNorm, Norm
from quickturn.parallel.placement import Run, Step

_LAYER_STEPS = 7


@dataclass(frozen=True)
class FusedDecode:
    """Everything behind the embedding as one op, for batches of up to `rows` decode rows."""

    stack: DecoderStack
    rows: int

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether the batch is few decode rows, every one of which is sampled; a cache in e4m3 has scales
        that the op doesn't know.
        """
        few = batch.prefill is None and batch.sample_rows is None and batch.num_decode <= self.rows
        return few and batch.keys_and_values(0).k.dtype != torch.float8_e4m3fn

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Embeddings `[R, H]` to float32 logits `[R, V]`; x is used up."""
        caches = [batch.keys_and_values(layer) for layer in range(len(self.stack.layers))]
        group = caches[0].group
        return decode_stack(
            self.stack,
            x,
            [(cache.k, cache.v) for cache in caches],
            batch.positions,
            batch.slot_mapping[group],
            batch.block_tables[group],
            batch.context_lens,
            max_context_len=batch.max_context_len,
        )


def fuse_decode(steps: Sequence[Step]) -> FusedDecode | None:
    """The steps of a dense decoder as one op; None where they aren't one, or no kernel is faster so."""
    stack = decoder_stack([step.run for step in steps])
    rows = 0 if stack is None else decode_stack_rows(stack)
    return None if stack is None or rows == 0 else FusedDecode(stack, rows)


def decoder_stack(runs: Sequence[Run]) -> DecoderStack | None:
    """A dense decoder: embedding, layers of (norm, q|k|v, attention, output, norm, gate|up, down) that are
    alike, norm, head. None if these are other steps.
    """
    if len(runs) < 3 + _LAYER_STEPS or (len(runs) - 3) % _LAYER_STEPS:
        return None
    embedding, *body, norm, head = runs
    layers: list[StackLayer] = []
    attentions: list[Attention] = []
    epsilons: set[float] = set()
    for at in range(0, len(body), _LAYER_STEPS):
        match body[at : at + _LAYER_STEPS]:
            case [
                Norm() | AddNorm() as first,
                Linear() as qkv,
                Attention() as attention,
                Linear() as o,
                AddNorm() as second,
                GatedLinear() as gate_up,
                Linear() as down,
            ] if isinstance(first, AddNorm) == (at > 0):
                layers.append(_layer(first, qkv, attention, o, second, gate_up, down))
                attentions.append(attention)
                epsilons |= {first.eps, attention.eps, second.eps}
            case _:
                return None
    if not (isinstance(embedding, Embedding) and isinstance(norm, AddNorm) and isinstance(head, Head)):
        return None
    one = attentions[0]
    alike = all(
        other.layer == index
        and other.head_dim == one.head_dim
        and other.queries_per_kv == one.queries_per_kv
        and other.scale == one.scale
        and other.window == one.window
        and other.cos_sin is one.cos_sin
        and not other.gated
        and other.sinks is None
        and not other.softcap
        for index, other in enumerate(attentions)
    )
    if not alike or len(epsilons | {norm.eps}) > 1 or head.softcap:
        return None
    kv_heads = layers[0].qkv.shape[0] // ((one.queries_per_kv + 2) * one.head_dim)
    return DecoderStack(
        layers=tuple(layers),
        norm=norm.weight,
        head=head.weight,
        heads=kv_heads * one.queries_per_kv,
        kv_heads=kv_heads,
        head_dim=one.head_dim,
        scale=one.scale,
        eps=norm.eps,
        cos_sin=one.cos_sin,
        window=one.window,
    )


def _layer(
    first: Norm | AddNorm,
    qkv: Linear,
    attention: Attention,
    o: Linear,
    second: AddNorm,
    gate_up: GatedLinear,
    down: Linear,
) -> StackLayer:
    return StackLayer(
        attn_norm=first.weight,
        qkv=qkv.weight,
        o=o.weight,
        mlp_norm=second.weight,
        gate_up=gate_up.weight,
        down=down.weight,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        qkv_bias=qkv.bias,
        o_bias=o.bias,
        gate_up_bias=gate_up.bias,
        down_bias=down.bias,
    )
