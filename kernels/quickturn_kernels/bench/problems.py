"""What is measured: ops at the shapes of real models, with the bytes and FLOPs that each needs at least."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels import SamplingTensors
from quickturn_kernels.bench.experts import expert_problems
from quickturn_kernels.bench.linear_attention import linear_attention_problems
from quickturn_kernels.bench.problem import Problem

BLOCK_TOKENS = 64


@dataclass(frozen=True)
class Model:
    """The sizes of a dense decoder that decide its kernels' shapes."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


QWEN3_8B = Model(4096, 12288, 32, 8, 128, 151936)
QWEN35_ATTENTION = Model(2048, 512, 16, 2, 256, 248320)
SMOLLM2 = Model(576, 1536, 9, 3, 64, 49152)


def problems(device: torch.device, dtype: torch.dtype) -> tuple[Problem, ...]:
    """The shapes of an 8B model and a mixture of experts on a GPU, of small models elsewhere."""
    return (
        *_decoder_problems(device, dtype),
        *linear_attention_problems(device, dtype),
        *expert_problems(device, dtype),
    )


def _decoder_problems(device: torch.device, dtype: torch.dtype) -> tuple[Problem, ...]:
    if device.type != "cuda":
        return _all(
            SMOLLM2,
            device,
            dtype,
            rows=(1, 8, 512),
            decodes=((512,), (2048,), (512,) * 8),
            prefills=(((512,), (512,)), ((2048,), (2048,)), ((64,), (2048,))),
        )
    hybrid = Problems(QWEN35_ATTENTION, device, dtype)
    return (
        *_all(
            QWEN3_8B,
            device,
            dtype,
            rows=(1, 64, 8192),
            decodes=(
                (2048,),
                (32768,),
                (131072,),
                (2048,) * 8,
                (2048,) * 32,
                (2048,) * 64,
                (8192,) * 64,
                (65536, *(1024,) * 31),
            ),
            prefills=(
                ((2048,), (2048,)),
                ((8192,), (8192,)),
                ((32768,), (32768,)),
                ((2048,) * 4, (2048,) * 4),
                ((720,), (104644,)),
                ((4,) * 8, (8192,) * 8),
            ),
        ),
        *(hybrid.decode(lens) for lens in ((2048,), (32768,), (32768,) * 8, (8192,) * 64)),
        *(hybrid.prefill((length,), (length,)) for length in (2048, 8192, 32768)),
    )


