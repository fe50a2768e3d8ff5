"""Weights in 8-bit floating point (e4m3), as published checkpoints and `--quantization fp8` have them.

Two layouts of a weight [N, K], both with `tensors = (weight e4m3 [N, K], scale float32)`:

- `fp8_block`: scale [ceil(N / 128), ceil(K / 128)], one for each block of 128 x 128 (DeepSeek-V3's and Qwen's
  `weight_scale_inv`); its last dim is contiguous, its rows lie a multiple of 4 apart, as cuBLAS wants them;
- `fp8_channel`: scale [N], one a row; a checkpoint's scale for a whole tensor is repeated.

An element is worth `e4m3 * scale`. An implementation may take x as it is, or quantise it on the fly as
`quantize_rows` does, for each row in groups of 128 columns beside block scales and as a whole beside row
scales: what `linear` computes is defined up to that. Sums are float32. An activation scale that a
checkpoint brings along (`input_scale`) isn't needed for either.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128
FP8_BLOCK = "fp8_block"
FP8_CHANNEL = "fp8_channel"

_SCRATCH = 1 << 24
"""Elements quantised at a time."""

_SMALLEST = 1e-12
"""Least maximum that a scale is made for: zeros must not divide by zero."""


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A float weight [N, K] as e4m3 [N, K] and block scales [ceil(N / 128), ceil(K / 128)].

    `scale = max |w| / 448` over the block, in float32, and `q = round_to_nearest_even(w / scale)`.
    """
    rows, columns = weight.shape
    result = torch.empty((rows, columns), dtype=torch.uint8, device=weight.device).view(FP8)
    scales = aligned_scales(rows, columns, weight.device)
    # Some rows of blocks at a time: the float32 scratch stays small.
    step = max(1, _SCRATCH // (columns * BLOCK))
    for first in range(0, scales.shape[0], step):
        part = weight[first * BLOCK : (first + step) * BLOCK].float()
        padded = torch.nn.functional.pad(part, (0, -columns % BLOCK, 0, -part.shape[0] % BLOCK))
        blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        scale = _scale_of(blocks.abs().amax((1, 3)))
        scales[first : first + step] = scale
        quantized = _to_fp8(blocks / scale[:, None, :, None]).view(padded.shape)
        result[first * BLOCK : (first + step) * BLOCK] = quantized[: part.shape[0], :columns]
    return result, scales


def aligned_scales(rows: int, columns: int, device: torch.device) -> Tensor:
    """Memory for the block scales of a weight [rows, columns], its rows a multiple of 4 elements apart."""
    across = -(-columns // BLOCK)
    return torch.zeros((-(-rows // BLOCK), -(-across // 4) * 4), device=device)[:, :across]


def quantize_rows(x: Tensor, group: int | None) -> tuple[Tensor, Tensor]:
    """Activations [T, K] as e4m3 [T, K] and scales [T, ceil(K / group)] (group None: [T, 1]); as
    `quantize_blocks`, over `group` columns of one row.
    """
    rows, columns = x.shape
    size = columns if group is None else group
    groups = torch.nn.functional.pad(x.float(), (0, -columns % size)).view(rows, -(-columns // size), size)
    scale = _scale_of(groups.abs().amax(2))
    return _to_fp8(groups / scale[:, :, None]).flatten(1)[:, :columns], scale


def dequantize(weight: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write `e4m3 * scale` to `out` [N, K] of any float dtype, rounded once. scale: block scales
    [ceil(N / 128), ceil(K / 128)], or [N] or [1] or a number for rows.
    """
    if scale.ndim < 2:
        out.copy_(weight.float() * scale.reshape(-1, 1))
        return
    columns = weight.shape[1]
    across = scale.repeat_interleave(BLOCK, 1)[:, :columns]
    for band in range(scale.shape[0]):
        rows = slice(band * BLOCK, (band + 1) * BLOCK)
        out[rows].copy_(weight[rows].float() * across[band])


def _scale_of(largest: Tensor) -> Tensor:
    # Divided by a tensor: for a number torch multiplies with its reciprocal on CUDA, and a scale that is off
    # by its last bit moves the many 16-bit values that lie right between two e4m3 ones.
    return largest.clamp_min(_SMALLEST) / largest.new_full((), FP8_MAX)


def _to_fp8(scaled: Tensor) -> Tensor:
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8)
