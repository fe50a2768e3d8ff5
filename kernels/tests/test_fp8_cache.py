"""Caches in e4m3 beyond the numerics suite."""

import pytest
import torch

from quickturn_kernels import platform

pytestmark = pytest.mark.skipif(not platform.has_triton(), reason="triton is not installed")


def test_widened_pages_are_the_rows_own(seed: int, device: torch.device) -> None:
    from quickturn_kernels.ops.attention.triton_widen import widen

    generator = torch.Generator().manual_seed(seed)
    arena = torch.randn(9, 3, 2, 16, 3, 24, generator=generator).to(torch.float8_e4m3fn).to(device)
    k_cache, v_cache = arena[:, 1, 0], arena[:, 1, 1]
    lens = torch.tensor([20, 48, 0], dtype=torch.int32, device=device)
    order = torch.randperm(9, generator=generator).to(torch.int32)
    # Entries past a row's keys are never read.
    tables = torch.tensor([[*order[:2], 1 << 30], [*order[2:5]], [1 << 30] * 3], dtype=torch.int32)
    keys, values, own = widen(k_cache, v_cache, tables.to(device), lens, 3, torch.float32)
    for row, length in enumerate(lens.tolist()):
        for position in range(length):
            page, offset = divmod(position, 16)
            block = int(tables[row, page])
            for cache, wide in ((k_cache, keys), (v_cache, values)):
                assert torch.equal(wide[own[row, page], offset], cache[block, offset].float())
