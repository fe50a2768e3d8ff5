"""Compile every Triton kernel for sm_90 on a machine without a GPU, at the shapes of real models.

The public ops run on CPU tensors with the launcher replaced: a launch compiles the kernel for the arguments
it got, and runs nothing. Prints one JSON object a kernel variant: registers, spilled bytes, shared memory,
and the instructions that decide speed. Must be a process of its own: Triton decides at import whether it
interprets.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import quickturn_kernels as kernels
from quickturn_kernels import registry, triton_common
from quickturn_kernels.ops.fp8_linear.triton import quantize_groups, quantize_whole_rows
from quickturn_kernels.ops.linear import PLAIN, prepare_fp8_linear
from quickturn_kernels.ops.linear.fp8 import FP8_BLOCK
from quickturn_kernels.ops.moe import triton as triton_moe
from quickturn_kernels.ops.moe.triton_tiles import empty_tiles
from quickturn_kernels.ops.moe.weights import ExpertWeights
from quickturn_kernels.platform import ANY

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
label = ""
seen: set[str] = set()


def compile_launch(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Stands in for JITFunction.run."""
    names = self.arg_names
    bound = dict(zip(names, arguments, strict=False))
    bound.update({name: value for name, value in options.items() if name in names})
    settings = {name: value for name, value in options.items() if name not in names}
    constant = {param.name for param in self.params if param.is_constexpr}
    general = {param.name for param in self.params if param.do_not_specialize}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value = bound[name]
        one = value is not None and type(value) is int and value == 1 and name not in general
        if name in constant or value is None or one:
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and name not in general:
                attributes[(index,)] = [["tt.divisibility", 16]]
    key = f"{self.fn.__name__} {label} {sorted(settings.items())}"
    if key in seen:
        return
    seen.add(key)
    source = ASTSource(self, signature, constants, attributes)
    report(self.fn.__name__, triton.compile(source, target=TARGET, options=settings))


def report(name: str, compiled: Any) -> None:
    """One line of JSON."""
    ptx = compiled.asm["ptx"]
    usage = resource_usage(compiled.asm["cubin"])
    found = {
        "kernel": name,
        "case": label,
        "warps": compiled.metadata.num_warps,
        "shared": compiled.metadata.shared,
        **usage,
        "stack_pointer_misused": stack_pointer_misused(compiled.asm["cubin"]),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "cp_async": ptx.count("cp.async.c"),
        "before_wait": before_wait(ptx),
        "global_loads": dict(sorted(count(re.findall(r"ld\.global[.\w:]*", ptx)).items())),
    }
    print(json.dumps(found), flush=True)
    if directory := os.environ.get("DUMP"):
        for kind in ("ptx", "ttgir"):
            with open(f"{directory}/{name}-{re.sub(r'[^A-Za-z0-9]+', '-', label)}.{kind}", "w") as file:
                file.write(compiled.asm[kind])


def before_wait(ptx: str) -> list[str] | None:
    """What touches memory before the launches ahead have finished; None if they aren't waited for."""
    ahead, waits, _ = ptx.partition("griddepcontrol.wait")
    return sorted(set(re.findall(r"(?:ld\.global|st\.global|cp\.async)[.\w:]*", ahead))) if waits else None


def count(words: Sequence[str]) -> dict[str, int]:
    """How often each word occurs."""
    return {word: words.count(word) for word in set(words)}


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of stack (spills), from the ELF; empty when cuobjdump isn't there."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", inspected(cubin, "cuobjdump", "-res-usage"))
    return {"registers": int(found[1]), "stack": int(found[2])} if found else {}


def stack_pointer_misused(cubin: bytes) -> int:
    """Instructions that take R1 for anything but the stack: the assembler's mistake of
    `quickturn_kernels.assembler`.
    """
    # Where an operand doesn't matter, R1 stands for it as well: of PRMT the second source, if only bytes of
    # the first are selected.
    allowed = re.compile(
        r"LDC R1, c\[0x0\]|I?ADD3? R1, R1, -?0x|\[R1(\+-?0x[0-9a-f]+)?\]|PRMT R\d+, R\d+, RZ, R1\b"
    )
    lines = inspected(cubin, "nvdisasm", "-c").splitlines()
    return sum(re.search(r"\bR1\b", line) is not None and not allowed.search(line) for line in lines)


