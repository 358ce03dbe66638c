"""Reader of safetensors files: tensors as views of the mapped files.

A file begins with the length of its header in 8 bytes, then the header in JSON: type, shape and offsets of each tensor.
The package safetensors copies tensors into arrays of numpy, which lacks bfloat16 and 8-bit floats; here nothing is
copied. Sizes that contradict each other or the file are an error before memory is allocated for them.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from ...artifact.regular_files import open_regular, read_regular
from ...errors import FrontendError
from ...target.element_types import numpy_dtype

INDEX = "model.safetensors.index.json"  # file that names the file of each tensor, if there are several
_SINGLE = "model.safetensors"
_MAX_JSON_BYTES = 100_000_000  # maximum length of a header, as in the package safetensors, and of other JSON files
_LENGTH_BYTES = 8
_MAX_DIMS = 8
_ELEMENT_TYPES = {
    "BOOL": "uint8",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "uint8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
}
"""Element types by their names in files; biased exponents (F8_E8M0) are bytes."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file."""

    name: str
    type: str  # name of its type in the file, such as "BF16"
    data: np.ndarray  # view of the mapped file
    file: Path  # the file, for errors

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, slowest axis first."""
        return self.data.shape

    def error(self, text: str) -> FrontendError:
        """An error that names the tensor and its file."""
        return FrontendError(f"{self.file}: tensor {self.name!r} {text}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises FrontendError if the file is missing, too long or not such a file.
    """
    try:
        return parse_object(read_regular(path, _MAX_JSON_BYTES), path)
    except OSError as error:
        raise FrontendError(f"{path}: cannot be read: {error.strerror or error}") from error


def parse_object(data: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object without duplicate names; FrontendError, which names the file, for anything else."""

    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            names = [name for name, _ in pairs]
            duplicate = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the name {duplicate!r:.100} occurs twice")
        return values

    try:
        value = json.loads(data.decode(), object_pairs_hook=make)
    except (ValueError, RecursionError) as error:
        raise FrontendError(f"{path}: is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise FrontendError(f"{path}: found {value!r:.100}, expected names and values")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of the index if there is one, else one file, else all.

    Raises FrontendError if there is none, or the index is invalid or names files outside the folder.
    """
    if (folder / INDEX).exists():
        return [folder / name for name in sorted(set(_read_index(folder).values()))]
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not files:
        found = "; its weights are a file of PyTorch" if any(folder.glob("pytorch_model*.bin")) else ""
        raise FrontendError(f"{folder}: found no *.safetensors file{found}, expected {_SINGLE} or {INDEX}")
    return files


def _read_index(folder: Path) -> Mapping[str, str]:
    """Name of the file of each tensor."""
    path = folder / INDEX
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise FrontendError(f"{path}: weight_map is {files!r:.100}, expected the file of each tensor")
    for name in files.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name or "\\" in name:
            raise FrontendError(f"{path}: found the file {name!r:.100}, expected a *.safetensors file of the folder")
    return files


def read_tensors(folder: Path) -> tuple[dict[str, StoredTensor], tuple[mmap.mmap, ...]]:
    """Map all files of a folder; return their tensors by name, and the mapped files.

    Raises FrontendError if a file is missing or damaged, or two files have a tensor of the same name, or a file lacks
    one of the index.
    """
    tensors: dict[str, StoredTensor] = {}
    files = []
    for path in weight_files(folder):
        mapped = _map(path)
        files.append(mapped)
        for name, tensor in _read_file(mapped, path).items():
            if name in tensors:
                raise tensor.error(f"is in {tensors[name].file.name}, too, expected it once")
            tensors[name] = tensor
    expected = _read_index(folder) if (folder / INDEX).exists() else {}
    for name, file in expected.items():
        if name not in tensors or tensors[name].file.name != file:
            raise FrontendError(f"{folder / file}: lacks tensor {name!r}, which {INDEX} expects there")
    return tensors, tuple(files)


def _map(path: Path) -> mmap.mmap:
    try:
        with open_regular(path)[0] as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(getattr(error, "strerror", None) or error)) from error


def _unreadable(path: Path, problem: str) -> FrontendError:
    return FrontendError(f"{path}: is not a readable safetensors file: {problem}")


def _read_file(mapped: mmap.mmap, path: Path) -> dict[str, StoredTensor]:
    view = memoryview(mapped)
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    limit = min(len(view) - _LENGTH_BYTES, _MAX_JSON_BYTES)
    if len(view) < _LENGTH_BYTES or length > limit:
        raise _unreadable(path, f"its header has {length:,} bytes, expected {max(limit, 0):,} at most")
    start = _LENGTH_BYTES + length
    header = parse_object(bytes(view[_LENGTH_BYTES:start]), path)
    header.pop("__metadata__", None)
    data, tensors, ranges = view[start:], {}, []
    for name, entry in header.items():
        tensors[name], offsets = _read_tensor(name, entry, data, path)
        ranges.append((*offsets, name))
    _check_ranges(ranges, len(data), path)
    return tensors


def _read_tensor(name: str, entry: Any, data: memoryview, path: Path) -> tuple[StoredTensor, tuple[int, int]]:
    """A tensor, and the begin and end of its bytes."""
    what = f"tensor {name!r:.100}"
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(kind, str) or kind not in _ELEMENT_TYPES:
        raise _unreadable(path, f"{what} is of type {kind!r:.100}, expected one of {', '.join(_ELEMENT_TYPES)}")
    if not _are_counts(shape) or len(shape) > _MAX_DIMS or math.prod(shape) >= 1 << 63:
        raise _unreadable(path, f"{what} has shape {shape!r:.100}, expected up to {_MAX_DIMS} whole numbers")
    element = numpy_dtype(_ELEMENT_TYPES[kind])
    size = math.prod(shape) * element.itemsize
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[1] > len(data) or offsets[1] - offsets[0] != size:
        raise _unreadable(
            path,
            f"{what} has data_offsets {offsets!r:.100}, expected a begin and an end of {size:,} bytes within "
            f"{len(data):,}",
        )
    array = np.frombuffer(data[offsets[0] : offsets[1]], element) if size else np.empty(0, element)
    return StoredTensor(name, kind, array.reshape(shape), path), (offsets[0], offsets[1])


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_ranges(ranges: Iterable[tuple[int, int, str]], size: int, path: Path) -> None:
    """Raise FrontendError unless tensors fill the file without overlaps and holes."""
    end, previous = 0, "the header"
    for first, last, name in sorted(ranges):
        if first != end:
            raise _unreadable(path, f"tensor {name!r:.100} begins at byte {first:,}, expected {end:,} after {previous}")
        end, previous = last, f"tensor {name!r:.100}"
    if end != size:
        raise _unreadable(path, f"its tensors end at byte {end:,}, expected the end of the file, {size:,}")
