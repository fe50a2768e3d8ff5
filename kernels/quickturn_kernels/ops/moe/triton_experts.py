"""The experts' products in Triton: one program for the rows of a tile and a block of an expert's features.

Weights of float8_e4m3fn are widened to the dtype of x and scaled block by block in float32.
"""

import triton
import triton.language as tl


@triton.jit
def product(a, b, UPCAST: tl.constexpr):
    """a @ b in float32; UPCAST for Triton's interpreter, which multiplies bfloat16 wrongly."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b.to(a.dtype), input_precision="ieee")


@triton.jit
def wait_and_let_start():
    """Wait until the launches ahead have finished; then the next one may start."""
    # One piece of assembly, so that nothing gets in between.
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def gate_up_kernel(
    x,
    weight,
    shared,
    weight_scale,
    bias,
    out,
    tile_experts,
    tile_pairs,
    used,
    x_stride,
    columns,
    features,
    experts,
    TOP: tl.constexpr,
    GPT_OSS: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    EARLY: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """out[pair] = act(gate_up of the pair's expert @ x[pair // TOP]). The weight of expert number `experts`
    is `shared`.
    """
    if EARLY:
        wait_and_let_start()
    steps_n = tl.cdiv(features, BLOCK_N)
    tile = tl.program_id(0) // steps_n
    if tile >= tl.load(used):
        return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    start_n = tl.program_id(0) % steps_n * BLOCK_N
    pair = tl.load(tile_pairs + tile * ROWS + tl.arange(0, ROWS))
    real = pair >= 0
    feature = start_n + tl.arange(0, BLOCK_N)
    inside = feature < features
    column = tl.arange(0, BLOCK_K)
    a_at = x + (pair // TOP).to(tl.int64)[:, None] * x_stride + column[None, :]
    matrix = weight + expert * 2 * features * columns
    if HAS_SHARED:
        matrix = tl.where(expert == experts, shared, matrix)
    gate_at = matrix + feature[None, :] * columns + column[:, None]
    up_at = gate_at + features.to(tl.int64) * columns
    gate = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    blocks_k = tl.cdiv(columns, 128)
    scale_at = weight_scale
    if SCALED:
        scale_at += (expert * (2 * features // 128) + start_n // 128) * blocks_k
    for k in range(0, columns, BLOCK_K):
        if EVEN:
            a = tl.load(a_at + k, mask=real[:, None], other=0.0)
            b = tl.load(gate_at + k, mask=inside[None, :], other=0.0)
            c = tl.load(up_at + k, mask=inside[None, :], other=0.0)
        else:
            left = column < columns - k
            a = tl.load(a_at + k, mask=real[:, None] & left[None, :], other=0.0)
            b = tl.load(gate_at + k, mask=inside[None, :] & left[:, None], other=0.0)
            c = tl.load(up_at + k, mask=inside[None, :] & left[:, None], other=0.0)
        if SCALED:
            gate += product(a, b, UPCAST) * tl.load(scale_at + k // 128)
            up += product(a, c, UPCAST) * tl.load(scale_at + features // 128 * blocks_k + k // 128)
        else:
            gate += product(a, b, UPCAST)
            up += product(a, c, UPCAST)
    if HAS_BIAS:
        at = bias + expert * 2 * features + feature
        gate += tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(at + features, mask=inside, other=0.0).to(tl.float32)[None, :]
    dtype = out.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if GPT_OSS:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        activated = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
    out_at = out + pair.to(tl.int64)[:, None] * features + feature[None, :]
    tl.store(out_at, activated.to(dtype), mask=real[:, None] & inside[None, :])


@triton.jit
def down_kernel(
    inner,
    weight,
    shared,
    weight_scale,
    bias,
    out,
    tile_experts,
    tile_pairs,
    used,
    columns,
    features,
    experts,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    EARLY: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """out[pair] = down of the pair's expert @ inner[pair]. The weight of expert number `experts` is `shared`.
    With EARLY the tiles were ready before the launch ahead let this one start.
    """
    steps_n = tl.cdiv(features, BLOCK_N)
    tile = tl.program_id(0) // steps_n
    # Not from the first cache, which may have what lay there before.
    if tile >= tl.load(used, cache_modifier=".cg"):
        return
    expert = tl.load(tile_experts + tile, cache_modifier=".cg").to(tl.int64)
    start_n = tl.program_id(0) % steps_n * BLOCK_N
    pair = tl.load(tile_pairs + tile * ROWS + tl.arange(0, ROWS), cache_modifier=".cg")
    real = pair >= 0
    feature = start_n + tl.arange(0, BLOCK_N)
    inside = feature < features
    column = tl.arange(0, BLOCK_K)
    a_at = inner + pair.to(tl.int64)[:, None] * columns + column[None, :]
    matrix = weight + expert * features * columns
    if HAS_SHARED:
        matrix = tl.where(expert == experts, shared, matrix)
    b_at = matrix + feature[None, :] * columns + column[:, None]
    if EARLY:
        wait_and_let_start()
    sums = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    blocks_k = tl.cdiv(columns, 128)
    scale_at = weight_scale
    if SCALED:
        scale_at += (expert * tl.cdiv(features, 128) + start_n // 128) * blocks_k
    for k in range(0, columns, BLOCK_K):
        if EVEN:
            a = tl.load(a_at + k, mask=real[:, None], other=0.0)
            b = tl.load(b_at + k, mask=inside[None, :], other=0.0)
        else:
            left = column < columns - k
            a = tl.load(a_at + k, mask=real[:, None] & left[None, :], other=0.0)
            b = tl.load(b_at + k, mask=inside[None, :] & left[:, None], other=0.0)
        if SCALED:
            sums += product(a, b, UPCAST) * tl.load(scale_at + k // 128)
        else:
            sums += product(a, b, UPCAST)
    if HAS_BIAS:
        at = bias + expert * features + feature
        sums += tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :]
    out_at = out + pair.to(tl.int64)[:, None] * features + feature[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def combine_kernel(
    results,
    weights,
    chosen,
    x,
    shared,
    shared_gate,
    out,
    x_stride,
    experts,
    width,
    TOP: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[token]: the weighted sum of its pairs' results in the order of choice, and the shared one."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for j in tl.static_range(TOP):
        pair = token * TOP + j
        expert = tl.load(chosen + pair)
        limit = tl.where((expert >= 0) & (expert < experts), width, 0)
        value = tl.load(results + pair * width + column, mask=column < limit, other=0.0).to(tl.float32)
        total += tl.where(limit > 0, tl.load(weights + pair), 0.0) * value
    if HAS_SHARED:
        value = tl.load(shared + token * width + column, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            row = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(shared_gate + column, mask=inside, other=0.0).to(tl.float32)
            value *= tl.sigmoid(tl.sum(row * gate, axis=0))
        total += value
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)
