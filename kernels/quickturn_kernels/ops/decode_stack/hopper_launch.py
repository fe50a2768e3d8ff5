"""What the persistent decode kernel (csrc/cuda/decode_stack.cu) needs on the device, and its launch."""

import ctypes
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.attention.triton_common import LOG2_E
from quickturn_kernels.ops.decode_stack import Caches, DecoderStack, StackLayer
from quickturn_kernels.ops.linear import PLAIN, LinearWeight
from quickturn_kernels.ops.linear.hopper_launch import UNITS
from quickturn_kernels.platform import describe

MAX_ROWS = 8
MAX_GROUP = 8
MAX_HIDDEN = 7936
HEAD_DIM = 128
COLUMNS = 256
"""Columns of every matrix are a multiple of this."""

GRANULE = 8
"""Rows of a weight that are multiplied at once."""

MAX_CHUNKS = 32
SLOT_BYTES = 16384
TILE_KEYS = 32
QUARTERS = 4
UNITS_A_BLOCK = 16
"""Quarters of a head whose parts one block may add up."""

USEFUL_STAGES = 4
"""With a shorter ring memory waits for the computation, and separate kernels are faster."""

TRUSTED_ROWS = 2
"""More rows end in a launch failure at the sizes of real models; the cause isn't known
(docs/performance/decode.md).
"""

SHARED_LIMIT = 231_000
MAP_BYTES = 128
MAPS = 6
"""Tensor maps of a layer."""


_LAYER = (
    "qkv_bias",
    "o_bias",
    "gate_up_bias",
    "down_bias",
    "attn_norm",
    "mlp_norm",
    "q_norm",
    "k_norm",
    "k_cache",
    "v_cache",
)
_POINTERS = (
    *("layers", "maps", "x", "norm", "logits", "tables", "lens", "cos_sin", "epoch"),
    *("qkv", "parts", "attended", "branch", "activated", "mlp"),
)
_PITCHES = ("x", "table", "cos_sin", "k_block", "k_row", "v_block", "v_row")
_WHOLES = (
    *("layer_count", "rows", "hidden", "heads", "kv_heads", "inner", "vocab", "block_tokens", "window"),
    "stages",
)


class _Layer(ctypes.Structure):
    """StackLayer of decode_stack.cuh."""

    _fields_ = [(name, ctypes.c_void_p) for name in _LAYER]


class _Arguments(ctypes.Structure):
    """StackArguments of decode_stack.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((f"{name}_pitch", ctypes.c_longlong) for name in _PITCHES),
        *((name, ctypes.c_float) for name in ("eps", "scale_log2")),
        *((name, ctypes.c_int) for name in _WHOLES),
    ]


@dataclass(frozen=True)
class Sizes:
    """The numbers of a stack: features of each kind."""

    layers: int
    hidden: int
    attended: int
    qkv: int
    inner: int
    vocab: int
    group: int


@dataclass(frozen=True)
class Prepared:
    """What lies on the device for one stack and its caches; `base` has every argument but the call's."""

    caches: tuple[int, ...]
    blocks: int
    base: bytes
    kept: tuple[Tensor, ...]


_prepared: "WeakKeyDictionary[DecoderStack, Prepared]" = WeakKeyDictionary()
_rows: "WeakKeyDictionary[DecoderStack, int]" = WeakKeyDictionary()


def sizes_of(stack: DecoderStack) -> Sizes:
    """The sizes that the first layer and the head have."""
    first = stack.layers[0]
    return Sizes(
        layers=len(stack.layers),
        hidden=first.qkv.shape[1],
        attended=stack.heads * stack.head_dim,
        qkv=(stack.heads + 2 * stack.kv_heads) * stack.head_dim,
        inner=first.down.shape[1],
        vocab=stack.head.shape[0],
        group=stack.heads // stack.kv_heads,
    )


def shared_memory(sizes: Sizes, rows: int, stages: int) -> int:
    """Bytes that the kernel will ask for (as computed in decode_stack.cu)."""
    widest = max(sizes.hidden, sizes.attended, sizes.inner)
    scratch = 16 * HEAD_DIM * 2 + 4 * HEAD_DIM + 8 * sizes.group * (HEAD_DIM + 8) * 4 + 9 * 8 * 8
    return (
        1024
        + stages * SLOT_BYTES
        + max(rows * (widest * 2 + 16), scratch)
        + rows * sizes.hidden * 2
        + 2 * 32 * 2 * rows * GRANULE * 4
        + MAX_ROWS * 8 * 4
        + rows * HEAD_DIM * 4
        + 4 * HEAD_DIM
        + 16
        + sizes.layers * ctypes.sizeof(_Layer)
        + 2 * MAX_ROWS * 32
        + UNITS_A_BLOCK * 16
        + 5 * 8
        + 8
        + 2 * 12 * 8
    )


