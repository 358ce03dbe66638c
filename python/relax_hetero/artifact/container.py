"""The file of an executable: a shared library, then weights, metadata and a footer, in one file.

An ELF loader ignores what follows the last section, so the file loads as a library as it is. Weights begin at
multiples of `WEIGHT_ALIGNMENT` and are mapped into memory, not read. Layout::

    library | padding | weight | padding | weight ... | metadata (JSON) | footer

The footer (`_BODY` and `_CHECKSUM`, little endian): magic, format version, checksums of the library and of the
metadata, end of the library, begin and end of the metadata, and a checksum of all that.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import BuildError

FORMAT_VERSION = 1
# What kernels rely on (TVM's kAllocAlignment).
WEIGHT_ALIGNMENT = 64
_MAGIC = b"rlxheter"
_BODY = struct.Struct("<8sIIIQQQ")
_CHECKSUM = struct.Struct("<I")
_FOOTER_BYTES = _BODY.size + _CHECKSUM.size
_COPY_BYTES = 1 << 24


@dataclass(frozen=True)
class Weight:
    """The position of a weight in the file, in bytes, and the checksum (CRC-32) of its bytes."""

    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True)
class Container:
    """An opened file.

    Attributes
    ----------
    path: Where it was opened.
    identity: The file itself, whatever the path names later: its device and inode numbers.
    header: The metadata's JSON object.
    weights: Constants in order; two may share their bytes.
    data: All bytes of the file as ``uint8``: a private mapping, read when touched.
    code_bytes: Of the shared library, which comes first.
    """

    path: Path
    identity: tuple[int, int]
    header: dict[str, Any]
    weights: tuple[Weight, ...]
    data: np.ndarray
    code_bytes: int

    @property
    def code(self) -> np.ndarray:
        """The mapped bytes of the shared library."""
        return self.data[: self.code_bytes]

    def weight(self, index: int) -> np.ndarray:
        """The mapped bytes of a weight."""
        weight = self.weights[index]
        return self.data[weight.offset : weight.offset + weight.nbytes]

    def verify_weights(self) -> None:
        """Read every weight and compare its checksum; BuildError names the first that differs."""
        for index, weight in enumerate(self.weights):
            found = zlib.crc32(self.weight(index).data)
            if found != weight.checksum:
                raise BuildError(
                    f"{self.path}: weight {index} is corrupt: checksum {found:08x}, expected {weight.checksum:08x}"
                )


def write_container(path: Path, library: Path, header: dict[str, Any], weights: Sequence[np.ndarray]) -> None:
    """Write a new file; weights that are the same memory are written once.

    Parameters
    ----------
    path: The file to make.
    library: The linked shared library.
    header: JSON data to keep; the weights' places are added.
    weights: Each one-dimensional ``uint8``.
    """
    with open(path, "wb") as file:
        library_checksum = _append(file, library)
        library_end = file.tell()
        places = _write_weights(file, weights)
        metadata = json.dumps(
            {**header, "weights": [[place.offset, place.nbytes, place.checksum] for place in places]},
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


def _write_weights(file: BinaryIO, weights: Sequence[np.ndarray]) -> list[Weight]:
    written: dict[tuple[int, int], Weight] = {}
    places: list[Weight] = []
    for data in weights:
        key = (int(data.__array_interface__["data"][0]), data.nbytes)
        if key not in written or data.nbytes == 0:
            file.write(b"\0" * (-file.tell() % WEIGHT_ALIGNMENT))
            written[key] = Weight(file.tell(), data.nbytes, zlib.crc32(data.data))
            file.write(data.data)
        places.append(written[key])
    return places


def open_container(path: Path) -> Container:
    """Open and check a file: its footer, library and metadata; weights are mapped, and not read.

    Raises
    ------
    BuildError: A file that is missing, unreadable, truncated, corrupt, of another format version, or no executable.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BuildError(_foreign(path, "no regular file"))
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            if size < _FOOTER_BYTES:
                raise BuildError(_foreign(path, f"{size} bytes"))
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror or error}; expected a file of Executable.export_library") from error
    data = np.frombuffer(mapping, dtype=np.uint8)
    footer = data[-_FOOTER_BYTES:].tobytes()
    body, (checksum,) = footer[: _BODY.size], _CHECKSUM.unpack(footer[_BODY.size :])
    magic, version, library_checksum, metadata_checksum, library_end, begin, end = _BODY.unpack(body)
    if magic != _MAGIC:
        raise BuildError(_foreign(path, _kind_of(data)))
    if version != FORMAT_VERSION:
        raise BuildError(f"{path}: found format version {version}, expected {FORMAT_VERSION}; export it again")
    if checksum != zlib.crc32(body) or not library_end <= begin <= end == size - _FOOTER_BYTES:
        raise BuildError(f"{path}: found a footer that is corrupt, or for another length than the {size} bytes here")
    if zlib.crc32(data[begin:end].data) != metadata_checksum:
        raise BuildError(f"{path}: the metadata is corrupt: its checksum differs from the footer's")
    if zlib.crc32(data[:library_end].data) != library_checksum:
        raise BuildError(f"{path}: the code is corrupt: its checksum differs from the footer's")
    header = json.loads(data[begin:end].tobytes())
    weights = tuple(Weight(*place) for place in header["weights"])
    return Container(path, (status.st_dev, status.st_ino), header, weights, data, library_end)


def _foreign(path: Path, found: str) -> str:
    return f"{path}: found {found}, expected a whole file of Executable.export_library"


def _kind_of(data: np.ndarray) -> str:
    library = data[:4].tobytes() == b"\x7fELF"
    return "a shared library without this library's footer (foreign or truncated)" if library else "no shared library"
