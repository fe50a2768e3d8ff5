"""The one configuration object of an engine."""

import math
import re
from dataclasses import dataclass
from typing import Literal

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "none", "stored", "int8", "int4", "fp8"]
KvCacheDtype = Literal["auto", "fp8"]
StateDtype = Literal["float32", "bfloat16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_FACTOR = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes meant by `text`, such as '512MiB', '2g' or '1048576'. Raises ValueError with the accepted
    forms.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"not a size: {text!r}; write for example 512MiB, 2GiB or a number of bytes")
    return int(float(match[1]) * _FACTOR[match[2].lower()])


@dataclass(frozen=True)
class EngineConfig:
    """Everything that an engine is told at start. Sizes are bytes or tokens; None means 'choose from the
    model or machine'.
    """

    model: str
    """A hub id, a local directory of safetensors, or a `.gguf` file."""
    dtype: DtypeName = "auto"
    device: str = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization = "auto"
    """Matrices in fewer bits. `stored`: as the checkpoint has them (GGUF's Q8_0, Q4_0, Q4_1; fp8), which
    loses nothing. `auto`: fp8 ones as they are stored where the device multiplies such, all else
    dequantised."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Of keys and values in the cache; `auto` is the model's, `fp8` is e4m3."""
    memory: int | None = None
    """Bound of the cache arena in bytes."""
    block_tokens: int = 64
    slab_bytes: int | None = None
    max_requests: int = 256
    max_step_tokens: int = 2048
    max_context: int | None = None
    prefix_cache: bool = True
    state_dtype: StateDtype = "float32"
    """Of recurrent states in the cache, where the model has any."""
    checkpoint_tail: int = 384
    """A state checkpoint lies so many tokens before the end of a prompt, besides the one at its end."""
    checkpoint_stride: int = 16384
    """Tokens between the state checkpoints inside a long prompt."""
    min_tps_per_user: float = 0.0
    """The promise of tokens a second to every user: a step carries no more prompt than that leaves room for,
    and no more requests run. 0: none.
    """
    max_ttft: float = 0.0
    """Seconds to a first token that prompts are hurried for, as far as that promise allows. 0: none."""
    max_pause: float = 0.0
    """Seconds that a step beside users who are being answered may take now and then, where prompts get on at
    least twice as fast by it as by a piece in every step; the promise then holds on average. 0: never.
    """
    pause_every: int = 128
    """Now and then: once in so many of those steps."""
    overlap: bool | None = None
    """Plan step n+1 while step n runs. None: on where the device is asynchronous."""
    graphs: bool = True
    """CUDA graphs for decode; without effect on a CPU."""
    tp: int = 1
    """Ranks that share out heads, inner features and vocabulary: tensor parallel."""
    dp: int = 1
    """Groups of ranks with requests and a cache of their own."""
    cp: int = 1
    """Ranks that share out the tokens of a cache: context parallel."""
    dense_tp: int | None = None
    moe_tp: int | None = None
    ep: int | None = None
    """Ranks that share out dense layers, inner features of experts, and experts. None: see
    `parallel.mesh.make_mesh`."""
    ranks_per_gpu: int = 1
    """Ranks that share a GPU, each with its part of the memory: to try several ranks where there are too few
    GPUs; slower than one rank."""
    rank_timeout: float = 300.0
    """Seconds after which a rank that gets on with nothing ends all of them."""
    seed: int = 0
    served_model_name: str | None = None

    def __post_init__(self) -> None:
        """Refuse values that can't work, saying what to change."""
        if self.block_tokens < 1 or self.block_tokens & (self.block_tokens - 1):
            raise ValueError(f"block_tokens must be a power of two, got {self.block_tokens}")
        for name in ("max_requests", "max_step_tokens", "pause_every", "ranks_per_gpu"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("min_tps_per_user", "max_ttft", "max_pause"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 (none) or more, got {getattr(self, name)}")
        if self.cp > 1 and self.block_tokens % self.cp:
            raise ValueError(
                f"{self.cp} ranks (cp) can't share out blocks of {self.block_tokens} tokens: take a power of"
                " two for cp, and no more ranks than block_tokens"
            )
        if not self.rank_timeout > 0:
            raise ValueError(f"rank_timeout must be more than 0 seconds, got {self.rank_timeout}")
        if self.memory is not None and self.memory < 1 << 20:
            raise ValueError(f"memory must be at least 1 MiB, got {self.memory} bytes")

    @property
    def world(self) -> int:
        """Number of ranks, each a process."""
        return self.tp * self.dp * self.cp
