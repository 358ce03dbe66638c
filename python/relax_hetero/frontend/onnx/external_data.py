"""External data of a model: files that hold tensors, checked for their location and mapped rather than read.

A location comes from an untrusted file. After links are resolved it must be in the model's folder or below it. A model
in memory has no folder and cannot have external data.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import onnx
from onnx import external_data_helper

from ...artifact.regular_files import open_regular
from ...errors import FrontendError
from ...system import map_privately

_MAX_LOCATION_CHARACTERS = 4096  # PATH_MAX of Linux

_MAX_EXTENTS = 100_000  # maximum number of data extents that are counted in a sparse file


def is_external(tensor: onnx.TensorProto) -> bool:
    """Return whether a tensor's data lies in another file."""
    return bool(external_data_helper.uses_external_data(tensor))


class ExternalData:
    """External files of a model, each mapped once, on first use.

    `source`: name of the model in messages; `path`: the model's file, None for a model in memory.
    """

    def __init__(self, source: str, path: Path | None) -> None:
        self._source = source
        self._path = path
        self._files: dict[str, np.ndarray] = {}
        self._written = 0

    @property
    def written_bytes(self) -> int:
        """Bytes of the mapped files without holes: a sparse file of a terabyte may occupy no disk space."""
        return self._written

    def bytes_of(self, tensor: onnx.TensorProto, what: str) -> np.ndarray:
        """The bytes of an external tensor as ``uint8``, in a private mapping.

        Raises FrontendError if the location is invalid or outside of the model's folder, the file is missing or not
        regular, or the offset or length is not a number or exceeds the file.
        """
        entries = _location_entries(tensor, what)
        location = entries.get("location", "")
        if self._path is None:
            raise FrontendError(
                f"{what} is in the external file {location[:200]!r}, and a model in memory does not say where that is: "
                "give the model's path"
            )
        where = f"{self._source}: the external file {location[:200]!r} of {what}"
        data = self._file(location, where)
        offset = _parse_number(entries.get("offset", "0"), "offset", where)
        length = _parse_number(entries.get("length", str(max(data.nbytes - offset, 0))), "length", where)
        if offset + length > data.nbytes:
            raise FrontendError(
                f"{where} has {data.nbytes:,} bytes, expected {length:,} from offset {offset:,}: it is truncated, or "
                "another model's"
            )
        return data[offset : offset + length]

    def _file(self, location: str, where: str) -> np.ndarray:
        if location not in self._files:
            real = self._resolve(location, where)
            try:
                file, status = open_regular(real, follow=False)
                with file:
                    # Writable, because DLPack has no read-only memory.
                    mapped = map_privately(file.fileno()) if status.st_size else b""
                    self._written += _written_bytes(file.fileno(), status.st_size)
            except OSError as error:
                reason = "is missing" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
                raise FrontendError(f"{where} cannot be read: it {reason}; looked for {real!r}") from error
            self._files[location] = np.frombuffer(mapped, np.uint8)
        return self._files[location]

    def _resolve(self, location: str, where: str) -> str:
        assert self._path is not None
        parts = location.replace("\\", "/").split("/")
        is_name = 0 < len(location) <= _MAX_LOCATION_CHARACTERS and "\0" not in location
        if not is_name or os.path.isabs(location) or ".." in parts:
            raise FrontendError(
                f"{where} is refused: expected a path relative to the model's folder, and inside it, without '..'"
            )
        try:
            real = os.path.realpath(self._path.parent / location)
            # Model stores keep a file and its data together, and link to both from another folder.
            folders = {os.path.realpath(self._path.parent), os.path.dirname(os.path.realpath(self._path))}
            is_inside = any(os.path.commonpath([real, folder]) == folder for folder in folders)
        except (OSError, ValueError) as error:
            raise FrontendError(f"{where} is refused: {error}") from error
        if not is_inside:
            raise FrontendError(f"{where} is refused: it is a link to {real!r}, outside of the model's folder")
        return real


def _location_entries(tensor: onnx.TensorProto, what: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    for entry in tensor.external_data:
        if entries.setdefault(entry.key, entry.value) != entry.value:
            raise FrontendError(f"{what} gives its external {entry.key[:50]!r} twice")
    return entries


def _parse_number(text: str, name: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise FrontendError(f"{where} has the {name} {text[:50]!r}, expected a whole number >= 0")
    return int(text)


def _written_bytes(descriptor: int, size: int) -> int:
    """Bytes of a file without holes, or its size if the file system does not tell."""
    nbytes, end = 0, 0
    try:
        for _ in range(_MAX_EXTENTS):
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            nbytes += end - start
    except OSError as error:
        return nbytes if error.errno == errno.ENXIO else size  # ENXIO: no data after this offset
    return nbytes
