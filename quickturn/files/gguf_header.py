"""The header of a GGUF file: metadata and where the tensors lie.

The `gguf` package's reader makes an array object of every vocabulary string (2.4 s for 49,152 tokens); this
one takes 0.1 s. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little
endian.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quickturn.files.errors import LoadError

Value = int | float | bool | str | list[Any]
"""Of metadata; lists hold values of one kind."""

Result = TypeVar("Result")

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: its shape as torch writes it (GGUF's own order reversed), ggml type number, first byte in
    the file.
    """

    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata values (numbers, booleans, strings, lists of them) and tensors, by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, form: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + form)
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, at, length, found = self.data, self.at, _LENGTH.unpack_from, []
        for _ in range(count):
            start = at + 8
            at = start + length(data, at)[0]
            found.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        if at > len(data):
            raise struct.error("strings run over the end of the file")
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            of, count = self.take("IQ")
            if of in _SCALARS:
                return list(self.take(f"{count}{_SCALARS[of]}"))
            return self.strings(count) if of == _STRING else [self.value(of) for _ in range(count)]
        return self.take(_SCALARS[kind])[0]


def read_header(path: Path) -> GgufHeader:
    """The header of the GGUF file `path`. Raises LoadError if it isn't one, or is cut off."""
    return _read(path, lambda cursor: _header(path, cursor))


def read_metadata(path: Path) -> dict[str, Value]:
    """The metadata of the GGUF file `path` alone. Raises LoadError if it isn't one, or is cut off."""
    return _read(path, lambda cursor: _metadata(path, cursor)[0])


def _read(path: Path, parse: Callable[[_Cursor], Result]) -> Result:
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise LoadError(f"{path} is empty") from None
    with data:
        if data[:4] != _MAGIC:
            raise LoadError(f"{path} is not a GGUF file")
        try:
            return parse(_Cursor(data))
        except (struct.error, KeyError, ArithmeticError, MemoryError, RecursionError) as error:
            raise LoadError(f"{path} is damaged or cut off: {error}") from error


def _metadata(path: Path, cursor: _Cursor) -> tuple[dict[str, Any], int]:
    """The metadata, behind which the tensors' descriptions begin, and how many of these there are."""
    cursor.at = len(_MAGIC)
    (version,) = cursor.take("I")
    if version not in (2, 3):
        raise LoadError(f"{path} is GGUF version {version} (or big endian); versions 2 and 3 are read")
    tensor_count, metadata_count = cursor.take("QQ")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.string()
        (kind,) = cursor.take("I")
        metadata[key] = cursor.value(kind)
    return metadata, tensor_count


def _header(path: Path, cursor: _Cursor) -> GgufHeader:
    metadata, tensor_count = _metadata(path, cursor)
    found: dict[str, GgufTensor] = {}
    for _ in range(tensor_count):
        name = cursor.string()
        (dims,) = cursor.take("I")
        shape = cursor.take(f"{dims}Q")
        ggml_type, offset = cursor.take("IQ")
        found[name] = GgufTensor(tuple(reversed(shape)), ggml_type, offset)
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: GgufTensor(tensor.shape, tensor.ggml_type, tensor.offset + start)
        for name, tensor in found.items()
    }
    return GgufHeader(path, metadata, tensors)