def _all(
    model: Model,
    device: torch.device,
    dtype: torch.dtype,
    rows: Sequence[int],
    decodes: Sequence[Sequence[int]],
    prefills: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> tuple[Problem, ...]:
    make = Problems(model, device, dtype)
    found = []
    for count in rows:
        found += [
            make.rms_norm(count),
            make.add_rms_norm(count),
            make.silu_and_mul(count),
            make.embedding(count),
            make.rotary(count),
        ]
    projections = (
        ((model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden),
        (2 * model.intermediate, model.hidden),
        (model.hidden, model.intermediate),
        (model.vocabulary, model.hidden),
    )
    found += [make.linear(count, *size) for count in (1, 8, 64) for size in projections]
    found += [make.decode(lens) for lens in decodes]
    found += [make.prefill(queries, contexts) for queries, contexts in prefills]
    found += [
        make.sample(count, kind) for count in (1, 64) for kind in ("greedy", "plain", "top-p", "top-k, top-p")
    ]
    return tuple(found)


@dataclass(frozen=True)
class Problems:
    """Makes the problems of one model on one device."""

    model: Model
    device: torch.device
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    def random(self, *shape: int) -> Tensor:
        """Normal values of the problem's dtype."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def rms_norm(self, rows: int) -> Problem:
        """[rows, hidden]."""
        hidden = self.model.hidden

        def build() -> Callable[[], object]:
            return partial(kernels.rms_norm, self.random(rows, hidden), self.random(hidden), 1e-6)

        return Problem("rms_norm", f"{rows} x {hidden}", 2 * rows * hidden * self.itemsize, 0, build)

    def add_rms_norm(self, rows: int) -> Problem:
        """[rows, hidden]."""
        hidden = self.model.hidden

        def build() -> Callable[[], object]:
            x, residual = self.random(rows, hidden), self.random(rows, hidden)
            return partial(kernels.add_rms_norm, x, residual, self.random(hidden), 1e-6)

        return Problem("add_rms_norm", f"{rows} x {hidden}", 4 * rows * hidden * self.itemsize, 0, build)

    def silu_and_mul(self, rows: int) -> Problem:
        """[rows, 2 * intermediate]."""
        width = self.model.intermediate

        def build() -> Callable[[], object]:
            return partial(kernels.silu_and_mul, self.random(rows, 2 * width))

        return Problem("silu_and_mul", f"{rows} x {2 * width}", 3 * rows * width * self.itemsize, 0, build)

    def embedding(self, rows: int) -> Problem:
        """rows of the vocabulary's table."""
        vocabulary, hidden = self.model.vocabulary, self.model.hidden

        def build() -> Callable[[], object]:
            ids = torch.randint(vocabulary, (rows,), device=self.device)
            return partial(kernels.embedding, ids, self.random(vocabulary, hidden))

        return Problem(
            "embedding", f"{rows} of {vocabulary} x {hidden}", 2 * rows * hidden * self.itemsize, 0, build
        )

    def rotary(self, rows: int) -> Problem:
        """Head norms, rotary and cache write of one layer."""
        model = self.model
        heads = model.heads + 2 * model.kv_heads

        def build() -> Callable[[], object]:
            fused = self.random(rows, heads, model.head_dim)
            blocks = -(-rows // BLOCK_TOKENS)
            cache = torch.empty(
                (blocks, 2, BLOCK_TOKENS, model.kv_heads, model.head_dim),
                device=self.device,
                dtype=self.dtype,
            )
            return partial(
                kernels.rotary_cache_write,
                fused[:, : model.heads],
                fused[:, model.heads : model.heads + model.kv_heads],
                fused[:, model.heads + model.kv_heads :],
                torch.arange(rows, device=self.device),
                torch.rand(rows, model.head_dim, device=self.device),
                cache[:, 0],
                cache[:, 1],
                torch.arange(rows, device=self.device),
                q_weight=self.random(model.head_dim),
                k_weight=self.random(model.head_dim),
            )

        moved = rows * model.head_dim * (2 * heads * self.itemsize + 4)
        return Problem("rotary_cache_write", f"{rows} x {heads} x {model.head_dim}", moved, 0, build)

    def linear(self, rows: int, columns: int, features: int) -> Problem:
        """[rows, features] times [columns, features] transposed."""

        def build() -> Callable[[], object]:
            return partial(
                kernels.linear,
                self.random(rows, features),
                kernels.prepare_linear(self.random(columns, features)),
            )

        moved = (rows * (features + columns) + columns * features) * self.itemsize
        return Problem(
            "linear", f"{rows} x {features} -> {columns}", moved, 2 * rows * columns * features, build
        )

    def decode(self, lens: Sequence[int]) -> Problem:
        """One query a row over contexts of these lengths."""
        model = self.model
        keys = sum(lens)

        def build() -> Callable[[], object]:
            k_cache, v_cache, tables = self.cache(lens)
            return partial(
                kernels.paged_attention_decode,
                self.random(len(lens), model.heads, model.head_dim),
                k_cache,
                v_cache,
                tables,
                torch.tensor(lens, dtype=torch.int32, device=self.device),
                model.head_dim**-0.5,
                max_context_len=max(lens),
            )

        moved = 2 * (keys * model.kv_heads + len(lens) * model.heads) * model.head_dim * self.itemsize
        flops = 4 * keys * model.heads * model.head_dim
        return Problem("paged_attention_decode", f"{self.heads()} {_lengths(lens)}", moved, flops, build)

    def prefill(self, queries: Sequence[int], contexts: Sequence[int]) -> Problem:
        """The last `queries` tokens of each context, causal."""
        model = self.model
        tokens = sum(queries)

        def build() -> Callable[[], object]:
            k_cache, v_cache, tables = self.cache(contexts)
            ends = torch.tensor((0, *queries)).cumsum(0).to(torch.int32)
            return partial(
                kernels.paged_attention_prefill,
                self.random(tokens, model.heads, model.head_dim),
                k_cache,
                v_cache,
                tables,
                ends.to(self.device),
                torch.tensor(contexts, dtype=torch.int32, device=self.device),
                max(queries),
                model.head_dim**-0.5,
                max_context_len=max(contexts),
            )

        moved = 2 * (sum(contexts) * model.kv_heads + tokens * model.heads) * model.head_dim * self.itemsize
        pairs = sum(
            count * context - count * (count - 1) // 2
            for count, context in zip(queries, contexts, strict=True)
        )
        shape = f"{self.heads()} {_lengths(queries)} at {_lengths(contexts)}"
        return Problem(
            "paged_attention_prefill", shape, moved, 4 * pairs * model.heads * model.head_dim, build
        )

    def sample(self, rows: int, kind: str) -> Problem:
        """Peaked logits, as models give them."""
        vocabulary = self.model.vocabulary

        def build() -> Callable[[], object]:
            logits = self.random(rows, vocabulary) * 2
            logits[:, :: vocabulary // 8] += 12
            whole = torch.ones(rows, device=self.device)
            index = torch.arange(rows, device=self.device)
            params = SamplingTensors(
                temperature=whole * (0.0 if kind == "greedy" else 0.8),
                top_k=(whole * (40 if "top-k" in kind else 0)).int(),
                top_p=whole * (0.95 if "top-p" in kind else 1.0),
                min_p=whole * 0,
                seeds=index,
                positions=index,
                all_greedy=kind == "greedy",
                no_filters="top" not in kind,
            )
            return partial(kernels.sample, logits, params)

        return Problem("sample", f"{rows} x {vocabulary} {kind}", rows * vocabulary * self.itemsize, 0, build)

    def cache(self, lens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """One layer's caches, blocks in random order, and the tables."""
        model = self.model
        counts = [-(-length // BLOCK_TOKENS) for length in lens]
        size = (sum(counts), 2, BLOCK_TOKENS, model.kv_heads, model.head_dim)
        cache = torch.empty(size, device=self.device, dtype=self.dtype).normal_()
        order = torch.randperm(sum(counts)).to(torch.int32)
        tables = torch.zeros((len(lens), max(counts)), dtype=torch.int32)
        used = 0
        for row, count in enumerate(counts):
            tables[row, :count] = order[used : used + count]
            used += count
        return cache[:, 0], cache[:, 1], tables.to(self.device)

    def heads(self) -> str:
        """Query heads / kv heads and head dim."""
        return f"{self.model.heads}/{self.model.kv_heads} d{self.model.head_dim}"


def _lengths(lens: Sequence[int]) -> str:
    """[2048] * 3 as "3 x 2048", neighbours of equal length together."""
    parts: list[tuple[int, int]] = []
    for length in lens:
        if parts and parts[-1][1] == length:
            parts[-1] = (parts[-1][0] + 1, length)
        else:
            parts.append((1, length))
    return " + ".join(f"{count} x {length}" for count, length in parts)
