"""Kernels with a planted fault: a mask wrong at one length, sums in no fixed order, a stale state row."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from quickturn_kernels import Priority, register
from quickturn_kernels.ops.attention import reference as attention
from quickturn_kernels.ops.linear_attention import reference as linear_attention
from quickturn_kernels.ops.norm import reference as norm
from quickturn_kernels.registry import unregister

from quickturn.config import EngineConfig
from quickturn.validate.report import Finding, Report
from quickturn.validate.run import Settings, validate

LENGTH = 77
"""The only context that the faulty mask is wrong for."""

Model = Callable[[str], Path]


@contextmanager
def planted(op: str, function: Callable[..., Any]) -> Iterator[None]:
    """The function as the best implementation of `op`."""
    register(op, name="faulty", priority=Priority.SPECIALIZED)(function)
    try:
        yield
    finally:
        unregister(op, "faulty")


def run(path: Path, **options: Any) -> Report:
    chosen: dict[str, Any] = {
        "lengths": (7, 70),
        "answer": 12,
        "sweep": 130,
        "rows": (1, 5),
        "repeats": 4,
    } | options
    config = EngineConfig(str(path), dtype="float32", device="cpu", memory=8 << 20, block_tokens=16)
    return validate(Settings(config, **chosen), None, lambda line: print(line), lambda done, total: None)


def failed(report: Report) -> list[Finding]:
    for finding in report.failed:
        print(finding.section, finding.name, finding.detail)
    return report.failed


def wrong_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, *rest: Any) -> Any:
    lens, *others = rest
    seen = torch.where(lens == LENGTH, lens - 1, lens)
    return attention.paged_attention_decode(q, k, v, tables, seen, *others)


def test_a_mask_that_is_wrong_at_one_length_is_found_by_its_kernel_and_by_the_model(model: Model) -> None:
    assert not failed(run(model("qwen3"), sections=("numerics", "parity", "features")))
    with planted("paged_attention_decode", wrong_mask):
        report = run(model("qwen3"), sections=("numerics", "parity", "features"))
    found = {finding.section: finding for finding in failed(report)}
    assert found["numerics"].name.startswith("paged_attention_decode=faulty")
    assert "parity" in found
    # It hands its calls on to the reference, so that a run that is to test it hasn't.
    assert "paged_attention_decode=faulty" not in report.paths
    assert report.paths["paged_attention_decode=reference"] > 0


def test_sums_in_no_fixed_order_are_found(model: Model) -> None:
    calls = 0

    def unordered(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % 3:
            return norm.rms_norm(x, weight, eps)
        sums = x.float().flip(-1).pow(2).cumsum(-1)[..., -1:]
        return (x.float() * torch.rsqrt(sums / x.shape[-1] + eps)).to(x.dtype) * weight

    with planted("rms_norm", unordered):
        report = run(model("qwen3"), sections=("numerics",), rows=(33,))
    found = failed(report)
    assert {finding.section for finding in found} == {"repeats"}
    assert all(finding.name.startswith("rms_norm=faulty") for finding in found)


@pytest.mark.parametrize("op", ["gated_delta_decode", "gated_delta_prefill"])
def test_a_stale_state_row_is_found(model: Model, op: str) -> None:
    right = getattr(linear_attention, op)

    def stale(*arguments: Any) -> Any:
        """Reads what the last owner left where a request begins."""
        given = list(arguments)
        # (q, k, v, a, b, a_log, dt_bias, states, state_in, state_out, state_zero, ...)
        reads, writes, zero = given[8:11]
        first = (zero != 0) & (writes >= 0)
        given[8], given[10] = torch.where(first, writes, reads), torch.zeros_like(zero)
        return right(*given)

    with planted(op, stale):
        report = run(model("qwen3.5-moe"), sections=("numerics",))
    found = failed(report)
    assert found
    assert {finding.name.partition(":")[0] for finding in found} <= {f"{op}=faulty"}