def inspected(cubin: bytes, name: str, option: str) -> str:
    """What one of Triton's tools prints about a kernel; nothing when it isn't there."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)
    if not os.path.exists(tool):
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=False).stdout


def attention(head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype, **options: Any) -> None:
    """Decode, long prefill, drafts (4 tokens a row) and a short chunk over a long context."""
    global label
    label = f"D{head_dim} {heads}/{kv_heads} {str(dtype)[6:]} {' '.join(options)}".strip()
    block_tokens = 64
    cache = torch.empty((4, 3, 2, block_tokens, kv_heads, head_dim), dtype=dtype)[:, 1]
    tables = torch.zeros((2, 16), dtype=torch.int32)
    lens = torch.tensor([500, 500], dtype=torch.int32)
    arguments = (cache[:, 0], cache[:, 1], tables)
    kernels.paged_attention_decode(
        torch.empty((2, heads, head_dim), dtype=dtype), *arguments, lens, 0.1, max_context_len=1024, **options
    )
    base = label
    label = f"{base}: parts"
    if not options:
        mine = kernels.partial_attention_decode(
            torch.empty((2, heads, head_dim), dtype=dtype), *arguments, lens, 0.1, max_context_len=1024
        )
        kernels.merge_attention(mine.expand(4, -1, -1, -1).contiguous(), torch.zeros(heads), dtype)
    for tokens, bound in ((1024, 512), (8, 65536)):
        label = f"{base}: {'prefill' if tokens > 8 else 'drafts'}"
        starts = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)
        kernels.paged_attention_prefill(
            torch.empty((tokens, heads, head_dim), dtype=dtype),
            *arguments,
            starts,
            lens,
            tokens // 2,
            0.1,
            max_context_len=bound,
            **options,
        )


def dense(dtype: torch.dtype) -> None:
    """Everything else, at the sizes of an 8B model."""
    global label
    label = str(dtype)[6:]
    x = torch.zeros((2, 4096), dtype=dtype)
    weight = torch.ones(4096, dtype=dtype)
    kernels.rms_norm(x, weight, 1e-6)
    kernels.add_rms_norm(x, x, weight, 1e-6)
    kernels.silu_and_mul(torch.zeros((2, 24576), dtype=dtype))
    kernels.embedding(torch.zeros(2, dtype=torch.int64), torch.zeros((8, 4096), dtype=dtype))
    fused = torch.zeros((2, 48, 128), dtype=dtype)
    cache = torch.zeros((4, 3, 2, 64, 8, 128), dtype=dtype)[:, 1]
    for norm in (None, torch.ones(128, dtype=dtype)):
        label = f"{str(dtype)[6:]} {'norm' if norm is not None else 'plain'}"
        kernels.rotary_cache_write(
            fused[:, :32],
            fused[:, 32:40],
            fused[:, 40:],
            torch.zeros(2, dtype=torch.int64),
            torch.zeros((64, 128)),
            cache[:, 0],
            cache[:, 1],
            torch.zeros(2, dtype=torch.int64),
            q_weight=norm,
            k_weight=norm,
        )


def sampling(dtype: torch.dtype) -> None:
    """All the options, and none."""
    global label
    rows, vocabulary = 2, 151936
    real, whole = torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)
    base = (real, torch.zeros(rows, dtype=torch.int32), real, real, whole, whole)
    logits = torch.zeros((rows, vocabulary), dtype=dtype)
    label = f"{str(dtype)[6:]} plain"
    kernels.sample(logits, kernels.SamplingTensors(*base))
    label = f"{str(dtype)[6:]} no filters"
    kernels.sample(logits, kernels.SamplingTensors(*base, no_filters=True))
    label = f"{str(dtype)[6:]} greedy"
    kernels.sample(logits, kernels.SamplingTensors(*base, all_greedy=True))
    label = f"{str(dtype)[6:]} everything"
    counts = torch.zeros((rows, vocabulary), dtype=torch.int32)
    full = kernels.SamplingTensors(
        *base,
        presence=real,
        frequency=real,
        repetition=real,
        counts=counts,
        count_rows=whole,
        bias_ids=torch.zeros((rows, 8), dtype=torch.int32),
        bias_values=torch.zeros((rows, 8)),
        bitmask=torch.zeros((rows, 4748), dtype=torch.int32),
    )
    kernels.sample(logits, full)
    label = f"{str(dtype)[6:]} one chunk"
    kernels.sample(logits[:, :9], kernels.SamplingTensors(*base))


def mixture(dtype: torch.dtype) -> None:
    """Qwen3.5-35B-A3B's experts: a step of few tokens, and prompts."""
    global label
    stored = torch.float8_e4m3fn if dtype == torch.float8_e4m3fn else dtype
    dtype = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    # Nothing is read, so the experts can share their memory.
    gate_up = torch.empty(1, 1024, 2048).to(stored).expand(256, -1, -1)
    down = torch.empty(1, 2048, 512).to(stored).expand(256, -1, -1)
    scales = (torch.empty(256, 8, 16), torch.empty(256, 16, 4)) if stored != dtype else (None, None)
    layout = PLAIN if stored == dtype else FP8_BLOCK
    experts = ExpertWeights(layout, "silu", gate_up, down, None, None, *scales)
    for tokens in (1, 512, 2048, 8192):
        label = f"{str(stored)[6:]} {tokens}"
        weights, chosen = kernels.route(torch.empty(tokens, 256), 8)
        kernels.moe(torch.empty(tokens, 2048, dtype=dtype), experts, weights, chosen)


