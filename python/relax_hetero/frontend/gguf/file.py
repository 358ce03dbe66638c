"""A GGUF file: its metadata, and its tensors as they lie in the file.

Tensors are views of the mapped file; nothing is copied before it is packed.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from ...artifact.file_hints import describe_value as found_text
from ...artifact.file_hints import hint_of, near_file
from ...artifact.regular_files import open_regular
from ...errors import FrontendError

# The metadata of a GGUF file, read as llama.cpp reads it (`gguf_init_from_file` in `ggml/src/gguf.cpp`).
#
# Bytes that contradict each other or the file's size are an error before memory is taken for what they announce.
#
# The reader of the package ``gguf`` checks little, and makes an object for each string of a list. A tokenizer has
# hundreds of thousands of them, which takes seconds and some 60 bytes each; here a list is one object, and a text is
# read where it lies.

MAX_ENTRIES = 1 << 16
"""Keys, or tensors; files with more are damaged."""
_LONG = 256
"""A list of more numbers stays an array, one of more texts stays in the file."""
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of numbers, as `struct` and numpy name them."""
_BOOL, _TEXT, _LIST, _UINT32 = 7, 8, 9, 4
_LENGTH = struct.Struct("<Q")


class Texts(Sequence[str]):
    """A list of texts as a file has it: each is its number of bytes in 8 bytes, then the bytes.

    Parameters
    ----------
    view : memoryview
        Bytes of the file.
    begins : array of int
        Where each text's own bytes begin, and where that of one more would.
    """

    def __init__(self, view: memoryview, begins: array[int]) -> None:
        self._view, self._begins = view, begins

    def __len__(self) -> int:
        return len(self._begins) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return str(self._view[self._begins[index] : self._begins[index + 1] - 8], "utf-8")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))


