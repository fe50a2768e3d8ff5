"""Random decoder stacks, and cases of decode_stack: a stack's logits and what it leaves in its caches."""

from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Generator, Tensor

from quickturn_kernels.numerics.check import Case, Result
from quickturn_kernels.ops.decode_stack import Caches, DecoderStack, StackLayer, decode_stack
from quickturn_kernels.ops.linear import PLAIN, LinearWeight


@dataclass(frozen=True)
class StackShape:
    """Sizes of a random stack, and the contexts of its rows."""

    name: str
    contexts: tuple[int, ...]
    layers: int = 2
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    inner: int = 512
    vocab: int = 320
    head_dim: int = 128
    block_tokens: int = 64
    window: int = 0
    norms: bool = True
    biases: bool = False
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class StackInputs:
    """Everything that one call takes but the stack."""

    x: Tensor
    caches: Caches
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    context_lens: Tensor
    max_context_len: int

    def run(self, stack: DecoderStack) -> Tensor:
        """The op on a copy of x."""
        return decode_stack(
            stack,
            self.x.clone(),
            self.caches,
            self.positions,
            self.slot_mapping,
            self.block_tables,
            self.context_lens,
            max_context_len=self.max_context_len,
        )

    def rows(self, first: int, count: int) -> "StackInputs":
        """The same call for some of its rows."""
        part = slice(first, first + count)
        return replace(
            self,
            x=self.x[part],
            positions=self.positions[part],
            slot_mapping=self.slot_mapping[part],
            block_tables=self.block_tables[part],
            context_lens=self.context_lens[part],
        )


def _plain(values: Tensor) -> LinearWeight:
    return LinearWeight((values.shape[0], values.shape[1]), values.dtype, PLAIN, (values,))


def random_stack(shape: StackShape, generator: Generator, device: torch.device) -> DecoderStack:
    """A stack whose activations stay near one."""

    def matrix(rows: int, columns: int) -> LinearWeight:
        values = torch.randn(rows, columns, generator=generator, device=generator.device) * columns**-0.5
        return _plain(values.to(shape.dtype).to(device))

    def vector(size: int, around: float) -> Tensor:
        values = around + 0.1 * torch.randn(size, generator=generator, device=generator.device)
        return values.to(shape.dtype).to(device)

    attended, qkv = shape.heads * shape.head_dim, (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    rows = {"qkv": qkv, "o": shape.hidden, "gate_up": 2 * shape.inner, "down": shape.hidden}
    columns = {"qkv": shape.hidden, "o": attended, "gate_up": shape.hidden, "down": shape.inner}
    layers = []
    for _ in range(shape.layers):
        matrices = {name: matrix(rows[name], columns[name]) for name in rows}
        extra: dict[str, Tensor] = {}
        if shape.norms:
            extra |= {name: vector(shape.head_dim, 1.0) for name in ("q_norm", "k_norm")}
        if shape.biases:
            extra |= {f"{name}_bias": vector(size, 0.0) for name, size in rows.items()}
        norms = {name: vector(shape.hidden, 1.0) for name in ("attn_norm", "mlp_norm")}
        layers.append(StackLayer(**matrices, **norms, **extra))  # type: ignore[arg-type]
    longest = max(shape.contexts) + 1
    angles = torch.rand(longest, shape.head_dim // 2, generator=generator, device=generator.device) * 6.28
    return DecoderStack(
        layers=tuple(layers),
        norm=vector(shape.hidden, 1.0),
        head=matrix(shape.vocab, shape.hidden),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        eps=1e-6,
        cos_sin=torch.cat((angles.cos(), angles.sin()), 1).to(device),
        window=shape.window,
    )


def random_inputs(shape: StackShape, generator: Generator, device: torch.device) -> StackInputs:
    """Rows at the shape's contexts, over pages in random order that belong to all layers."""
    rows, size = len(shape.contexts), shape.block_tokens
    width = -(-max(shape.contexts) // size) + 1
    pages = (rows * width, shape.layers, 2, size, shape.kv_heads, shape.head_dim)
    arena = torch.randn(pages, generator=generator, device=generator.device).to(shape.dtype).to(device)
    order = torch.randperm(rows * width, generator=generator, device=generator.device).to(device)
    tables = order.to(torch.int32).view(rows, width)
    lens = torch.tensor(shape.contexts, dtype=torch.int32, device=device)
    positions = (lens.long() - 1).clamp(min=0)
    blocks = tables[torch.arange(rows, device=device), positions // size].long()
    x = torch.randn(rows, shape.hidden, generator=generator, device=generator.device)
    return StackInputs(
        x=x.to(shape.dtype).to(device),
        caches=[(arena[:, layer, 0], arena[:, layer, 1]) for layer in range(shape.layers)],
        positions=positions,
        slot_mapping=torch.where(lens > 0, blocks * size + positions % size, -1),
        block_tables=tables,
        context_lens=lens,
        max_context_len=max(shape.contexts) + 70,
    )


def widened(stack: DecoderStack) -> DecoderStack:
    """The same numbers in float32."""

    def wide(value: object) -> object:
        if isinstance(value, Tensor):
            return value.float()
        return _plain(value.tensors[0].float()) if isinstance(value, LinearWeight) else value

    def each(one: StackLayer) -> StackLayer:
        return StackLayer(**{field.name: wide(getattr(one, field.name)) for field in fields(one)})  # type: ignore[arg-type]

    head = _plain(stack.head.tensors[0].float())
    return replace(stack, layers=tuple(map(each, stack.layers)), norm=stack.norm.float(), head=head)


SHAPES = (
    StackShape("one row", (200,)),
    StackShape("ragged", (1, 64, 65, 0, 200)),
    StackShape("eight rows, biases", (3, 700, 16, 17, 33, 0, 32, 5), biases=True, norms=False),
    StackShape("one long row", (4100,), heads=8, kv_heads=8, layers=3),
    StackShape("window", (5, 300, 129), window=100, heads=8, kv_heads=1, block_tokens=32),
    StackShape("odd sizes", (65, 129), hidden=768, inner=1280, heads=6, kv_heads=2, vocab=1000),
)


def relative_error(want: Tensor, got: Tensor) -> float:
    """The norm of the difference over the norm of `want`."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def decode_stack_cases() -> tuple[Case, ...]:
    """Every shape, in bfloat16. Rounding adds up over the layers: errors are judged by norm."""
    return tuple(Case("decode_stack", shape.name, shape.dtype, {}, partial(_run, shape)) for shape in SHAPES)


def _close(want: Tensor, got: Tensor) -> bool:
    return relative_error(want, got) < 2.5e-2


def _run(shape: StackShape, generator: Generator, device: torch.device) -> Result:
    stack = random_stack(shape, generator, device)
    inputs = random_inputs(shape, generator, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    outputs = {"out": inputs.run(stack)}
    for index, (keys, values) in enumerate(inputs.caches):
        outputs |= {f"keys {index}": keys, f"values {index}": values}
    return Result(outputs, accept=dict.fromkeys(outputs, _close))