def mixture_among_launches(stored: torch.dtype) -> None:
    """The same experts' products with early launch, in bfloat16 with the shared expert among them."""
    global label
    label = f"{str(stored)[6:]} early"
    gate_up = torch.empty(1, 1024, 2048).to(stored).expand(256, -1, -1)
    down = torch.empty(1, 2048, 512).to(stored).expand(256, -1, -1)
    fp8 = stored == torch.float8_e4m3fn
    scales = (torch.empty(256, 8, 16), torch.empty(256, 16, 4)) if fp8 else (None, None)
    experts = ExpertWeights(FP8_BLOCK if fp8 else PLAIN, "silu", gate_up, down, None, None, *scales)
    shared = (None, None) if fp8 else (torch.empty(1024, 2048, dtype=stored), down[0])
    x = torch.empty(8, 2048, dtype=torch.bfloat16)
    shape = triton_moe.shape_for(64, experts, x.dtype)
    tiles = empty_tiles(72, 257, shape.rows, x.device)
    inner = triton_moe.gate_up(x, experts, tiles, 9, shape, shared[0], early=True)
    triton_moe.down(inner, experts, tiles, shape, shared[1], early=True)


def linear_attention(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """A gated delta net of 16 k heads and 32 v heads: prompts with boundaries, and one token a row."""
    global label
    label = f"{str(dtype)[6:]} {str(state_dtype)[6:]}"
    tokens, rows, key_heads, heads, dim = 512, 2, 16, 32, 128
    channels = (2 * key_heads + heads) * dim
    x, weight = torch.zeros((tokens, channels), dtype=dtype), torch.zeros((channels, 4), dtype=dtype)
    blocks = torch.zeros(rows, dtype=torch.int32)
    places = (blocks, blocks, torch.zeros(rows, dtype=torch.bool))
    starts = torch.tensor([0, 100, tokens], dtype=torch.int32)
    kept = kernels.Boundaries(starts, blocks, blocks)
    conv_states = torch.zeros((2, channels, 3), dtype=dtype)
    kernels.causal_conv1d(
        x, weight, conv_states, *places, query_start=starts, max_query_len=tokens, boundaries=kept
    )
    states = torch.zeros((2, 3, heads, dim, dim), dtype=state_dtype)[:, 1]
    gates = (torch.zeros((tokens, heads), dtype=dtype),) * 2 + (torch.zeros(heads),) * 2
    heads_of = torch.zeros((tokens, key_heads, dim), dtype=dtype)
    values = torch.zeros((tokens, heads, dim), dtype=dtype)
    kernels.gated_delta_prefill(
        heads_of,
        heads_of,
        values,
        *gates,
        states,
        *places,
        query_start=starts,
        max_query_len=tokens,
        scale=0.1,
        context_lens=blocks,
        boundaries=kept,
    )
    few = slice(0, rows)
    kernels.gated_delta_decode(
        heads_of[few],
        heads_of[few],
        values[few],
        gates[0][few],
        gates[1][few],
        *gates[2:],
        states,
        *places,
        scale=0.1,
    )
    kernels.gated_rms_norm(values, values, torch.zeros(dim, dtype=dtype), 1e-6)
    label += " channelwise"
    by_channel = (
        torch.zeros((tokens, heads, dim), dtype=dtype),
        gates[1],
        gates[2],
        torch.zeros((heads, dim)),
    )
    kernels.gated_delta_prefill(
        values,
        values,
        values,
        *by_channel,
        states,
        *places,
        query_start=starts,
        max_query_len=tokens,
        scale=0.1,
        boundaries=kept,
    )


def fp8() -> None:
    """Products with fp8 weights, few rows and many, and their activations as the Hopper kernels want them."""
    global label
    for rows in (2, 48, 512):
        label = f"{rows} rows"
        x = torch.zeros((rows, 4096), dtype=torch.bfloat16)
        quantize_groups(x, rows=-(-rows // 16) * 16, permuted=True)
        quantize_whole_rows(x, permuted=True)
        for scale in (torch.zeros(8, 32), torch.zeros(1024)):
            weight = torch.zeros((1024, 4096), dtype=torch.uint8).view(torch.float8_e4m3fn)
            with registry.use(linear="triton_fp8"):
                kernels.linear(x, prepare_fp8_linear(weight, scale), x[0, :1024])
    label = "e4m3 cache"
    dtype = torch.bfloat16
    cache = torch.empty((4, 3, 2, 64, 8, 128), dtype=torch.uint8).view(torch.float8_e4m3fn)[:, 1]
    keys, values = cache[:, 0], cache[:, 1]
    whole = torch.zeros(2, dtype=torch.int64)
    lens, tables = torch.zeros(2, dtype=torch.int32), torch.zeros((2, 16), dtype=torch.int32)
    starts = torch.zeros(3, dtype=torch.int32)
    q, k = torch.empty((1024, 32, 128), dtype=dtype), torch.empty((2, 8, 128), dtype=dtype)
    ops = ("rotary_cache_write", "paged_attention_decode", "paged_attention_prefill")
    with registry.use(**dict.fromkeys(ops, "triton_fp8")):
        kernels.rotary_cache_write(q[:2], k, k, whole, torch.empty((64, 128)), keys, values, whole)
        kernels.paged_attention_decode(q[:2], keys, values, tables, lens, 0.1, max_context_len=1024)
        kernels.paged_attention_prefill(q, keys, values, tables, starts, lens, 512, 0.1, max_context_len=512)


PLANS: dict[str, tuple[Callable[[], None], ...]] = {
    "attention": (
        lambda: attention(128, 32, 8, torch.bfloat16),
        lambda: attention(256, 16, 2, torch.bfloat16),
        lambda: attention(80, 32, 8, torch.bfloat16),
        lambda: attention(64, 8, 8, torch.float32),
        lambda: attention(64, 64, 8, torch.float16, window=128, sinks=torch.zeros(64), softcap=30.0),
    ),
    "dense": (lambda: dense(torch.bfloat16), lambda: dense(torch.float32)),
    "fp8": (fp8,),
    "moe": (
        lambda: mixture(torch.bfloat16),
        lambda: mixture(torch.float32),
        lambda: mixture(torch.float8_e4m3fn),
    ),
    "early": (
        lambda: mixture_among_launches(torch.bfloat16),
        lambda: mixture_among_launches(torch.float8_e4m3fn),
    ),
    "linear_attention": (
        lambda: linear_attention(torch.bfloat16, torch.float32),
        lambda: linear_attention(torch.bfloat16, torch.bfloat16),
    ),
    "sampling": (lambda: sampling(torch.bfloat16), lambda: sampling(torch.float32)),
}


def main() -> None:
    """Compile the plans named on the command line, or all."""
    triton_common.INTERPRETED_UNITS = 132
    registry.load(every_tier=True)
    for op in registry.ops():
        for one in registry.implementations(op):
            if one.name.startswith("triton"):
                registry.register(
                    op, name=one.name, platform=ANY, dtypes=tuple(one.dtypes or ()), traits=one.traits
                )(one.function)
    JITFunction.run = compile_launch
    registry.override({"*": "triton"})
    for name in sys.argv[1:] or PLANS:
        for plan in PLANS[name]:
            plan()


if __name__ == "__main__":
    main()
