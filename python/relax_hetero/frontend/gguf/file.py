"""A GGUF file: its metadata, and its tensors as they lie in the file.

Tensors are views of the mapped file; nothing is copied before it is packed.
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...artifact.file_hints import describe_value as found_text
from ...artifact.file_hints import hint_of, near_file
from ...artifact.regular_files import open_regular
from ...errors import FrontendError
from .metadata import MAX_ENTRIES, Reader, read_metadata

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
