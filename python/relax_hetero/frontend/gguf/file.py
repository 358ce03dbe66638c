"""Reader of GGUF files: metadata and tensors.

Tensors are views of the mapped file, which are copied only when they are packed. Metadata is parsed as in llama.cpp
(`gguf_init_from_file` in `ggml/src/gguf.cpp`). Sizes that contradict each other or the file are an error before memory
is allocated for them.

The reader of the package ``gguf`` checks little, and creates an object for each string of a list. A tokenizer has
hundreds of thousands, which takes seconds and 60 bytes each; here a list is one object that decodes strings on access.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np

from ...artifact.file_hints import describe_value, hint_of, near_file
from ...artifact.regular_files import open_regular
from ...errors import FrontendError, pip_install

MAX_ENTRIES = 1 << 16  # maximum number of keys, and of tensors; files with more are damaged
_MAX_EAGER_ENTRIES = 256
"""Maximum length of lists that become Python lists; longer ones stay an array of numbers, or `Texts`."""
_NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format character of `struct` and numpy, by the number of a type in the file (`gguf_type`)."""
_BOOL_TYPE, _STRING_TYPE, _ARRAY_TYPE, _UINT32_TYPE = 7, 8, 9, 4
_LENGTH_FORMAT = struct.Struct("<Q")


class Texts(Sequence[str]):
    """List of texts in a file, decoded on access. Each is stored as its length in 8 bytes, then its bytes.

    `view`: bytes of the file; `starts`: offset of each text's first byte, and of a text that would follow the last.
    """

    def __init__(self, view: memoryview, starts: array[int]) -> None:
        self._view, self._starts = view, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

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
        return str(self._view[self._starts[index] : self._starts[index + 1] - 8], "utf-8")

    def __iter__(self) -> Iterator[str]:
        texts = self.joined().split("\0")
        if len(texts) == len(self):
            return iter(texts)
        return (str(self._view[begin : end - 8], "utf-8") for begin, end in pairwise(self._starts))

    def joined(self) -> str:
        """All texts, with a NUL character between them.

        Raises UnicodeDecodeError if one is not UTF-8; the error's offset is not that in the file.
        """
        starts = np.frombuffer(self._starts, np.int64) - self._starts[0]
        data = np.frombuffer(self._view[self._starts[0] : self._starts[-1] - 8], "u1")
        is_text = np.ones(len(data), bool)
        for byte in range(7):  # the last byte of a length is 0, and stays
            is_text[starts[1:-1] - 8 + byte] = False
        return data[is_text].tobytes().decode()


