"""Files to executables: check, map the weights, load the code."""

from __future__ import annotations

import os
from pathlib import Path

import tvm
from tvm import runtime

from ...artifact.check_metadata import read_metadata
from ...artifact.container import Container, open_container
from ...artifact.metadata import ConstantSpec, Metadata
from ...artifact.signing import checked_key
from ...errors import BuildError
from ...target.element_types import bytes_for
from ...target.runtime_libraries import load_library
from ..device.tensors import view_bytes
from .executable import Executable
from .export import checked_path
from .load_code import load_code


def load(
    path: str | os.PathLike[str], verify: bool = False, *, copy: bool = False, key: bytes | None = None
) -> Executable:
    """Load what `Executable.export_library` wrote; needs nothing but this file and TVM's runtime.

    **Loading a file runs its code**, as a shared library does when it is opened: load files only of authors whom you
    trust. Checksums find damage, not malice; with a `key` only files are loaded that were signed with it.

    Weights are mapped: pages are read when a kernel touches them, and processes that load one file share them.
    Replace a file by renaming another over it (as ``export_library`` does), do not write into it while it is loaded: a
    process that touches a page that is no longer there ends. With `copy` what happens to the file does not matter.

    Parameters
    ----------
    path : str or path
        The file.
    verify : bool
        Also read all weights and compare their checksums. Code and metadata are always checked.
    copy : bool
        Read the whole file into memory, of this process alone, and load code and weights from there.
    key : bytes, optional
        Key that the file was signed with, ``export_library(path, key=key)``, of at least 16 bytes. The file is copied,
        and the copy verified before any of its code is loaded.

    Returns
    -------
    Executable
        Executable that a `VirtualMachine` runs.

    Raises
    ------
    BuildError
        A file that is missing, foreign, truncated, corrupt, of another version, or not signed with `key`; names what
        was found and expected.
    """
    file = Path(os.path.abspath(checked_path(path, "loading an executable")))
    return load_container(open_container(file, copy=copy, key=None if key is None else checked_key(key)), verify)


def load_container(container: Container, verify: bool = False) -> Executable:
    """The executable of a file that is open; as `load`."""
    _check_version(container)
    if verify:
        container.verify_weights()
    try:
        whole, *versions = container.versions()
    except ValueError as error:
        raise BuildError(f"{container.path}: the metadata cannot be read: {error}") from error
    metadata, constants = _read(whole)
    load_library("tvm_runtime_extra")
    here = [device.backend.load() for device in metadata.devices]
    # Code of a device that this process knows nothing of cannot be loaded; making the machine says so.
    module = load_code(container.path, container) if all(here) else None
    # Code of a version is loaded when a machine runs it.
    parts = [Executable(None, *_read(version), version) for version in versions]
    return Executable(module, metadata, constants, container, versions=parts)


def _read(container: Container) -> tuple[Metadata, list[runtime.Tensor]]:
    try:
        metadata = read_metadata(container.header["metadata"])
        if len(container.weights) != len(metadata.constants):
            raise ValueError(f"{len(container.weights)} weights for {len(metadata.constants)} constants")
        return metadata, [_constant(container, index, spec) for index, spec in enumerate(metadata.constants)]
    except (ValueError, TypeError, RuntimeError) as error:
        raise BuildError(f"{container.path}: the metadata cannot be read: {error}") from error


def _constant(container: Container, index: int, spec: ConstantSpec) -> runtime.Tensor:
    data, nbytes = container.weight(index), bytes_for(spec.shape, spec.dtype)
    if data.nbytes != nbytes:
        raise ValueError(f"constant {spec.name!r} has {data.nbytes:,} bytes, expected {nbytes:,} for {spec.shape}")
    return view_bytes(data, spec.shape, spec.dtype)


def _check_version(container: Container) -> None:
    found = container.header["tvm"]
    if found.split(".")[:2] != tvm.__version__.split(".")[:2]:
        raise BuildError(
            f"{container.path}: compiled by TVM {found[:50]}, expected {tvm.__version__}; compile it again"
        )
