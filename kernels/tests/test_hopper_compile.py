"""Every Triton kernel compiles for Hopper, without a GPU, into what it is meant to be."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quickturn_kernels import platform

pytestmark = pytest.mark.skipif(not platform.has_triton(), reason="triton is not installed")

SHARED_LIMIT = 227 << 10
SCRIPT = Path(__file__).parent / "compile_for_hopper.py"


def compiled(plan: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), plan],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("plan", "kernels"),
    [
        (
            "dense",
            {"rms_norm_kernel", "silu_and_mul_kernel", "embedding_kernel", "rotary_cache_write_kernel"},
        ),
        ("sampling", {"scan_kernel", "candidates_kernel", "choose_kernel"}),
        (
            "linear_attention",
            {
                "convolve_kernel",
                "prepare_kernel",
                "scan_kernel",
                "recurrent_kernel",
                "decode_kernel",
                "gated_norm_kernel",
            },
        ),
        ("attention", {"decode_kernel", "prefill_kernel", "combine_kernel", "merge_kernel"}),
        (
            "fp8",
            {
                "quantize_groups_kernel",
                "quantize_rows_kernel",
                "linear_kernel",
                "rotary_cache_write_kernel",
                "decode_kernel",
                "prefill_kernel",
            },
        ),
        (
            "moe",
            {
                "route_kernel",
                "count_kernel",
                "place_kernel",
                "gate_up_kernel",
                "down_kernel",
                "combine_kernel",
            },
        ),
    ],
)
def test_kernels_fit_a_hopper(plan: str, kernels: set[str]) -> None:
    found = compiled(plan)
    assert {one["kernel"] for one in found} == kernels
    for one in found:
        assert one["shared"] <= SHARED_LIMIT, one
        assert one["stack_pointer_misused"] == 0, one
        # Some spilling of 255 registers is no harm; a kernel that lives in local memory is.
        assert one.get("stack", 0) <= 256, one
        long_half_precision = "prefill" in one["case"] and "float32" not in one["case"]
        if one["kernel"] == "prefill_kernel" and long_half_precision:
            assert one["wgmma"] > 0, one
        if one["kernel"] == "decode_kernel" and plan == "attention":
            assert one["cp_async"] > 0, one
        if one["kernel"] in ("prepare_kernel", "scan_kernel") and plan == "linear_attention":
            assert one["wgmma"] > 0, one


def test_products_that_start_early_read_nothing_unfinished() -> None:
    """Of gate and up everything comes from the launch ahead; the tiles that down reads are older."""
    found = compiled("early")
    assert [(one["kernel"], one["before_wait"]) for one in found] == 2 * [
        ("gate_up_kernel", []),
        ("down_kernel", ["ld.global.cg.b32"]),
    ]
    for one in found:
        assert one["shared"] <= SHARED_LIMIT, one
        assert one["stack_pointer_misused"] == 0, one
        assert one["cp_async"] > 0, one
