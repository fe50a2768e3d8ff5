"""Cases of gather_decode and append_tokens: padding rows, several cache groups, negative tokens."""

from functools import partial

import torch
from torch import Generator

from quickturn_kernels.numerics.check import Case, Result
from quickturn_kernels.ops.batch import append_tokens, gather_decode

ROWS = (0, 1, 7)


def batch_cases() -> tuple[Case, ...]:
    """Both ops at every number of rows."""
    runs = {"gather_decode": _gather, "append_tokens": _append}
    return tuple(
        Case(op, f"{rows} rows", torch.int32, {}, partial(run, rows))
        for op, run in runs.items()
        for rows in ROWS
    )


def _rows(rows: int, generator: Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """slots, positions (every third row is padding) and token ids of 9 slots of 100 tokens."""
    slots = torch.randperm(9, generator=generator)[:rows]
    positions = torch.randint(0, 99, (rows,), generator=generator)
    positions[2::3] = -1
    return slots, positions, torch.randint(-1, 1000, (9, 100), generator=generator, dtype=torch.int32)


def _gather(rows: int, generator: Generator, device: torch.device) -> Result:
    slots, positions, ids = (one.to(device) for one in _rows(rows, generator))
    tables = tuple(
        torch.randint(0, 2**31 - 1, (9, 30), generator=generator, dtype=torch.int32).to(device)
        for _ in range(2)
    )
    got = gather_decode(slots, positions, ids, tables, 4, 26)
    outputs = {"token_ids": got.token_ids, "positions": got.positions, "context_lens": got.context_lens}
    for group in range(2):
        outputs[f"block_tables {group}"] = got.block_tables[group]
        outputs[f"slot_mapping {group}"] = got.slot_mapping[group]
    return Result(outputs)


def _append(rows: int, generator: Generator, device: torch.device) -> Result:
    slots, positions, ids = (one.to(device) for one in _rows(rows, generator))
    append_tokens(ids, slots, positions, torch.randint(-1, 1000, (rows,), generator=generator).to(device))
    return Result({"token_ids": ids})
