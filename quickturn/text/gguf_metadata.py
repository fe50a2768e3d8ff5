"""Reads the key-value section of a GGUF file, and nothing else of it.

The layout is that of the GGUF specification (versions 2 and 3, little-endian): magic, version, tensor count,
pair count, then the pairs. A tokenizer's 100k strings are read in tens of milliseconds, without mapping a
single weight.
"""

import mmap
import struct
from pathlib import Path

Scalar = int | float | bool | str
Value = Scalar | list[int] | list[float] | list[bool] | list[str]

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def read_gguf_metadata(path: str | Path) -> dict[str, Value]:
    """All metadata of the file, by key. Raises ValueError when `path` isn't a GGUF file that we can read."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        version = _U32.unpack_from(data, 4)[0]
        if version not in (2, 3):
            raise ValueError(f"{path}: GGUF version {version} is not supported, only 2 and 3 (little-endian)")
        pairs = _U64.unpack_from(data, 16)[0]
        position = 24
        metadata: dict[str, Value] = {}
        for _ in range(pairs):
            key, position = _string(data, position)
            kind = _U32.unpack_from(data, position)[0]
            metadata[key], position = _value(data, position + 4, kind)
        return metadata


def _string(data: mmap.mmap, position: int) -> tuple[str, int]:
    start = position + 8
    end = start + _U64.unpack_from(data, position)[0]
    return data[start:end].decode("utf-8", "replace"), end


def _value(data: mmap.mmap, position: int, kind: int) -> tuple[Value, int]:
    if kind == _STRING:
        return _string(data, position)
    if kind == _ARRAY:
        return _array(data, position)
    code = struct.Struct("<" + _SCALARS[kind])
    value: Scalar = code.unpack_from(data, position)[0]
    return value, position + code.size


def _array(data: mmap.mmap, position: int) -> tuple[Value, int]:
    kind = _U32.unpack_from(data, position)[0]
    count = _U64.unpack_from(data, position + 4)[0]
    position += 12
    if kind == _STRING:
        strings = []
        for _ in range(count):
            text, position = _string(data, position)
            strings.append(text)
        return strings, position
    code = struct.Struct(f"<{count}{_SCALARS[kind]}")
    return list(code.unpack_from(data, position)), position + code.size
