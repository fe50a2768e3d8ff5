"""ggml's block formats to floats.

The formats that small models come in have torch code here, four times as fast as numpy's and on all cores;
the rest goes through `gguf.quants`, which is the definition of all of them.
"""

from collections.abc import Callable

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from quickturn.files.errors import LoadError

_CHUNK = 1 << 20
"""Elements dequantised at a time: the float32 scratch stays in the cache."""


def block_size(ggml_type: int) -> tuple[int, int]:
    """Elements and bytes of a block. Raises LoadError for unknown types."""
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
    except (ValueError, KeyError):
        raise LoadError(f"ggml type {ggml_type} is not known to the installed gguf package") from None
    return block, size


def row_bytes(ggml_type: int, columns: int) -> int:
    """Bytes of a row of `columns` elements. Raises LoadError for unknown types and for rows that aren't whole
    blocks.
    """
    block, size = block_size(ggml_type)
    if columns % block:
        raise LoadError(f"rows of {columns} elements are not whole blocks of {block} (ggml type {ggml_type})")
    return columns // block * size


def dequantize_into(raw: torch.Tensor, ggml_type: int, out: torch.Tensor) -> None:
    """Write the rows `raw`, uint8 `[N, row_bytes]` on the CPU, to `out` `[N, K]` of any float dtype and
    device.

    Values are exact in float32 and rounded once. Raises LoadError for a type that can't be dequantised.
    """
    kind = GGMLQuantizationType(ggml_type)
    if kind in _PLAIN:
        out.copy_(raw.view(_PLAIN[kind]))
        return
    rows = max(1, _CHUNK // out.shape[1])
    for start in range(0, out.shape[0], rows):
        part, target = raw[start : start + rows], out[start : start + rows]
        if kind in _BLOCKS:
            scratch = torch.empty(target.shape, dtype=torch.float32)
            size = GGML_QUANT_SIZES[kind][1]
            _BLOCKS[kind](part.view(part.shape[0], -1, size), scratch.view(part.shape[0], -1, 32))
            target.copy_(scratch)
        else:
            target.copy_(_by_gguf(part, kind))


def _by_gguf(raw: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    try:
        return torch.from_numpy(quants.dequantize(raw.numpy(), kind))
    except NotImplementedError:
        raise LoadError(
            f"{kind.name} tensors can't be dequantised; take a file with another quantisation"
        ) from None


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[..., at : at + 2].view(torch.float16).float()


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    out[..., :16].copy_(packed & 15)
    out[..., 16:].copy_(packed >> 4)


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[..., 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[..., 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[..., 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}

_BLOCKS: dict[GGMLQuantizationType, Callable[[torch.Tensor, torch.Tensor], None]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q8_0: _q8_0,
}
