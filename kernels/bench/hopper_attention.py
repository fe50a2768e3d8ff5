"""Times decode attention on Hopper in CUDA graphs: the portable kernel, ours, and ours with what precedes it.

    python kernels/bench/hopper_attention.py OUT.json [fp8]

A graph has one call a layer, each over a cache of its own, up to 36 layers or 24 GB: small batches don't find
their keys in L2, as they wouldn't behind a layer's weights. `us` by form: `triton` and `hopper` are
`paged_attention_decode`; `step` is `rotary_attention_decode` with head norms, `step_triton` the same from
portable kernels. Bandwidth counts the keys and values of all rows, once. `fp8`: caches in e4m3 beside the
ones in bfloat16, for some of the shapes, without the portable kernels.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels import registry

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
BLOCK_TOKENS = 64
BOUND = 131072
LAYERS = 36
CACHE_BYTES = 24 << 30
REPEATS = 9

FORMS: dict[str, dict[str, str]] = {
    "triton": {"paged_attention_decode": "triton"},
    "hopper": {},
    "step_triton": {"rotary_attention_decode": "reference", "paged_attention_decode": "triton"},
    "step": {},
}


@dataclass(frozen=True)
class Shape:
    """Heads and the rows' contexts."""

    heads: int
    kv_heads: int
    head_dim: int
    contexts: tuple[int, ...]
    fp8: bool = False

    @property
    def moved(self) -> int:
        """Bytes of keys and values."""
        return sum(self.contexts) * self.kv_heads * self.head_dim * (2 if self.fp8 else 4)


SHAPES = (
    *(
        Shape(32, 8, 128, contexts)
        for contexts in (
            (2048,),
            (32768,),
            (2048,) * 8,
            (2048,) * 32,
            (2048,) * 64,
            (8192,) * 64,
            (32768, *(1024,) * 31),
        )
    ),
    *(Shape(16, 2, 256, contexts) for contexts in ((2048,), (32768,), (8192,) * 64)),
    Shape(16, 8, 128, (2048,)),
)


FP8_SHAPES = (
    *(
        Shape(32, 8, 128, contexts, fp8)
        for contexts in ((2048,), (32768,), (131072,), (2048,) * 8, (2048,) * 32, (8192,) * 64)
        for fp8 in (False, True)
    ),
    *(Shape(16, 2, 256, contexts, True) for contexts in ((8192,) * 64, (32768,))),
)


@dataclass(frozen=True)
class Figure:
    """Microseconds a call by form, and the bandwidth of the whole step."""

    shape: Shape
    us: dict[str, float]
    step_gbs: float


class Layers:
    """The inputs of one shape, with a cache for each layer."""

    def __init__(self, shape: Shape) -> None:
        """Random keys; blocks in random order."""
        self.shape = shape
        rows, heads = len(shape.contexts), shape.heads + 2 * shape.kv_heads
        width = -(-max(shape.contexts) // BLOCK_TOKENS)
        layer_bytes = rows * width * BLOCK_TOKENS * shape.kv_heads * shape.head_dim * (2 if shape.fp8 else 4)
        self.count = max(1, min(LAYERS, CACHE_BYTES // layer_bytes))
        blocks = (rows * width, self.count, 2, BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
        if shape.fp8:
            # Any byte but NaN.
            numbers = torch.randint(0, 112, blocks, dtype=torch.uint8, device=DEVICE)
            self._cache = numbers.view(torch.float8_e4m3fn)
        else:
            self._cache = torch.empty(blocks, device=DEVICE, dtype=BF16).normal_()
        self._tables = torch.full((rows, BOUND // BLOCK_TOKENS), -1, device=DEVICE, dtype=torch.int32)
        self._tables[:, :width] = torch.randperm(rows * width, device=DEVICE).view(rows, width)
        self._lens = torch.tensor(shape.contexts, device=DEVICE, dtype=torch.int32)
        self._positions = self._lens.long() - 1
        at = self._positions[:, None] // BLOCK_TOKENS
        self._slots = self._tables.gather(1, at)[:, 0].long() * BLOCK_TOKENS + self._positions % BLOCK_TOKENS
        self._qkv = torch.randn((rows, heads, shape.head_dim), device=DEVICE, dtype=BF16)
        self._cos_sin = torch.rand((BOUND, shape.head_dim), device=DEVICE)
        self._norm = torch.ones(shape.head_dim, device=DEVICE, dtype=BF16)

    def call(self, layer: int, whole: bool) -> Tensor:
        """Attention of one layer; `whole` with what precedes it."""
        k_cache, v_cache = self._cache[:, layer, 0], self._cache[:, layer, 1]
        shape, scale = self.shape, self.shape.head_dim**-0.5
        q, k, v = self._qkv.split_with_sizes((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        if not whole:
            return kernels.paged_attention_decode(
                q, k_cache, v_cache, self._tables, self._lens, scale, max_context_len=BOUND
            )
        return kernels.rotary_attention_decode(
            q,
            k,
            v,
            self._positions,
            self._cos_sin,
            k_cache,
            v_cache,
            self._slots,
            self._tables,
            self._lens,
            scale,
            q_weight=self._norm,
            k_weight=self._norm,
            max_context_len=BOUND,
            settled=True,
        )


def timed(run: Callable[[], None], calls: int) -> float:
    """Median microseconds a call of a graph of `calls` calls."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    taken: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(taken)


def measure(shape: Shape, portable: bool) -> Figure:
    """Every form of one shape."""
    layers = Layers(shape)
    us = {}
    for form, choice in FORMS.items():
        if choice and not portable:
            continue

        def run(whole: bool = form.startswith("step")) -> None:
            for layer in range(layers.count):
                layers.call(layer, whole)

        with registry.use(**choice):
            us[form] = round(timed(run, layers.count), 2)
    return Figure(shape, us, round(shape.moved / us["step"] / 1e3))


def main() -> None:
    """Measure all shapes and write the file named on the command line."""
    figures = []
    fp8 = sys.argv[2:] == ["fp8"]
    for shape in FP8_SHAPES if fp8 else SHAPES:
        figures.append(asdict(measure(shape, not fp8)))
        print(json.dumps(figures[-1]), flush=True)
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    Path(sys.argv[1]).write_text(json.dumps({**machine, "decode": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
