"""All decoder layers and the head of a dense model, for rows of one new token each, as one op."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quickturn_kernels.ops.linear import LinearWeight
from quickturn_kernels.registry import Op, define

Caches = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class StackLayer:
    """The weights of one decoder layer: norm, q|k|v, attention, output, norm, gate|up, down.

    Norms: [H]. qkv: [(Hq + 2 Hkv) D, H]. o: [H, Hq D]. gate_up: [2 I, H], the gate's rows first. down: [H,
    I]. q_norm, k_norm: [D] or None. Biases: as many elements as their matrix has rows, or None.
    """

    attn_norm: Tensor
    qkv: LinearWeight
    o: LinearWeight
    mlp_norm: Tensor
    gate_up: LinearWeight
    down: LinearWeight
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class DecoderStack:
    """Decoder layers of one shape, the last norm [H] and the head [V, H].

    cos_sin: float32 [positions, D]. eps is that of every norm; window 0 sees all keys.
    """

    layers: tuple[StackLayer, ...]
    norm: Tensor
    head: LinearWeight
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float
    cos_sin: Tensor
    window: int = 0


_STACK: Op[Callable[[DecoderStack, Tensor, Caches, Tensor, Tensor, Tensor, Tensor, int], Tensor]] = define(
    "decode_stack"
)
_ROWS: Op[Callable[[DecoderStack], int]] = define("decode_stack_rows")


def decode_stack(
    stack: DecoderStack,
    x: Tensor,
    caches: Caches,
    positions: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    max_context_len: int,
) -> Tensor:
    """The logits of rows of one new token each, whose keys and values go to the caches.

    x: [R, H], the embeddings. caches: (keys, values) of each layer, and the other arguments as in
    `rotary_attention_decode`; x may serve as the residual stream, so that its content is unspecified
    afterwards. Equal to the ops of the layers one after the other up to the order of sums; a row's result
    doesn't depend on the other rows. Returns float32 [R, V].

    An implementation may keep workspaces with the stack: calls with one stack must follow each other on one
    stream, and the first must not be captured.
    """
    function = _STACK.table.get((x.device, x.dtype))
    if function is None:
        function = _STACK.bind(x.device, x.dtype)
    return function(stack, x, caches, positions, slot_mapping, block_tables, context_lens, max_context_len)


def decode_stack_rows(stack: DecoderStack) -> int:
    """Up to how many rows `decode_stack` is faster than its ops one after the other; 0 where it never is."""
    key = (stack.norm.device, stack.norm.dtype)
    function = _ROWS.table.get(key)
    if function is None:
        function = _ROWS.bind(*key)
    return function(stack)
