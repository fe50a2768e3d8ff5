"""The calls of kernels that a model makes: cases of the numerics suite in the model's own sizes.

Lengths are swept, not drawn: a mask that is wrong at one length is met there. One call with a row for each
length costs little more than a call.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from quickturn_kernels.numerics.attention import Shape, attention_case
from quickturn_kernels.numerics.attention_step import attention_step_case
from quickturn_kernels.numerics.check import Case
from quickturn_kernels.numerics.dense import Matrix, gated_case, linear_cases, norm_cases
from quickturn_kernels.numerics.fp8 import fp8_pair
from quickturn_kernels.numerics.linear_attention import (
    Heads,
    Rows,
    convolution_case,
    gated_norm_case,
    prompt_case,
    step_cases,
)
from quickturn_kernels.numerics.moe import Layer, layer_cases, route_case
from quickturn_kernels.numerics.norm_linear import FoldShape, added_case, normed_cases
from quickturn_kernels.numerics.rotary import Shape as RotaryShape
from quickturn_kernels.numerics.rotary import rotary_case
from quickturn_kernels.numerics.sampling import Options, sampling_case
from quickturn_kernels.ops.linear.fp8 import FP8_BLOCK, FP8_CHANNEL

from quickturn.models.base import Architecture
from quickturn.models.declare import Column, Declaration, GatedColumn, Head, Norm, Row
from quickturn.models.experts import Mix
from quickturn.models.mixers import Attend, Delta

FEW = 8
"""The most rows that a product may have a norm or an addition inside for."""

PROMPT_GROUP = 48
"""Rows of one swept call of prompts: their tokens add up."""


@dataclass(frozen=True)
class Setting:
    """What the shapes depend on besides the model.

    rows: numbers of tokens of a step, for what sees each token by itself. context: the longest context in
    tokens. fp8_cache, fp8_weights: which of them are in e4m3.
    """

    dtype: torch.dtype
    state_dtype: torch.dtype
    block_tokens: int
    context: int
    rows: Sequence[int]
    fp8_cache: bool = False
    fp8_weights: bool = False


def model_cases(architecture: Architecture, setting: Setting) -> list[Case]:
    """Every distinct case of the model, in the order of its steps; then sampling."""
    found: dict[tuple[str, str], Case] = {}
    for declaration in architecture.declarations():
        for case in _cases(declaration, setting):
            found.setdefault((case.op, case.name), case)
    for case in _sampling(architecture.vocab_size, setting):
        found.setdefault((case.op, case.name), case)
    return list(found.values())


def lengths(block_tokens: int, longest: int) -> list[int]:
    """Every length of up to two blocks and a tile, and those around each power of two up to `longest`."""
    every = range(1, min(longest, max(2 * block_tokens, 128)) + 2)
    powers = (1 << exponent for exponent in range(7, longest.bit_length()))
    edges = (power + off for power in powers for off in (-1, 0, 1))
    return sorted({length for length in (*every, *edges, longest - 1, longest) if 1 <= length <= longest})


def _cases(declaration: Declaration, setting: Setting) -> Iterator[Case]:
    match declaration:
        case Norm():
            for rows in setting.rows:
                yield from norm_cases(Matrix(rows, declaration.hidden, setting.dtype))
        case Column():
            columns = sum(part.rows for part in declaration.parts)
            yield from _linear(declaration.columns, columns, declaration.bias, setting)
            for few in _few(declaration.columns, columns, declaration.bias, setting):
                yield normed_cases(few)[0]
        case GatedColumn():
            columns = declaration.gate.rows + declaration.up.rows
            yield from _linear(declaration.columns, columns, declaration.bias, setting, gated=True)
            for few in _few(declaration.columns, columns, declaration.bias, setting):
                yield normed_cases(few)[1]
        case Row():
            yield from _linear(declaration.columns, declaration.rows, declaration.bias, setting)
            for few in _few(declaration.columns, declaration.rows, declaration.bias, setting):
                if not few.wide:  # of a norm's weight
                    yield added_case(few)
        case Head():
            for rows in setting.rows:
                shape = Matrix(rows, declaration.hidden, setting.dtype, declaration.vocab)
                yield from linear_cases(shape, "float32 out")
            for few in _few(declaration.hidden, declaration.vocab, False, setting):
                yield from normed_cases(few, "float32 out")
        case Attend():
            yield from _attention(declaration, setting)
        case Delta():
            yield from _delta(declaration, setting)
        case Mix():
            yield from _mixture(declaration, setting)


def _linear(width: int, columns: int, bias: bool, setting: Setting, *, gated: bool = False) -> Iterator[Case]:
    options = "bias" if bias else ""
    for rows in setting.rows:
        shape = Matrix(rows, width, setting.dtype, columns)
        if setting.fp8_weights:
            for layout in (FP8_BLOCK, FP8_CHANNEL):
                yield fp8_pair(shape, layout, bias)[gated]
        elif gated:
            yield gated_case(shape, options)
        else:
            yield from linear_cases(shape, options)


def _few(width: int, columns: int, bias: bool, setting: Setting) -> Iterator[FoldShape]:
    """Steps of few rows, whose products may have a norm or an addition inside."""
    for rows in () if setting.fp8_weights else setting.rows:
        if rows <= FEW:
            for wide in (False, True):
                yield FoldShape(rows, width, columns, wide, bias=bias, dtype=setting.dtype)


def _attention(attend: Attend, setting: Setting) -> Iterator[Case]:
    whole = Shape(
        "",
        (),
        heads=attend.heads,
        kv_heads=attend.kv_heads,
        head_dim=attend.head_dim,
        block_tokens=setting.block_tokens,
        window=attend.window,
        sinks=bool(attend.sinks),
        softcap=attend.softcap,
        dtype=setting.dtype,
        fp8=setting.fp8_cache,
    )
    label = f"{attend.heads}/{attend.kv_heads} heads of {attend.head_dim}, window {attend.window}"
    swept = lengths(setting.block_tokens, setting.context)
    decode = replace(whole, name=f"{label}, {len(swept)} lengths to {swept[-1]}", contexts=swept)
    yield attention_case("paged_attention_decode", decode)
    if not attend.sinks and not attend.softcap:
        yield attention_step_case(decode, attend.norms is not None)
    for rows in setting.rows:
        contexts = [swept[(7 * row + rows) % len(swept)] for row in range(rows)]
        yield attention_case(
            "paged_attention_decode", replace(whole, name=f"{label}, {rows} rows", contexts=contexts)
        )
    for group, before in _prompts(setting):
        contexts = [query + past for query, past in zip(group, before, strict=True)]
        name = f"{label}, prompts of {group[0]} to {group[-1]} behind {min(before)} to {max(before)}"
        prompts = replace(whole, name=name, contexts=contexts, queries=group)
        yield attention_case("paged_attention_prefill", prompts)
    for tokens in setting.rows:
        yield rotary_case(
            RotaryShape(
                f"{label}, {tokens} tokens, {attend.rotary.dim} turned, norms {attend.norm_kind}",
                tokens,
                heads=attend.heads,
                kv_heads=attend.kv_heads,
                head_dim=attend.head_dim,
                rotary_dim=attend.rotary.dim,
                norm=attend.norms is not None,
                wide_norm=attend.norm_kind != "plain",
                padding=(tokens // 2,) if tokens > 1 else (),
                dtype=setting.dtype,
                fp8=setting.fp8_cache,
            )
        )


def _prompts(setting: Setting) -> Iterator[tuple[list[int], list[int]]]:
    """(query lengths, cached tokens ahead of each), every length once from nothing and once behind some."""
    longest = max(1, setting.context // 2)
    swept = lengths(setting.block_tokens, longest)
    for number, group in enumerate(_groups(swept, PROMPT_GROUP)):
        yield group, [0] * len(group)
        yield group, [(37 * row + 11 * number) % longest + 1 for row in range(len(group))]


def _groups(values: Sequence[int], size: int) -> Iterable[list[int]]:
    return (list(values[start : start + size]) for start in range(0, len(values), size))


def _delta(delta: Delta, setting: Setting) -> Iterator[Case]:
    heads = Heads(
        delta.key_heads,
        delta.value_heads,
        delta.key_dim,
        delta.value_dim,
        setting.dtype,
        setting.state_dtype,
    )
    for rows in setting.rows:
        ones = (1,) * rows
        fresh, padding = tuple(range(1, rows, 3)), tuple(range(2, rows, 7))
        # In place as decode steps are, and from one block to another as at a boundary.
        for in_place in (True, False):
            name = f"{rows} rows{', in place' if in_place else ''}"
            batch = Rows(name, ones, fresh=fresh, padding=padding, in_place=in_place)
            yield from step_cases(batch, heads)
            yield convolution_case(batch, delta.channels, delta.width, setting.dtype)
    for group, before in _prompts(setting):
        fresh = tuple(row for row, past in enumerate(before) if not past or row % 5 == 0)
        name = f"prompts of {group[0]} to {group[-1]} behind {min(before)} to {max(before)}"
        batch = Rows(name, tuple(group), before=tuple(before), fresh=fresh, in_place=False)
        yield prompt_case(batch, heads)
        yield convolution_case(batch, delta.channels, delta.width, setting.dtype)
    for rows in setting.rows:
        size = (rows, delta.value_heads, delta.value_dim)
        yield gated_norm_case(size, setting.dtype, setting.dtype, "silu")


def _mixture(mix: Mix, setting: Setting) -> Iterator[Case]:
    words = [
        "fp8" if setting.fp8_weights else "",
        "shared" if mix.shared is not None else "",
        "gated" if mix.shared is not None and mix.shared.gate else "",
        "oss" if mix.activation == "gpt_oss" else "",
        "biased" if mix.experts.gate_up_bias else "",
    ]
    options = " ".join(word for word in words if word)
    for tokens in setting.rows:
        layer = Layer(
            tokens, mix.hidden, mix.intermediate, mix.count, mix.routing.top_k, setting.dtype, options
        )
        yield from layer_cases(layer)
        yield from layer_cases(replace(layer, options=f"{options} outside".strip()))
        yield route_case(tokens, mix.count, torch.float32, mix.routing, "padding")


def _sampling(vocabulary: int, setting: Setting) -> Iterator[Case]:
    filters = ("top_k", "top_p", "min_p")
    for rows in setting.rows:
        whole = Options("", rows=rows, vocabulary=vocabulary, dtype=torch.float32)
        for name, options in (
            ("greedy", replace(whole, greedy=True)),
            ("drawn", whole),
            ("filters", replace(whole, filters=filters, logprobs=5)),
            ("penalties, bias, mask", replace(whole, penalties=True, bias=True, bitmask=True)),
        ):
            yield sampling_case(replace(options, name=f"{rows} x {vocabulary} {name}"))