class Reader:
    """Sequential reader of a file's bytes with bounds checks; `what` names the value that is read, for errors.

    `view`: bytes of the file; `path`: path of the file, for errors; `offset`: offset of the next byte.
    """

    def __init__(self, view: memoryview, path: str | os.PathLike[str]) -> None:
        self.view, self.offset, self._path = view, 0, path

    def error(self, text: str) -> FrontendError:
        """An error that names the file."""
        return FrontendError(f"{os.fspath(self._path)}: is not a readable GGUF file: {text}")

    def skip(self, count: int, what: str) -> int:
        """Skip `count` bytes and return their offset."""
        start, self.offset = self.offset, self.offset + count
        if self.offset > len(self.view):
            raise self.error(f"{what} ends at byte {self.offset:,}, expected the file's {len(self.view):,} at most")
        return start

    def number(self, form: str, what: str) -> Any:
        """Read a number in a format of `struct`."""
        value = struct.unpack_from(f"<{form}", self.view, self.skip(struct.calcsize(form), what))[0]
        if form == "?" and self.view[self.offset - 1] > 1:
            raise self.error(f"{what} is {self.view[self.offset - 1]}, expected 0 or 1 for a boolean")
        return value

    def count(self, what: str, size: int) -> int:
        """Read the number of entries that follow, each of at least `size` bytes."""
        entries: int = self.number("Q", what)
        rest = len(self.view) - self.offset
        if entries * size > rest:
            raise self.error(
                f"{what} is {entries:,}, expected at most {rest // size:,}: the file is too short for more"
            )
        return entries

    def text(self, what: str) -> str:
        """Read a text in UTF-8."""
        return self._decode(self.skip(self.number("Q", what), what), what)

    def texts(self, count: int, what: str) -> Texts:
        """Read consecutive texts."""
        starts, end = array("q", [self.offset + 8]), self.offset
        try:
            for _ in range(count):
                end += 8 + _LENGTH_FORMAT.unpack_from(self.view, end)[0]
                starts.append(end + 8)
        except (struct.error, OverflowError):  # beyond the file
            end = max(end, len(self.view) + 1)
        self.skip(end - self.offset, what)
        texts = Texts(self.view, starts)
        try:
            texts.joined()
        except UnicodeDecodeError:
            for begin, following in pairwise(starts):
                self.offset = following - 8
                self._decode(begin, what)
        return texts

    def _decode(self, start: int, what: str) -> str:
        try:
            return str(self.view[start : self.offset], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 at byte {start + error.start:,}: {error.reason}") from error


def read_metadata(reader: Reader, count: int) -> dict[str, Any]:
    """Read all metadata by key.

    Numbers are ``int``, ``float`` and ``bool``, texts ``str``, lists ``list``; long ones are `Texts` and arrays. Raises
    FrontendError if a key is duplicated, or a value is invalid or of an unknown type.
    """
    fields: dict[str, Any] = {}
    for _ in range(count):
        key = reader.text("the name of a key")
        if not key or key in fields:
            raise reader.error(f"found the key {key!r} {'twice' if key else 'as a name'}, expected names that differ")
        kind = reader.number("I", key)
        if key == "general.alignment" and kind != _UINT32_TYPE:
            raise reader.error(f"{key} is of type {kind}, expected {_UINT32_TYPE} (a whole number of 32 bits)")
        fields[key] = _read_value(reader, kind, key)
    return fields


def _read_value(reader: Reader, kind: int, key: str) -> Any:
    if kind in _NUMBER_FORMATS:
        return reader.number(_NUMBER_FORMATS[kind], key)
    if kind == _STRING_TYPE:
        return reader.text(key)
    if kind != _ARRAY_TYPE:
        raise reader.error(f"{key} is of type {kind}, expected 0 to 12")
    kind = reader.number("I", key)
    if kind == _STRING_TYPE:
        texts = reader.texts(reader.count(f"the length of {key}", 8), key)
        return texts if len(texts) > _MAX_EAGER_ENTRIES else list(texts)
    if kind not in _NUMBER_FORMATS:
        raise reader.error(f"{key} is a list of type {kind}, expected numbers or texts")
    form = np.dtype(_NUMBER_FORMATS[kind]).newbyteorder("<")
    count = reader.count(f"the length of {key}", form.itemsize)
    start = reader.skip(count * form.itemsize, key)
    if kind == _BOOL_TYPE and max(reader.view[start : reader.offset], default=0) > 1:
        raise reader.error(f"{key} has numbers above 1, expected 0 and 1 for a list of booleans")
    numbers = np.frombuffer(reader.view, form, count, start)
    return numbers if count > _MAX_EAGER_ENTRIES else numbers.tolist()


_VERSIONS = (2, 3)
_MAX_DIMS, _MAX_NAME_BYTES = 4, 63  # limits of llama.cpp: dimensions of a tensor, and bytes of its name
_DEFAULT_ALIGNMENT = 32
_NUMPY_TYPES = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
"""Types that numpy has; tensors of all other types are bytes."""

_NEWER_TYPES = {40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18)}
"""Types that some versions of the package gguf lack: number, name, elements and bytes of a block."""


@dataclass(frozen=True, eq=False)
class FileTensor:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]  # slowest axis first, in elements
    type: str  # name of its type, such as "Q4_K"
    data: np.ndarray  # numbers of `shape` for types that numpy has; bytes, ``(..., bytes of a row)``, for all others

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.data.nbytes

    def renamed(self, name: str) -> FileTensor:
        """The tensor with another name."""
        tensor = copy(self)
        tensor.__dict__["name"] = name  # the class is frozen
        return tensor


class LazyTensor(FileTensor):
    """A tensor whose data is made each time that it is read, such as a stack of experts."""

    def __init__(
        self,
        # As in `FileTensor`.
        name: str,
        shape: tuple[int, ...],
        type: str,
        nbytes: int,  # bytes of the data
        read: Callable[[], np.ndarray],  # function that makes the data
    ) -> None:
        self.__dict__.update(name=name, shape=shape, type=type, _nbytes=nbytes, _read=read)  # the base is frozen

    @property
    def data(self) -> np.ndarray:  # type: ignore[override]
        """The data; see `FileTensor`."""
        return self._read()  # type: ignore[attr-defined, no-any-return]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self._nbytes  # type: ignore[attr-defined, no-any-return]