def most_rows(stack: DecoderStack) -> int:
    """The most rows that the kernel takes and is good for; 0 if it can't do this stack."""
    rows = _rows.get(stack)
    if rows is None:
        sizes = sizes_of(stack)
        blocks = _blocks(sizes, stack.norm.device)
        fitting = [
            n
            for n in range(1, MAX_ROWS + 1)
            if shared_memory(sizes, n, USEFUL_STAGES) <= SHARED_LIMIT
            and n * stack.heads * QUARTERS <= UNITS_A_BLOCK * blocks
        ]
        rows = max(fitting, default=0) if _takes(stack, sizes) else 0
        _rows[stack] = rows
    return rows


def takes_caches(stack: DecoderStack, caches: Caches) -> bool:
    """Whether the kernel reads these pages: bfloat16, all alike, addressable by the copy engine."""
    first = caches[0][0]
    block_tokens = first.shape[1]
    return (
        len(caches) == len(stack.layers)
        and block_tokens % TILE_KEYS == 0
        and all(
            cache.dtype == torch.bfloat16
            and cache.shape == first.shape
            and cache.data_ptr() % 16 == 0
            and all(stride % 8 == 0 for stride in cache.stride()[:3])
            and cache.stride() == first.stride()
            for pair in caches
            for cache in pair
        )
    )


