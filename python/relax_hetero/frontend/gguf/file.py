"""A GGUF file: its metadata, and its tensors as they lie in the file.

The package ``gguf`` reads it. Tensors are views of the mapped file; nothing is copied before it is packed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...artifact.what_reads import found, hint_of, near_file
from ...errors import FrontendError
from .metadata import open_reader


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
        Of `shape` for F32 and F16; of bytes, ``(..., bytes of a row)``, for all others.
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
        By name.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, FileTensor]


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open a file.

    Raises
    ------
    FrontendError
        If the package gguf is not installed, or the file is none that it reads.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise FrontendError(f"a GGUF file: {found(path)}; expected a path")
    try:
        reader, fields = open_reader(path)
        tensors = {tensor.name: _tensor(tensor) for tensor in reader.tensors}
    except ImportError as error:
        raise FrontendError("GGUF files are read by the package gguf; pip install 'relax-hetero[llm]'") from error
    except (OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        hint = hint_of(path, "rh.from_gguf")
        why = (
            hint if hint and Path(path).exists() else f": {getattr(error, 'strerror', None) or error}{near_file(path)}"
        )
        raise FrontendError(f"{os.fspath(path)}: is no GGUF file that can be read{why}") from error
    return GgufFile(Path(path), fields, tensors)


def _tensor(tensor: Any) -> FileTensor:
    shape = tuple(int(extent) for extent in reversed(tensor.shape))
    return FileTensor(str(tensor.name), shape, str(tensor.tensor_type.name), tensor.data)
