"""Loading of executables: checks the file, maps the weights, loads the code."""

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
    """Load a file of `Executable.export_library`; needs only the file and TVM's runtime.

    **Loading a file runs its code**, as opening any shared library does: load only files whose authors you trust.
    Checksums find damage, not malice; with a `key` only files are loaded that were signed with it.

    Weights are memory-mapped: pages are read when a kernel accesses them, and processes share the pages of one file.
    Replace a loaded file by renaming another over it (as ``export_library`` does), and never write into it: a process
    that accesses a missing page is killed. With `copy` the file may change after loading.

    Parameters
    ----------
    path : str or path
        File to load.
    verify : bool
        Whether to read all weights and compare their checksums. Code and metadata are always checked.
    copy : bool
        Whether to read the whole file into private memory, and load code and weights from there.
    key : bytes, optional
        Key of at least 16 bytes that the file was signed with, ``export_library(path, key=key)``. The file is copied,
        and the copy is verified before any of its code is loaded.

    Returns
    -------
    Executable
        Executable that a `VirtualMachine` runs.

    Raises
    ------
    BuildError
        A file that is missing, foreign, truncated, corrupt, of another version, or not signed with `key`.
    """
    file = Path(os.path.abspath(checked_path(path, "loading an executable")))
    return load_container(open_container(file, copy=copy, key=None if key is None else checked_key(key)), verify)


def load_container(container: Container, verify: bool = False) -> Executable:
    """Load the executable of an open file; see `load`."""
    _check_version(container)
    if verify:
        container.verify_weights()
    try:
        full, *versions = container.versions()
    except ValueError as error:
        raise BuildError(f"{container.path}: the metadata cannot be read: {error}") from error
    metadata, constants = _read(full)
    load_library("tvm_runtime_extra")
    are_loaded = [device.backend.load() for device in metadata.devices]
    # Code of unsupported devices cannot be loaded; making a VirtualMachine reports that.
    module = load_code(container.path, container) if all(are_loaded) else None
    # Code of a version is loaded when a machine runs it.
    reduced = [Executable(None, *_read(version), version) for version in versions]
    return Executable(module, metadata, constants, container, versions=reduced)


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
    version = container.header["tvm"]
    if version.split(".")[:2] != tvm.__version__.split(".")[:2]:
        raise BuildError(
            f"{container.path}: compiled by TVM {version[:50]}, expected {tvm.__version__}; compile it again"
        )