def launch(
    stack: DecoderStack, x: Tensor, caches: Caches, block_tables: Tensor, context_lens: Tensor
) -> Tensor:
    """The logits of `decode_stack`. Raises RuntimeError if the launch fails or comes first in a capture."""
    device, rows = x.device, x.shape[0]
    prepared = _prepared.get(stack)
    pointers = tuple(cache.data_ptr() for pair in caches for cache in pair)
    if prepared is None or prepared.caches != pointers:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the first call of decode_stack with these caches can't be captured")
        prepared = _prepared[stack] = _prepare(stack, caches, pointers, device)
    if x.stride(1) != 1 or x.stride(0) % 4 != 0:
        x = x.contiguous()
    context_lens = context_lens.contiguous()
    logits = torch.empty((rows, stack.head.shape[0]), dtype=torch.float32, device=device)
    arguments = _Arguments.from_buffer_copy(prepared.base)
    arguments.x, arguments.x_pitch = x.data_ptr(), x.stride(0)
    arguments.logits = logits.data_ptr()
    arguments.tables, arguments.table_pitch = block_tables.data_ptr(), block_tables.stride(0)
    arguments.lens = context_lens.data_ptr()
    arguments.rows = rows
    code = _function(device)(
        ctypes.byref(arguments),
        prepared.blocks,
        SHARED_LIMIT,
        torch.cuda.current_stream(device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(f"decode stack of {len(stack.layers)} layers, {rows} rows: CUDA error {code}")
    return logits


def _takes(stack: DecoderStack, sizes: Sizes) -> bool:
    matrices = {
        "qkv": (sizes.qkv, sizes.hidden),
        "o": (sizes.hidden, sizes.attended),
        "gate_up": (2 * sizes.inner, sizes.hidden),
        "down": (sizes.hidden, sizes.inner),
    }
    biases = {"qkv_bias": sizes.qkv, "o_bias": sizes.hidden, "gate_up_bias": 2 * sizes.inner}
    vectors = {"attn_norm": sizes.hidden, "mlp_norm": sizes.hidden}
    optional = biases | {"down_bias": sizes.hidden, "q_norm": HEAD_DIM, "k_norm": HEAD_DIM}
    return (
        stack.head_dim == HEAD_DIM
        and stack.cos_sin.shape[1] == HEAD_DIM
        and stack.cos_sin.dtype == torch.float32
        and stack.heads % stack.kv_heads == 0
        and sizes.group <= MAX_GROUP
        and sizes.hidden <= MAX_HIDDEN
        and all(_fits(columns) for columns in (sizes.hidden, sizes.attended, sizes.inner))
        and sizes.vocab % GRANULE == 0
        and _is_matrix(stack.head, (sizes.vocab, sizes.hidden))
        and _is_vector(stack.norm, sizes.hidden)
        and all(
            all(_is_matrix(getattr(layer, name), shape) for name, shape in matrices.items())
            and all(_is_vector(getattr(layer, name), size) for name, size in vectors.items())
            and all(
                getattr(layer, name) is None or _is_vector(getattr(layer, name), size)
                for name, size in optional.items()
            )
            for layer in stack.layers
        )
    )


def _blocks(sizes: Sizes, device: torch.device) -> int:
    """One a multiprocessor, but every block has to take part in q|k|v and gate|up."""
    units = describe(device).units if device.type == "cuda" else UNITS
    return min(units, sizes.qkv // GRANULE, sizes.inner * 2 // GRANULE)


def _fits(columns: int) -> bool:
    """Whether the columns of a matrix come in a few chunks of one size (`chunk_of` in decode_stack.cu)."""
    chunk = next((size for size in (1024, 768, 512, 256) if columns % size == 0), 0)
    return chunk > 0 and columns // chunk <= MAX_CHUNKS


def _is_matrix(weight: LinearWeight, shape: tuple[int, int]) -> bool:
    if weight.layout != PLAIN or weight.shape != shape:
        return False
    plain = weight.tensors[0]
    return plain.dtype == torch.bfloat16 and plain.is_contiguous() and plain.data_ptr() % 16 == 0


def _is_vector(vector: Tensor, size: int) -> bool:
    return (
        vector.dtype == torch.bfloat16
        and vector.shape == (size,)
        and vector.is_contiguous()
        and vector.data_ptr() % 16 == 0
    )


def _prepare(
    stack: DecoderStack, caches: Caches, pointers: tuple[int, ...], device: torch.device
) -> Prepared:
    sizes, rows = sizes_of(stack), most_rows(stack)
    first = caches[0][0]
    blocks = _blocks(sizes, device)
    table = (_Layer * sizes.layers)()
    maps = _Maps(device, sizes.layers * MAPS + 1)
    for index, (layer, pair) in enumerate(zip(stack.layers, caches, strict=True)):
        table[index] = _layer(layer, pair)
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
            maps.add_matrix(matrix.tensors[0], gated=matrix is layer.gate_up)
        for one in pair:
            maps.add_cache(one)
    maps.add_matrix(stack.head.tensors[0], gated=False)
    layers = _to_device(bytes(table), device)
    encoded = _to_device(maps.encoded(), device)
    features = (sizes.qkv, sizes.attended, sizes.hidden, sizes.inner, sizes.hidden)
    buffers = [torch.zeros(rows * size * 4, dtype=torch.uint8, device=device) for size in features]
    parts = rows * blocks * 2 * sizes.group * (HEAD_DIM // 2 + 1) * 16
    buffers.append(torch.zeros(parts, dtype=torch.uint8, device=device))
    epoch = torch.zeros(1, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    arguments = _Arguments(
        layers=layers.data_ptr(),
        maps=encoded.data_ptr(),
        norm=stack.norm.data_ptr(),
        cos_sin=stack.cos_sin.data_ptr(),
        cos_sin_pitch=stack.cos_sin.stride(0),
        epoch=epoch.data_ptr(),
        k_block_pitch=first.stride(0),
        k_row_pitch=first.stride(1),
        v_block_pitch=first.stride(0),
        v_row_pitch=first.stride(1),
        eps=stack.eps,
        scale_log2=stack.scale * LOG2_E,
        layer_count=sizes.layers,
        hidden=sizes.hidden,
        heads=stack.heads,
        kv_heads=stack.kv_heads,
        inner=sizes.inner,
        vocab=sizes.vocab,
        block_tokens=first.shape[1],
        window=stack.window,
    )
    for name, buffer in zip(("qkv", "attended", "branch", "activated", "mlp", "parts"), buffers, strict=True):
        setattr(arguments, name, buffer.data_ptr())
    return Prepared(pointers, blocks, bytes(arguments), (layers, encoded, epoch, *buffers))


def _layer(layer: StackLayer, cache: tuple[Tensor, Tensor]) -> _Layer:
    made = _Layer()
    for name in _LAYER[:-2]:
        value = getattr(layer, name)
        setattr(made, name, None if value is None else value.data_ptr())
    made.k_cache, made.v_cache = (one.data_ptr() for one in cache)
    return made


def _to_device(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


@cache
def _function(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_decode_stack
    whole = ctypes.c_int
    function.argtypes = [ctypes.POINTER(_Arguments), whole, whole, ctypes.c_void_p]
    function.restype = whole
    return function


class _Maps:
    """Tensor maps in host memory, one after the other."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._library = library(describe(device).capability)
        pointer, whole, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
        self._library.quickturn_decode_stack_matrix.argtypes = [pointer, pointer, long, long, whole]
        self._library.quickturn_decode_stack_cache.argtypes = [
            pointer,
            pointer,
            whole,
            whole,
            long,
            long,
            long,
        ]
        self._memory = ctypes.create_string_buffer(count * MAP_BYTES + 64)
        self._start = -ctypes.addressof(self._memory) % 64
        self._used = 0

    def add_matrix(self, weight: Tensor, *, gated: bool) -> None:
        """Raises RuntimeError if the driver refuses."""
        made = self._library.quickturn_decode_stack_matrix(
            self._next(), weight.data_ptr(), weight.shape[0], weight.shape[1], gated
        )
        if not made:
            raise RuntimeError(f"the driver can't describe a weight of {tuple(weight.shape)}")

    def add_cache(self, cache: Tensor) -> None:
        """Keys or values. Raises RuntimeError if the driver refuses."""
        blocks, block_tokens, kv_heads, _ = cache.shape
        made = self._library.quickturn_decode_stack_cache(
            self._next(),
            cache.data_ptr(),
            kv_heads,
            block_tokens,
            blocks,
            cache.stride(1),
            cache.stride(0),
        )
        if not made:
            raise RuntimeError(f"the driver can't describe a cache of {tuple(cache.shape)}")

    def encoded(self) -> bytes:
        """All of them."""
        return self._memory.raw[self._start : self._start + self._used * MAP_BYTES]

    def _next(self) -> int:
        self._used += 1
        return ctypes.addressof(self._memory) + self._start + (self._used - 1) * MAP_BYTES