@dataclass(frozen=True)
class GgufFile:
    """An open file, or a folder of Hugging Face as one (`frontend.hub`)."""

    path: Path
    fields: dict[str, Any]  # metadata by key
    tensors: dict[str, FileTensor]  # tensors by name
    mapped: tuple[mmap.mmap, ...]  # the bytes of the file, or of each file of a folder, which tensors refer to

    def first_layers(self, count: int) -> GgufFile:
        """The model without the layers after the first `count`."""
        key = f"{self.fields['general.architecture']}.block_count"
        layers = self.fields[key]
        fields = {
            name: value[:count] if isinstance(value, list) and len(value) == layers else value
            for name, value in self.fields.items()
        }
        removed = tuple(f"blk.{layer}." for layer in range(count, layers))
        tensors = {name: tensor for name, tensor in self.tensors.items() if not name.startswith(removed)}
        return replace(self, fields={**fields, key: count}, tensors=tensors)

    def release_pages(self) -> None:
        """Let the system take back the memory of the file's bytes, which it reads again if they are used."""
        for mapped in self.mapped:
            if hasattr(mapped, "madvise"):
                mapped.madvise(mmap.MADV_DONTNEED)


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open a file.

    Raises FrontendError if the package gguf is not installed, or the file is truncated, of another version or byte
    order, or has invalid metadata or tensors.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise FrontendError(f"a GGUF file: {describe_value(path)}; expected a path")
    try:
        with open_regular(path)[0] as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = f"{getattr(error, 'strerror', None) or error}{hint_of(path, 'rh.from_gguf')}{near_file(path)}"
        raise FrontendError(f"{os.fspath(path)}: is not a readable GGUF file: {reason}") from error
    reader = Reader(memoryview(mapped), path)
    magic = bytes(reader.view[:4])
    if magic != b"GGUF":
        raise reader.error(f"expected it to begin with b'GGUF', found {magic!r}{hint_of(path, 'rh.from_gguf')}")
    reader.skip(4, "the magic")
    version = reader.number("I", "the version")
    if version and version & 0xFFFF == 0:
        raise reader.error("its numbers are big-endian, expected little-endian ones; convert with gguf-convert-endian")
    if version not in _VERSIONS:
        raise reader.error(f"it is of version {version}, expected {' or '.join(map(str, _VERSIONS))}")
    tensors, keys = reader.count("the number of tensors", 24), reader.count("the number of keys", 13)
    if max(tensors, keys) > MAX_ENTRIES:
        raise reader.error(f"found {tensors:,} tensors and {keys:,} keys, expected {MAX_ENTRIES:,} at most")
    fields = {"GGUF.version": version, "GGUF.tensor_count": tensors, "GGUF.kv_count": keys}
    fields |= read_metadata(reader, keys)
    alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
    return GgufFile(Path(path), fields, _read_tensors(reader, tensors, alignment), (mapped,))


def _read_tensors(reader: Reader, count: int, alignment: int) -> dict[str, FileTensor]:
    """Read all tensors; each must begin where the previous one ends."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise FrontendError(f"GGUF files are read by the package gguf; {pip_install('llm')}") from error
    if alignment < 1 or alignment & (alignment - 1):
        raise reader.error(f"general.alignment is {alignment}, expected a power of two")
    types = {int(kind): (str(kind.name), *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    types = _NEWER_TYPES | types
    entries: dict[str, tuple[tuple[int, ...], str, int, int]] = {}
    previous, end = "the data's beginning", 0
    for _ in range(count):
        name = reader.text("the name of a tensor")
        if name in entries or len(name.encode()) > _MAX_NAME_BYTES:
            problem = "twice" if name in entries else f"of more than {_MAX_NAME_BYTES} bytes"
            raise reader.error(f"found the tensor {name!r} {problem}")
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
        # A wrong type of a tensor changes its size, so that this check fails at the next tensor.
        if offset != end:
            raise reader.error(
                f"{what} begins at byte {offset:,} of the data, expected {end:,} after {previous}, aligned "
                f"to {alignment}"
            )
        entries[name] = (shape, type_name, offset, size)
        previous, end = f"{what} of type {type_name}", -(-(offset + size) // alignment) * alignment
    data_start = -(-reader.offset // alignment) * alignment
    tensors = {}
    for name, (shape, type_name, offset, size) in entries.items():
        if data_start + offset + size > len(reader.view):
            tensor_end, file_end = data_start + offset + size, len(reader.view)
            raise reader.error(f"tensor {name!r} ends at byte {tensor_end:,}, expected the file's {file_end:,} at most")
        form, extents = _NUMPY_TYPES.get(type_name, ""), shape
        if not form:
            form, extents = "u1", (*shape[:-1], size // max(1, math.prod(shape[:-1])))
        data = np.frombuffer(reader.view, form, math.prod(extents), data_start + offset).reshape(extents)
        tensors[name] = FileTensor(name, shape, type_name, data)
    if tensors and data_start + end < len(reader.view):
        raise reader.error(
            f"its tensors end at byte {data_start + end:,}, expected the end of the file, {len(reader.view):,}"
        )
    return tensors
