"""Rotary position embedding (Su et al. 2021): its frequencies, the ways of stretching them, and the table
kernels read.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Unscaled:
    """The frequencies as trained."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: wavelengths beyond `original / low_freq_factor` are divided, those under `original /
    high_freq_factor` kept.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): interpolates dims that turn less than `beta_slow` times in the original
    context, keeps those that turn more than `beta_fast` times, blends between, and scales cos and sin by
    `attention_factor`.
    """

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class FactorScaling:
    """Frequency i divided by `factors[i]`, as GGUF files state any stretching."""

    factors: tuple[float, ...]


Scaling = Unscaled | LinearScaling | Llama3Scaling | YarnScaling | FactorScaling


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding of the first `dim` dims of each head with base wavelength `base`."""

    dim: int
    base: float
    scaling: Scaling = Unscaled()

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied with."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """YaRN's temperature, `0.1 ln(factor) + 1`, or DeepSeek's quotient of two when both mscales are given."""

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def frequencies(rotary: Rotary) -> torch.Tensor:
    """Radians per position of each pair of dims, float32 `[dim / 2]` on the CPU."""
    pairs = torch.arange(0, rotary.dim, 2, dtype=torch.float32)
    plain = 1.0 / rotary.base ** (pairs / rotary.dim)
    match rotary.scaling:
        case Unscaled():
            return plain
        case LinearScaling(factor):
            return plain / factor
        case FactorScaling(factors):
            if len(factors) != plain.shape[0]:
                raise ValueError(f"{len(factors)} rotary factors for {plain.shape[0]} frequencies")
            return plain / torch.tensor(factors, dtype=torch.float32)
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, rotary, scaling)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_positions * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: torch.Tensor, rotary: Rotary, scaling: YarnScaling) -> torch.Tensor:
    def pair_that_turns(times: float) -> float:
        turns_of_first = scaling.original_positions / (2 * math.pi)
        return rotary.dim * math.log(turns_of_first / times) / (2 * math.log(rotary.base))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.dim - 1)
    width = last - first if last != first else 0.001
    ramp = torch.arange(plain.shape[0], dtype=torch.float32).sub(first).div(width).clamp(0.0, 1.0)
    return ramp * plain / scaling.factor + (1 - ramp) * plain


def cos_sin_table(rotary: Rotary, positions: int, device: torch.device) -> torch.Tensor:
    """float32 `[positions, dim]` on `device`: the cosines of a position's angles, then the sines."""
    steps = torch.arange(positions, dtype=torch.float32, device=device)
    angles = torch.outer(steps, frequencies(rotary).to(device))
    table = torch.empty(positions, rotary.dim, dtype=torch.float32, device=device)
    torch.cos(angles, out=table[:, : rotary.dim // 2])
    torch.sin(angles, out=table[:, rotary.dim // 2 :])
    return table.mul_(rotary.attention_factor)
