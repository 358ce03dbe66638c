"""Files to executables: check, map the weights, load the code."""

from __future__ import annotations

import os
from pathlib import Path

import tvm
from tvm import runtime

from ...artifact.container import Container, open_container
from ...artifact.metadata import CPU, Metadata
from ...errors import BuildError
from ..device.devices import load_backend
from ..device.tensors import view_bytes
from .executable import Executable
from .export import checked_path
from .load_code import load_code


def load(path: str | os.PathLike[str], verify: bool = False) -> Executable:
    """Load what `Executable.export_library` wrote; needs nothing but this file and TVM's runtime.

    Weights are mapped: pages are read when a kernel touches them, and processes that load one file share them.
    Replace a file by renaming another over it (as ``export_library`` does), do not write into it while it is loaded.

    Parameters
    ----------
    path : str or path
        The file.
    verify : bool
        Also read all weights and compare their checksums. Code and metadata are always checked.

    Returns
    -------
    Executable

    Raises
    ------
    BuildError
        A file that is missing, foreign, truncated, corrupt, or of another version; names what was found and
        expected.
    """
    file = Path(os.path.abspath(checked_path(path, "loading an executable")))
    container = open_container(file)
    _check_version(container)
    if verify:
        container.verify_weights()
    metadata, constants = _read(container)
    load_backend("extra")
    here = [load_backend(device.type_name) for device in metadata.devices if device.device_type != CPU]
    # Code of a device that this process knows nothing of cannot be loaded; making the machine says so.
    module = load_code(file, container) if all(here) else None
    return Executable(module, metadata, constants, container)


def _read(container: Container) -> tuple[Metadata, list[runtime.Tensor]]:
    try:
        metadata = Metadata.from_json(container.header["metadata"])
        constants = [
            view_bytes(container.weight(index), spec.shape, spec.dtype) for index, spec in enumerate(metadata.constants)
        ]
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise BuildError(f"{container.path}: the metadata cannot be read: {error!r}") from error
    return metadata, constants


def _check_version(container: Container) -> None:
    found = str(container.header.get("tvm"))
    if found.split(".")[:2] != tvm.__version__.split(".")[:2]:
        raise BuildError(f"{container.path}: compiled by TVM {found}, expected {tvm.__version__}; compile it again")