class Reader:
    """Reads a file's bytes one after the other, never beyond its end.

    Parameters
    ----------
    view : memoryview
        Bytes of the file.
    path : str or PathLike of str
        Named in errors.

    Attributes
    ----------
    at : int
        The byte that is read next.
    """

    def __init__(self, view: memoryview, path: str | os.PathLike[str]) -> None:
        self.view, self.at, self._path = view, 0, path

    def error(self, text: str) -> FrontendError:
        """An error that names the file."""
        return FrontendError(f"{os.fspath(self._path)}: is no GGUF file that can be read: {text}")

    def skip(self, count: int, what: str) -> int:
        """Where the next `count` bytes begin, which need not be looked at."""
        begin, self.at = self.at, self.at + count
        if self.at > len(self.view):
            raise self.error(f"{what} ends at byte {self.at:,}, expected the file's {len(self.view):,} at most")
        return begin

    def number(self, form: str, what: str) -> Any:
        """A number of a type of `struct`."""
        found = struct.unpack_from(f"<{form}", self.view, self.skip(struct.calcsize(form), what))[0]
        if form == "?" and self.view[self.at - 1] > 1:
            raise self.error(f"{what} is {self.view[self.at - 1]}, expected 0 or 1 as it is a truth")
        return found

    def count(self, what: str, size: int) -> int:
        """The number of entries that follow, which take at least `size` bytes each."""
        found: int = self.number("Q", what)
        left = len(self.view) - self.at
        if found * size > left:
            raise self.error(f"{what} is {found:,}, expected at most {left // size:,}: the file has no bytes for more")
        return found

    def text(self, what: str) -> str:
        """A text, which is UTF-8."""
        length = self.number("Q", what)
        return self._decoded(self.skip(length, what), what)

    def texts(self, count: int, what: str) -> Texts:
        """Texts one after the other."""
        begins = array("q", [self.at + 8])
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(self.view, self.skip(8, what))
            self._decoded(self.skip(length, what), what)
            begins.append(self.at + 8)
        return Texts(self.view, begins)

    def _decoded(self, begin: int, what: str) -> str:
        try:
            return str(self.view[begin : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is no UTF-8 at byte {begin + error.start:,}: {error.reason}") from error


def read_metadata(reader: Reader, count: int) -> dict[str, Any]:
    """All metadata by key.

    Numbers are ``int``, ``float`` and ``bool``, texts ``str``, lists ``list``; long ones are `Texts` and arrays.

    Raises
    ------
    FrontendError
        If a key comes twice, a value's type is not known, or a value is not as its type says.
    """
    fields: dict[str, Any] = {}
    for _ in range(count):
        key = reader.text("the name of a key")
        if not key or key in fields:
            raise reader.error(f"found the key {key!r} {'twice' if key else 'as a name'}, expected names that differ")
        kind = reader.number("I", key)
        if key == "general.alignment" and kind != _UINT32:
            raise reader.error(f"{key} is of type {kind}, expected {_UINT32} (a whole number of 32 bits)")
        fields[key] = _value(reader, kind, key)
    return fields


def _value(reader: Reader, kind: int, key: str) -> Any:
    if kind in _FORMATS:
        return reader.number(_FORMATS[kind], key)
    if kind == _TEXT:
        return reader.text(key)
    if kind != _LIST:
        raise reader.error(f"{key} is of type {kind}, expected 0 to 12")
    kind = reader.number("I", key)
    if kind == _TEXT:
        texts = reader.texts(reader.count(f"the length of {key}", 8), key)
        return texts if len(texts) > _LONG else list(texts)
    if kind not in _FORMATS:
        raise reader.error(f"{key} is a list of type {kind}, expected numbers or texts")
    form = np.dtype(_FORMATS[kind]).newbyteorder("<")
    count = reader.count(f"the length of {key}", form.itemsize)
    begin = reader.skip(count * form.itemsize, key)
    if kind == _BOOL and max(reader.view[begin : reader.at], default=0) > 1:
        raise reader.error(f"{key} has numbers above 1, expected 0 and 1 as it is a list of truths")
    numbers = np.frombuffer(reader.view, form, count, begin)
    return numbers if count > _LONG else numbers.tolist()


_VERSIONS = (2, 3)
_MAX_DIMS, _MAX_NAME = 4, 63
"""Dimensions of a tensor, and bytes of its name, as llama.cpp has them."""
_ALIGNMENT = 32
_NUMBERS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
"""Types that numpy has; tensors of all others are bytes."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Slowest axis first, in elements.
    type : str
        Name of its type, such as "Q4_K".
    data : array
        Numbers of `shape` for F32, F16 and others that numpy has; bytes, ``(..., bytes of a row)``, for all others.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    data: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    """A file that is open.

    Attributes
    ----------
    path : Path
    fields : dict
        Metadata by key.
    tensors : dict
        Tensors by name.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, FileTensor]


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open a file.

    Raises
    ------
    FrontendError
        If the package gguf is not installed, or the file is none: it is cut off, of another version or byte order, or
        says of its metadata or tensors what cannot be.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise FrontendError(f"a GGUF file: {found_text(path)}; expected a path")
    try:
        with open_regular(path)[0] as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        why = f"{getattr(error, 'strerror', None) or error}{hint_of(path, 'rh.from_gguf')}{near_file(path)}"
        raise FrontendError(f"{os.fspath(path)}: is no GGUF file that can be read: {why}") from error
    reader = Reader(memoryview(mapped), path)
    magic = bytes(reader.view[:4])
    if magic != b"GGUF":
        raise reader.error(f"it begins with {magic!r}, expected b'GGUF'{hint_of(path, 'rh.from_gguf')}")
    reader.skip(4, "the file's first word")
    version = reader.number("I", "the version")
    if version and version & 0xFFFF == 0:
        raise reader.error("its numbers are big-endian, expected little-endian ones; convert it by gguf-convert-endian")
    if version not in _VERSIONS:
        raise reader.error(f"it is of version {version}, expected {' or '.join(map(str, _VERSIONS))}")
    counts = [reader.count("the number of tensors", 24), reader.count("the number of keys", 13)]
    if max(counts) > MAX_ENTRIES:
        raise reader.error(f"found {counts[0]:,} tensors and {counts[1]:,} keys, expected {MAX_ENTRIES:,} at most")
    fields = {"GGUF.version": version, "GGUF.tensor_count": counts[0], "GGUF.kv_count": counts[1]}
    fields |= read_metadata(reader, counts[1])
    return GgufFile(Path(path), fields, _read_tensors(reader, counts[0], fields.get("general.alignment", _ALIGNMENT)))


def _read_tensors(reader: Reader, count: int, alignment: int) -> dict[str, FileTensor]:
    """All tensors, each of which begins where those before it end."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise FrontendError("GGUF files are read by the package gguf; pip install 'relax-hetero[llm]'") from error
    if alignment < 1 or alignment & (alignment - 1):
        raise reader.error(f"general.alignment is {alignment}, expected a power of two")
    types = {int(kind): (str(kind.name), *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    places: dict[str, tuple[tuple[int, ...], str, int, int]] = {}
    before, end = "the begin", 0
    for _ in range(count):
        name = reader.text("the name of a tensor")
        if name in places or len(name.encode()) > _MAX_NAME:
            found = "twice" if name in places else f"of more than {_MAX_NAME} bytes"
            raise reader.error(f"found the tensor {name!r} {found}")
        what = f"tensor {name!r}"
        rank = reader.number("I", what)
        if rank > _MAX_DIMS:
            raise reader.error(f"{what} has {rank:,} dimensions, expected {_MAX_DIMS} at most")
        shape = tuple(reader.number("Q", what) for _ in range(rank))[::-1]
        if not all(shape) or math.prod(shape) >= 1 << 63:
            raise reader.error(f"{what} has shape {shape}, expected extents above 0 and fewer than 2**63 elements")
        kind = reader.number("I", what)
        if kind not in types:
            raise reader.error(f"{what} is of type {kind}, which the package gguf does not know")
        type_name, block, block_bytes = types[kind]
        if (shape or (1,))[-1] % block:
            raise reader.error(
                f"{what} has rows of {shape[-1:]} elements, expected a multiple of {type_name}'s {block}"
            )
        offset, size = reader.number("Q", what), math.prod(shape) // block * block_bytes
        # A wrong type makes a tensor longer or shorter, which shows at the next one.
        if offset != end:
            raise reader.error(
                f"{what} begins at byte {offset:,} of the data, expected {end:,} after {before}, aligned to {alignment}"
            )
        places[name] = (shape, type_name, offset, size)
        before, end = f"{what} of type {type_name}", -(-(offset + size) // alignment) * alignment
    begin = -(-reader.at // alignment) * alignment
    tensors = {}
    for name, (shape, type_name, offset, size) in places.items():
        if begin + offset + size > len(reader.view):
            last, have = begin + offset + size, len(reader.view)
            raise reader.error(f"tensor {name!r} ends at byte {last:,}, expected the file's {have:,} at most")
        form, extents = _NUMBERS.get(type_name, ""), shape
        if not form:
            form, extents = "u1", (*shape[:-1], size // max(1, math.prod(shape[:-1])))
        data = np.frombuffer(reader.view, form, math.prod(extents), begin + offset).reshape(extents)
        tensors[name] = FileTensor(name, shape, type_name, data)
    if tensors and begin + end < len(reader.view):
        raise reader.error(
            f"its tensors end at byte {begin + end:,}, expected the file's {len(reader.view):,}: something is left over"
        )
    return tensors
