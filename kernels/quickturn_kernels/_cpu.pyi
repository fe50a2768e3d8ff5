"""The compiled CPU kernels (kernels/csrc/cpu). Addresses and strides in elements; nothing is checked here.

Dtype codes: 0 float32, 1 bfloat16. An address of 0 is an argument that is not there.
"""

class PagedCache:
    """Addresses, strides and sizes of one layer's paged keys and values."""

    def __init__(
        self,
        k: int,
        v: int,
        k_block_stride: int,
        v_block_stride: int,
        k_token_stride: int,
        v_token_stride: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        /,
    ) -> None: ...

def isa() -> str:
    """The instruction-set level in use: base, avx2, avx512 or amx."""

def use_isa(name: str, /) -> bool:
    """Use a lower level, or the best again; False if this processor lacks it. For tests."""

def has_tiles() -> bool:
    """Whether the level in use has AMX tiles."""

def openmp_runtime() -> str:
    """Path of the OpenMP runtime whose threads are used; empty if there is none."""

def max_threads() -> int:
    """Threads that a parallel region may use."""

def rms_norm(
    dtype: int,
    x: int,
    residual: int,
    weight: int,
    out: int,
    rows: int,
    size: int,
    x_stride: int,
    eps: float,
    /,
) -> None: ...
def silu_and_mul(dtype: int, x: int, out: int, rows: int, size: int, x_stride: int, /) -> None: ...
def rotary_cache_write(
    dtype: int,
    q: int,
    k: int,
    v: int,
    q_stride: int,
    k_stride: int,
    v_stride: int,
    positions: int,
    cos_sin: int,
    rotary_dim: int,
    cos_sin_stride: int,
    slots: int,
    q_weight: int,
    k_weight: int,
    eps: float,
    tokens: int,
    q_heads: int,
    cache: PagedCache,
    /,
) -> None: ...
def attention_decode(
    dtype: int,
    q: int,
    out: int,
    q_stride: int,
    q_heads: int,
    cache: PagedCache,
    block_tables: int,
    block_table_stride: int,
    context_lens: int,
    rows: int,
    scale: float,
    softcap: float,
    window: int,
    sinks: int,
    /,
) -> None: ...
def attention_prefill(
    dtype: int,
    q: int,
    out: int,
    q_stride: int,
    q_heads: int,
    cache: PagedCache,
    block_tables: int,
    block_table_stride: int,
    query_start: int,
    context_lens: int,
    rows: int,
    scale: float,
    softcap: float,
    window: int,
    sinks: int,
    tokens: int,
    work: int,
    /,
) -> None: ...
def stream_linear(
    dtype: int,
    out_dtype: int,
    x: int,
    weight: int,
    bias: int,
    out: int,
    rows: int,
    n: int,
    k: int,
    x_stride: int,
    weight_stride: int,
    /,
) -> None: ...
def tile_linear(
    out_dtype: int, x: int, weight: int, bias: int, out: int, rows: int, n: int, k: int, x_stride: int, /
) -> None: ...
def pack_tiles(weight: int, packed: int, n: int, k: int, stride: int, /) -> None: ...
def unpack_rows(ids: int, packed: int, out: int, count: int, k: int, table_rows: int, /) -> None: ...
def pack_quant(format: int, dtype: int, weight: int, packed: int, n: int, k: int, stride: int, /) -> None:
    """Quantise [n, k] into the layout of quant_linear.h; format 0 is int8, 1 is int4."""

def unpack_quant_rows(
    format: int, ids: int, packed: int, out: int, count: int, k: int, table_rows: int, /
) -> None: ...
def quant_linear(
    format: int,
    out_dtype: int,
    x: int,
    weight: int,
    bias: int,
    out: int,
    rows: int,
    n: int,
    k: int,
    x_stride: int,
    /,
) -> None: ...
def gather_rows(ids: int, table: int, out: int, count: int, row_bytes: int, table_rows: int, /) -> None: ...
def argmax(dtype: int, x: int, out: int, rows: int, size: int, x_stride: int, /) -> None: ...
def draw(
    dtype: int,
    logits: int,
    rows: int,
    size: int,
    stride: int,
    temperature: int,
    top_k: int,
    top_p: int,
    min_p: int,
    seeds: int,
    positions: int,
    out: int,
    /,
) -> None: ...
