"""A matrix of speeds: decode over batch and context, and the first token over prompt lengths."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from quickturn.bench.latency import copy_rate, decode_shape, first_token
from quickturn.bench.offline import OfflineBench
from quickturn.config import EngineConfig
from quickturn.validate.report import Finding


def measure(
    config: EngineConfig,
    device: torch.device,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    steps: int,
    repeats: int,
) -> Iterator[Finding]:
    """Decode of every batch at every context, then the first token of a prompt of every context. What doesn't
    fit into this machine is absent.
    """
    rate = copy_rate(device)
    bench = OfflineBench(config)
    bench.prefill_once(8)
    for context in contexts:
        for batch in batches:
            name = f"decode {batch} x {context}"
            try:
                shape = decode_shape(bench, batch, context, steps, rate)
            except ValueError as error:
                yield Finding("performance", name, "absent", str(error))
                continue
            figures = {
                "tokens_per_second": shape.tokens_per_second,
                "step_ms": shape.step_ms.median,
                "step_low_ms": shape.step_ms.low,
                "step_high_ms": shape.step_ms.high,
                "roof_share": shape.roof_share,
            }
            yield Finding("performance", name, "passed", shape.line(), figures)
    for context in contexts:
        first = first_token(bench, context, repeats)
        medians = {
            name.removesuffix("_ms") + "_median_ms": value["median"]
            for name, value in asdict(first).items()
            if isinstance(value, dict)
        }
        yield Finding("performance", f"first token {context}", "passed", first.line(), medians)
    bench.core.close()
