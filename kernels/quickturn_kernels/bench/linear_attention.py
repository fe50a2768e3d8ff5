"""What is measured of linear attention: a gated delta net of Qwen3.5-35B-A3B, of a small model elsewhere."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels.bench.problem import Problem


@dataclass(frozen=True)
class Net:
    """Heads of keys and of values, all of one size."""

    key_heads: int
    heads: int
    dim: int

    @property
    def channels(self) -> int:
        """Of q, k and v together."""
        return (2 * self.key_heads + self.heads) * self.dim

    def __str__(self) -> str:
        return f"{self.key_heads}/{self.heads} d{self.dim}"


QWEN35 = Net(16, 32, 128)
SMALL = Net(2, 4, 32)
WIDTH = 4


def linear_attention_problems(device: torch.device, dtype: torch.dtype) -> tuple[Problem, ...]:
    """Decode steps, and prompts: convolution, delta rule and norm; states are float32."""
    on_gpu = device.type == "cuda"
    make = Problems(QWEN35 if on_gpu else SMALL, device, dtype)
    prompts: tuple[tuple[int, ...], ...] = ((2048,), (8192,), (32768,), (1024,) * 8) if on_gpu else ((256,),)
    found = []
    for rows in (1, 8, 64, 256) if on_gpu else (1, 8):
        found += [make.step(rows), make.decode(rows)]
    for lengths in prompts:
        found += [make.convolution(lengths), make.prefill(lengths), make.norm(sum(lengths))]
    return tuple(found)


@dataclass(frozen=True)
class Problems:
    """Makes the problems of one net on one device."""

    net: Net
    device: torch.device
    dtype: torch.dtype

    def random(self, *shape: int) -> Tensor:
        """Normal values of the problem's dtype."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def places(self, rows: int) -> dict[str, Any]:
        """Every row's state stays where it is."""
        block = torch.arange(rows, dtype=torch.int32, device=self.device)
        return {
            "state_in": block,
            "state_out": block,
            "state_zero": torch.zeros_like(block, dtype=torch.bool),
        }

    def states(self, rows: int) -> dict[str, Any]:
        """Recurrent states."""
        net = self.net
        return {"states": torch.randn(rows, net.heads, net.dim, net.dim, device=self.device)}

    def gates(self, tokens: int) -> dict[str, Any]:
        """What decay and beta are made of."""
        heads = self.net.heads
        a_log, dt_bias = torch.randn(2, heads, device=self.device).unbind()
        return {
            "a": self.random(tokens, heads),
            "b": self.random(tokens, heads),
            "a_log": a_log,
            "dt_bias": dt_bias,
        }

    def projected(self, tokens: int) -> dict[str, Any]:
        """q, k and v, as parts of what the convolution gives."""
        net = self.net
        sizes = (net.key_heads * net.dim, net.key_heads * net.dim, net.heads * net.dim)
        parts = self.random(tokens, net.channels).split_with_sizes(sizes, dim=1)
        return {name: part.view(tokens, -1, net.dim) for name, part in zip("qkv", parts, strict=True)}

    def step(self, rows: int) -> Problem:
        """All between the projections, one token a row."""
        net = self.net

        def build() -> Callable[[], object]:
            return partial(
                kernels.gated_delta_step,
                self.random(rows, net.channels),
                self.random(net.channels, WIDTH),
                self.random(rows, net.channels, WIDTH - 1),
                **self.gates(rows),
                **self.states(rows),
                **self.places(rows),
                key_heads=net.key_heads,
                scale=net.dim**-0.5,
                gate=self.random(rows, net.heads, net.dim),
                norm_weight=self.random(net.dim),
            )

        conv = net.channels * (2 * WIDTH - 1) + 2 * net.heads * net.dim
        moved = rows * (8 * net.heads * net.dim**2 + conv * self.dtype.itemsize)
        return Problem("gated_delta_step", f"{net} {rows} rows", moved, self.flops(rows), build)

    def decode(self, rows: int) -> Problem:
        """The delta rule alone."""
        net = self.net

        def build() -> Callable[[], object]:
            return partial(
                kernels.gated_delta_decode,
                **self.projected(rows),
                **self.gates(rows),
                **self.states(rows),
                **self.places(rows),
                scale=net.dim**-0.5,
            )

        moved = rows * (8 * net.heads * net.dim**2 + self.activations())
        return Problem("gated_delta_decode", f"{net} {rows} rows", moved, self.flops(rows), build)

    def convolution(self, lengths: Sequence[int]) -> Problem:
        """Prompts from nothing."""
        net, tokens, rows = self.net, sum(lengths), len(lengths)

        def build() -> Callable[[], object]:
            return partial(
                kernels.causal_conv1d,
                self.random(tokens, net.channels),
                self.random(net.channels, WIDTH),
                self.random(rows, net.channels, WIDTH - 1),
                **self.places(rows),
                query_start=self.starts(lengths),
                max_query_len=max(lengths),
            )

        moved = 2 * (tokens + rows * (WIDTH - 1)) * net.channels * self.dtype.itemsize
        shape = f"{net.channels} channels {rows} x {max(lengths)}"
        return Problem("causal_conv1d", shape, moved, 2 * WIDTH * tokens * net.channels, build)

    def prefill(self, lengths: Sequence[int]) -> Problem:
        """Prompts that go on; FLOPs are those of the recurrence, which chunks exceed."""
        net, tokens, rows = self.net, sum(lengths), len(lengths)

        def build() -> Callable[[], object]:
            return partial(
                kernels.gated_delta_prefill,
                **self.projected(tokens),
                **self.gates(tokens),
                **self.states(rows),
                **self.places(rows),
                query_start=self.starts(lengths),
                max_query_len=max(lengths),
                scale=net.dim**-0.5,
            )

        moved = tokens * self.activations() + rows * 8 * net.heads * net.dim**2
        return Problem(
            "gated_delta_prefill", f"{net} {rows} x {max(lengths)}", moved, self.flops(tokens), build
        )

    def norm(self, tokens: int) -> Problem:
        """[tokens, heads, dim]."""
        net = self.net
        shape = (tokens, net.heads, net.dim)

        def build() -> Callable[[], object]:
            gate = self.random(*shape)
            return partial(kernels.gated_rms_norm, self.random(*shape), gate, self.random(net.dim), 1e-6)

        moved = 3 * tokens * net.heads * net.dim * self.dtype.itemsize
        return Problem("gated_rms_norm", f"{tokens} x {net.heads} x {net.dim}", moved, 0, build)

    def starts(self, lengths: Sequence[int]) -> Tensor:
        """The cumulative lengths."""
        return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(self.device)

    def flops(self, tokens: int) -> int:
        """Of k^T S, k delta^T and q^T S."""
        return 6 * tokens * self.net.heads * self.net.dim**2

    def activations(self) -> int:
        """Bytes of a token's q, k, v, gates and output."""
        net = self.net
        return (net.channels + net.heads * (net.dim + 2)) * self.dtype.itemsize
