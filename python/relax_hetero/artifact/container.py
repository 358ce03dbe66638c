"""The file of an executable: a shared library, then weights, metadata and a footer, in one file.

An ELF loader ignores bytes after the last section, so the file can be loaded as a library. Weights begin at multiples
of `WEIGHT_ALIGNMENT` and are memory-mapped. Layout::

    library | padding | weight | padding | weight ... | metadata (JSON) | footer

Further versions of an executable, without optional devices (`Version`), store their constants and code among the
weights. A signed file has a trailer after its footer (`signing`).

The footer (`_BODY` and `_CHECKSUM`, little endian): magic, format version, checksums of the library and of the
metadata, end of the library, begin and end of the metadata, and a checksum of all that.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import BuildError
from ..system import OpenFolder, copy_to_memory, read_at
from ..target.cpu_cores import num_cores
from .file_hints import hint_of, near_file
from .regular_files import open_regular
from .signing import TRAILER_BYTES, changed, check_signed, verify, without_trailer
from .typed_data import read_json

FORMAT_VERSION = 4
WEIGHT_ALIGNMENT = 64  # bytes of alignment on which kernels rely (TVM's kAllocAlignment)
_MAGIC = b"rlxheter"
_BODY = struct.Struct("<8sIIIQQQ")
_CHECKSUM = struct.Struct("<I")
_FOOTER_BYTES = _BODY.size + _CHECKSUM.size
_END_BYTES = _FOOTER_BYTES + TRAILER_BYTES
_COPY_BYTES = 1 << 24


@dataclass(frozen=True)
class Weight:
    """The position of a weight in the file, in bytes, and the checksum (CRC-32) of its bytes."""

    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True)
class Version:
    """A version of an executable, to be written."""

    library: Path  # linked shared library
    metadata: str  # JSON text
    weights: Sequence[np.ndarray]  # one-dimensional ``uint8`` arrays


@dataclass(frozen=True, eq=False)
class Container:
    """An opened file of an executable."""

    path: Path  # path of the file when it was opened
    identity: tuple[int, int]  # device and inode numbers of the file
    descriptor: int  # descriptor of the open file, or of its copy in memory; closed with this object
    header: dict[str, Any]  # JSON object of the file's header
    weights: tuple[Weight, ...]  # constants in order; two may share their bytes
    data: np.ndarray  # all bytes of the file except a signature, as a private mapping of ``uint8``
    code_bytes: int  # size of the shared library
    code_begin: int = 0  # offset of the shared library; 0 unless this is a version

    @property
    def code(self) -> np.ndarray:
        """The mapped bytes of the shared library."""
        return self.data[self.code_begin : self.code_begin + self.code_bytes]

    def versions(self) -> list[Container]:
        """A container for the executable and for each of its versions; ValueError for an invalid header."""
        entries = self.header.get("versions", [])
        if not isinstance(entries, list) or not all(map(_is_version, entries)):
            raise ValueError("its 'versions' are no list of objects with metadata and a number of constants")
        begin = len(self.weights) - sum(entry["constants"] + 1 for entry in entries)
        if begin < 0:
            raise ValueError(f"{len(self.weights)} weights are too few for {len(entries)} versions")
        containers = [replace(self, weights=self.weights[:begin])]
        for entry in entries:
            end = begin + entry["constants"]
            code = self.weights[end]
            header = {**self.header, "metadata": entry["metadata"], "versions": []}
            weights = self.weights[begin:end]
            containers.append(
                replace(self, header=header, weights=weights, code_begin=code.offset, code_bytes=code.nbytes)
            )
            if zlib.crc32(containers[-1].code.data) != code.checksum:
                raise ValueError("the code of a version is corrupt: its checksum differs from the header's")
            begin = end + 1
        return containers

    def weight(self, index: int) -> np.ndarray:
        """The mapped bytes of a weight."""
        weight = self.weights[index]
        return self.data[weight.offset : weight.offset + weight.nbytes]

    def verify_weights(self) -> None:
        """Read every weight on all cores and compare its checksum; the BuildError names the first that differs."""
        arrays = [self.weight(index) for index in range(len(self.weights))]
        with ThreadPoolExecutor(num_cores(), thread_name_prefix="relax_hetero.checksums") as threads:
            checksums = list(threads.map(_checksum, arrays))
        for index, (weight, checksum) in enumerate(zip(self.weights, checksums, strict=True)):
            if checksum != weight.checksum:
                raise BuildError(
                    f"{self.path}: weight {index} is corrupt: checksum {checksum:08x}, expected {weight.checksum:08x}"
                )


def _checksum(data: np.ndarray) -> int:
    return zlib.crc32(data.data)


def _is_version(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("metadata"), str)
        and type(entry.get("constants")) is int
        and entry["constants"] >= 0
    )


def write_container(
    path: Path,  # file to write
    library: Path,  # linked shared library
    header: dict[str, Any],  # JSON data, to which the positions of weights are added
    weights: Sequence[np.ndarray],  # one-dimensional ``uint8`` arrays
    versions: Sequence[Version] = (),  # versions of the executable that do without some devices
) -> None:
    """Write a new file; weights that share memory are written once."""
    arrays = list(weights)
    for version in versions:
        arrays += [*version.weights, np.fromfile(version.library, np.uint8)]
    if versions:
        entries = [{"metadata": version.metadata, "constants": len(version.weights)} for version in versions]
        header = {**header, "versions": entries}
    with open(path, "wb") as file:
        library_checksum = _append(file, library)
        library_end = file.tell()
        positions = _write_weights(file, arrays)
        metadata = json.dumps(
            {**header, "weights": [[weight.offset, weight.nbytes, weight.checksum] for weight in positions]},
            separators=(",", ":"),
        ).encode()
        begin = file.tell()
        file.write(metadata)
        ends = (library_end, begin, file.tell())
        body = _BODY.pack(_MAGIC, FORMAT_VERSION, library_checksum, zlib.crc32(metadata), *ends)
        file.write(body + _CHECKSUM.pack(zlib.crc32(body)))


def _append(file: BinaryIO, source: Path) -> int:
    checksum = 0
    with open(source, "rb") as other:
        while block := other.read(_COPY_BYTES):
            checksum = zlib.crc32(block, checksum)
            file.write(block)
    return checksum


def weight_offsets(weights: Sequence[np.ndarray]) -> list[int]:
    """The position of each weight in a file, in bytes from the first; weights that share memory are written once.

    `weights`: one-dimensional ``uint8`` arrays.
    """
    written: dict[tuple[int, int], int] = {}
    end = 0
    offsets: list[int] = []
    for data in weights:
        begin = -(-end // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT
        offsets.append(written.setdefault((int(data.__array_interface__["data"][0]), data.nbytes), begin))
        if offsets[-1] == begin:
            end = begin + data.nbytes
    return offsets


def _write_weights(file: BinaryIO, weights: Sequence[np.ndarray]) -> list[Weight]:
    written: dict[tuple[int, int], Weight] = {}
    positions: list[Weight] = []
    first = -(-file.tell() // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT
    for data, offset in zip(weights, weight_offsets(weights), strict=True):
        key = (offset, data.nbytes)
        if key not in written:
            file.write(b"\0" * (first + offset - file.tell()))
            written[key] = Weight(first + offset, data.nbytes, zlib.crc32(data.data))
            file.write(data.data)
        positions.append(written[key])
    return positions


def open_container(
    path: Path,
    *,
    copy: bool = False,  # whether to copy the file into memory first, so that later changes of it have no effect
    # Required key of the signature; implies `copy`, so that the verified bytes are the loaded ones.
    key: bytes | None = None,
    # Folder that contains the file, which then must not be a link and must belong to this user.
    folder: OpenFolder | None = None,
) -> Container:
    """Open a file, check its footer, library and metadata, and map its weights.

    Raises BuildError for a file that is missing, unreadable, truncated, corrupt, of another format version, or not an
    executable.
    """
    try:
        name, is_ours = (path, False) if folder is None else (Path(path.name), True)
        file, status = open_regular(name, follow=not is_ours, folder=folder, is_private=is_ours)
        with file:
            if status.st_size < _FOOTER_BYTES:
                raise BuildError(_foreign(path, f"{status.st_size} bytes"))
            copies = copy or key is not None
            if copies:
                _check_ends(path, file, status.st_size, key is not None)
            descriptor = copy_to_memory(file) if copies else os.dup(file.fileno())
    except OSError as error:
        hint = hint_of(path, "rh.load") + near_file(path)
        raise BuildError(
            f"{path}: {error.strerror or error}{hint}; expected a file of Executable.export_library"
        ) from error
    try:
        return _read_container(path, descriptor, key)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise BuildError(f"{path}: cannot be mapped: {error.strerror or error}") from error
        raise


def _check_ends(path: Path, file: BinaryIO, size: int, signed: bool) -> None:
    """Refuse a file without our footer before it is copied, because it may be arbitrarily large."""
    end = np.frombuffer(read_at(file, _END_BYTES, max(size - _END_BYTES, 0)), dtype=np.uint8)
    if signed:
        check_signed(end, str(path))
    if not without_trailer(end)[-_FOOTER_BYTES:].tobytes().startswith(_MAGIC):
        if signed:  # only files with a footer are signed
            raise BuildError(changed(str(path)))
        begin = np.frombuffer(read_at(file, _END_BYTES, 0), dtype=np.uint8)
        raise BuildError(_foreign(path, _kind_of(begin)))


def _read_container(path: Path, descriptor: int, key: bytes | None) -> Container:
    status = os.fstat(descriptor)
    if status.st_size < _FOOTER_BYTES:
        raise BuildError(_foreign(path, f"{status.st_size} bytes"))
    data = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
    if key is not None:
        verify(data, key, str(path))
    data = without_trailer(data)
    if data.nbytes < _FOOTER_BYTES:
        raise BuildError(_foreign(path, f"{data.nbytes} bytes"))
    footer = data[-_FOOTER_BYTES:].tobytes()
    body, (checksum,) = footer[: _BODY.size], _CHECKSUM.unpack(footer[_BODY.size :])
    magic, version, library_checksum, metadata_checksum, library_end, begin, end = _BODY.unpack(body)
    if magic != _MAGIC:
        raise BuildError(_foreign(path, _kind_of(data)))
    if version != FORMAT_VERSION:
        raise BuildError(f"{path}: found format version {version}, expected {FORMAT_VERSION}; export it again")
    if checksum != zlib.crc32(body) or not library_end <= begin <= end == data.nbytes - _FOOTER_BYTES:
        raise BuildError(
            f"{path}: found a footer that is corrupt, or for another length than the {data.nbytes} bytes here"
        )
    if zlib.crc32(data[begin:end].data) != metadata_checksum:
        raise BuildError(f"{path}: the metadata is corrupt: its checksum differs from the footer's")
    if zlib.crc32(data[:library_end].data) != library_checksum:
        raise BuildError(f"{path}: the code is corrupt: its checksum differs from the footer's")
    try:
        header = read_json(data[begin:end].tobytes())
        weights = _weights_of(header, range(library_end, begin + 1))
    except ValueError as error:
        raise BuildError(f"{path}: the metadata cannot be read: {error}") from error
    container = Container(path, (status.st_dev, status.st_ino), descriptor, header, weights, data, library_end)
    weakref.finalize(container, os.close, descriptor)
    return container


def _weights_of(header: Any, entries: range) -> tuple[Weight, ...]:
    """The weights of a header; ValueError for an invalid header."""
    if not isinstance(header, dict) or not isinstance(header.get("weights"), list):
        raise ValueError("expected an object with a list of weights")
    for name in ("tvm", "tvm_ffi", "metadata"):
        if not isinstance(header.get(name), str):
            raise ValueError(f"its {name!r} is no text")
    for number, place in enumerate(header["weights"]):
        is_place = (
            isinstance(place, list) and len(place) == 3 and all(type(part) is int and part >= 0 for part in place)
        )
        if not is_place or place[0] not in entries or place[0] + place[1] not in entries:
            raise ValueError(f"weight {number} is at {str(place)[:100]}, outside of the file's weights")
        if place[1] and place[0] % WEIGHT_ALIGNMENT:
            raise ValueError(f"weight {number} begins at byte {place[0]}, expected a multiple of {WEIGHT_ALIGNMENT}")
    return tuple(Weight(*place) for place in header["weights"])


def _foreign(path: Path, magic: str) -> str:
    return f"{path}: found {magic}{hint_of(path, 'rh.load')}; expected a whole file of Executable.export_library"


def _kind_of(data: np.ndarray) -> str:
    library = data[:4].tobytes() == b"\x7fELF"
    return "a shared library without this library's footer (foreign or truncated)" if library else "no shared library"
