"""Prefill attention on Hopper beyond the numerics suite: every border of its tiles, and every way of cutting
the work.
"""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quickturn_kernels import cuda_build, platform, registry
from quickturn_kernels.numerics.attention import FP16, Shape, attention_case
from quickturn_kernels.numerics.check import check
from quickturn_kernels.ops.attention import paged_attention_prefill
from quickturn_kernels.ops.attention.hopper_prefill_launch import MAX_ROUNDS, launch, rounds_for

HOPPER = platform.current().capability == (9, 0) and cuda_build.available((9, 0))
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and its compiler")

BORDERS = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)
WIDE = Shape("", BORDERS, BORDERS, heads=8, kv_heads=2, head_dim=128, block_tokens=64)
SHAPES = (
    replace(WIDE, name="borders"),
    replace(WIDE, name="borders, one head a group", heads=2, kv_heads=2),
    replace(WIDE, name="borders, dim 64", head_dim=64),
    replace(WIDE, name="borders, dim 256", head_dim=256),
    replace(WIDE, name="borders, float16", dtype=FP16),
    replace(WIDE, name="borders, window", window=50),
    replace(WIDE, name="borders, window, dim 256", window=150, head_dim=256),
    replace(WIDE, name="borders, sinks", sinks=True),
    replace(WIDE, name="group of 5", heads=10, contexts=[length + 77 for length in BORDERS]),
    replace(WIDE, name="group of 7, dim 256", heads=7, kv_heads=1, head_dim=256),
    replace(WIDE, name="group of 32", heads=32, kv_heads=1),
    replace(WIDE, name="odd contexts", contexts=[length + 3 * i for i, length in enumerate(BORDERS)]),
    replace(WIDE, name="pages of 8", block_tokens=8),
    replace(WIDE, name="pages of 16, dim 256", block_tokens=16, head_dim=256),
    replace(WIDE, name="pages of 32", block_tokens=32),
    replace(WIDE, name="pages of 128", block_tokens=128),
    replace(WIDE, name="pages of 256, window", block_tokens=256, window=40),
    replace(WIDE, name="padding", padding=300),
    replace(WIDE, name="only padding", contexts=(0, 0), queries=(0, 0), padding=3),
    replace(WIDE, name="turn on long context", contexts=(3000, 2111), queries=(150, 70)),
    replace(WIDE, name="turn on long context, dim 256", contexts=(3000,), queries=(70,), head_dim=256),
    replace(WIDE, name="turn, dim 64, sinks", contexts=(3000,), queries=(70,), head_dim=64, sinks=True),
    replace(WIDE, name="turn, window", contexts=(3000, 700), queries=(150, 300), window=1000),
    replace(WIDE, name="whole prompt", contexts=(1500,), queries=(1500,)),
    replace(WIDE, name="one token", contexts=(2500,), queries=(1,)),
    replace(WIDE, name="many rows", contexts=range(0, 300, 3), queries=[i % 5 for i in range(100)]),
)


@needs_hopper
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_agrees_with_the_reference(shape: Shape, seed: int, device: torch.device) -> None:
    check(attention_case("paged_attention_prefill", shape), "hopper", seed, device)


@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("least_piece", [1, 3, 1000])
@pytest.mark.parametrize("rounds", [1, 3, 8])
def test_any_cut_gives_the_same(head_dim: int, least_piece: int, rounds: int, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    contexts, queries, size = (4000, 130, 777), (97, 130, 400), 64
    width = -(-max(contexts) // size)
    cache = torch.randn((3 * width, 2, size, 2, head_dim), **options)
    tables = torch.randperm(3 * width, device="cuda", generator=generator).to(torch.int32).view(3, width)
    starts = torch.tensor((0, *queries), device="cuda").cumsum(0).to(torch.int32)
    lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    q = torch.randn((sum(queries), 8, head_dim), **options)

    def run() -> Tensor:
        return launch(
            q,
            cache[:, 0],
            cache[:, 1],
            tables,
            starts,
            lens,
            head_dim**-0.5,
            0,
            None,
            max(contexts),
            rounds=rounds,
            least_piece=least_piece,
        )

    first = run()
    for _ in range(5):
        assert torch.equal(run(), first)
    with registry.use(paged_attention_prefill="reference"):
        expected = paged_attention_prefill(
            q,
            cache[:, 0],
            cache[:, 1],
            tables,
            starts,
            lens,
            max(queries),
            head_dim**-0.5,
            max_context_len=max(contexts),
        )
    torch.testing.assert_close(first, expected, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")
def test_products_overlap_and_nothing_spills(tmp_path: Path) -> None:
    """The compiler serialises products, or spills, without an error; then the kernel is half as fast."""
    compiler = cuda_build.compiler()
    assert compiler is not None
    done = subprocess.run(
        [
            compiler,
            *("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-cubin"),
            *("-o", str(tmp_path / "prefill.cubin")),
            str(cuda_build.source_directory() / "attention_prefill.cu"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    told = done.stdout + done.stderr
    assert "Performance Loss" not in told, told
    spilled = re.findall(r"(\d+) bytes spill stores", told)
    assert spilled
    assert set(spilled) == {"0"}, told


def test_rounds_are_for_much_work_on_long_contexts() -> None:
    """Where there is little work, or what it reads stays in L2, all blocks share all of it."""
    assert rounds_for(8192, 1, 8, 128, 4, 8192) == 1
    assert rounds_for(64, 1, 8, 128, 4, 32768) == 1
    assert rounds_for(300, 1, 8, 128, 4, 32768) == 2
    assert 1 < rounds_for(32768, 1, 8, 128, 4, 32768) <= MAX_ROUNDS
    assert rounds_for(1 << 20, 8, 8, 128, 4, 1 << 20) == MAX_ROUNDS
    assert rounds_for(5, 0, 8, 128, 4, 0) == 1
