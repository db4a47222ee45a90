"""The head of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata and tensor table.

``gguf.GGUFReader`` makes several array views per token and merge of the vocabulary, hundreds of thousands of Python
objects that the decoder has no use for. This reader steps over the arrays.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VERSIONS = (2, 3)
_FORMATS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9


class ArrayLength(NamedTuple):
    """Stands for an array value, which is not read."""

    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFHeader:
    """What a GGUF file says of itself.

    Attributes:
        path: of the file.
        metadata: numbers, booleans and strings by key; arrays as their ``ArrayLength``.
        tensors: shapes by GGUF name, as in torch: slowest dimension first. All their data lies inside the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]


def read_header(path: Path) -> GGUFHeader:
    """Reads metadata and tensor table; touches no tensor data.

    Raises:
        ValueError: the file is no GGUF file, is cut off, or holds values that the format does not have.
    """
    data = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, "u1")
    if data[:4].tobytes() != b"GGUF":
        raise ValueError("it does not start with the GGUF magic bytes")
    try:
        cursor = _Cursor(data)
        version, num_tensors, num_values = cursor.take("<IQQ")
        if version not in VERSIONS:
            raise ValueError(f"GGUF version {version}; supported: {', '.join(map(str, VERSIONS))}")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            metadata[key] = cursor.value(*cursor.take("<I"))
        table = [cursor.tensor() for _ in range(num_tensors)]
    except struct.error as error:
        raise ValueError("the file ends inside its header") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"a name or text in the header is not UTF-8 ({error})") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    first = -(-cursor.position // alignment) * alignment
    for name, shape, kind, offset in table:
        _check_data(name, shape, kind, first + offset, len(data))
    shapes = {name: shape for name, shape, _, _ in table}
    return GGUFHeader(path=path, metadata=metadata, tensors=shapes)


def _check_data(name: str, shape: tuple[int, ...], kind: int, start: int, file_bytes: int) -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"tensor {name!r} has the storage type {kind}, which gguf does not know"
        ) from error
    if not shape or shape[-1] % block_len:
        raise ValueError(f"tensor {name!r} of shape {shape} is not made of blocks of {block_len}")
    num_bytes = prod(shape) // block_len * block_bytes
    if start + num_bytes > file_bytes:
        raise ValueError(
            f"tensor {name!r} ends at byte {start + num_bytes} of a file of {file_bytes} bytes: "
            "the file is cut off"
        )


class _Cursor:
    """A position in the file's bytes; every method reads there and moves on."""

    def __init__(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._data = data
        self.position = 4

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data.data, self.position)
        self.position += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (length,) = self.take("<Q")
        return self._skip(length).tobytes().decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.take(_format(kind))[0]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        (num_dims,) = self.take("<I")
        if num_dims > 8:
            raise ValueError(f"tensor {name!r} has {num_dims} dimensions")
        shape = self.take(f"<{num_dims}Q")[::-1]
        kind, offset = self.take("<IQ")
        return name, shape, kind, offset

    def _array(self) -> ArrayLength:
        kind, length = self.take("<IQ")
        if kind == _STRING:
            for _ in range(length):
                self._skip(*self.take("<Q"))
        else:
            self._skip(length * struct.calcsize(_format(kind)))
        return ArrayLength(length)

    def _skip(self, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        start, self.position = self.position, self.position + num_bytes
        if self.position > len(self._data):
            raise struct.error("past the end")
        return self._data[start : self.position]


def _format(kind: int) -> str:
    if kind not in _FORMATS:
        raise ValueError(f"value type {kind} in the header, which the format does not have")
    return _FORMATS[kind]
