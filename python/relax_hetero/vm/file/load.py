"""Loading of executables: checks the file, maps the weights, loads the code."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

import tvm
import tvm_ffi
from tvm import runtime

from ...artifact.check_metadata import read_metadata
from ...artifact.container import Container, open_container
from ...artifact.metadata import ConstantSpec, Metadata
from ...artifact.signing import checked_key
from ...errors import BuildError
from ...system import IS_WINDOWS, LIBRARY_SUFFIX, LIBRARY_SUFFIXES, path_of_open_file
from ...target.element_types import bytes_for
from ...target.runtime_libraries import load_library
from ..device.tensors import view_bytes
from .executable import Executable
from .export import checked_path


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


_lock = threading.Lock()
# The file (device, inode) of each path whose code was loaded.
_loaded_paths: dict[str, tuple[int, int]] = {}
# All files (device, inode) whose code was loaded.
_loaded_files: set[tuple[int, int]] = set()


def load_code(path: Path, container: Container | None = None) -> runtime.Module:
    """Load a shared library, even if it, or another file of the same name, is already loaded.

    The dynamic loader returns a loaded library of the same name, so another file of that name is loaded through a new
    name. It does not load a file twice under any name, and two modules would share the globals of TVM's code, such as
    GPU kernels that host functions have looked up, which end with one of them: so a loaded file is copied.

    Parameters
    ----------
    container : Container, optional
        Opened executable; a file that has replaced it meanwhile is not loaded.
    """
    with _lock:
        try:
            if container is None:
                source = os.path.realpath(path)
                status = os.stat(source)
                identity = (status.st_dev, status.st_ino)
            else:
                source, identity = path_of_open_file(container.descriptor) or "", container.identity
            # The library of a version is not at the beginning of the file, and must be copied, too. So must all
            # libraries where an open file has no path: its own may name another file by now.
            is_version = container is not None and container.code_begin > 0
            needs_copy = identity in _loaded_files or not source or is_version
            _loaded_files.add(identity)
            if not needs_copy and container is None and _loaded_paths.setdefault(source, identity) == identity:
                return tvm_ffi.load_module(source, keep_module_alive=False)
            # Windows does not delete loaded libraries, and has no links without a privilege.
            with tempfile.TemporaryDirectory(prefix="relax_hetero_", ignore_cleanup_errors=True) as folder:
                name = os.path.basename(path)
                # TVM recognizes file types by their suffix.
                other = os.path.join(folder, name if name.endswith(LIBRARY_SUFFIXES) else f"library{LIBRARY_SUFFIX}")
                if not needs_copy and not IS_WINDOWS:
                    os.symlink(source, other)
                elif container is None:
                    shutil.copyfile(source, other)
                else:
                    container.code.tofile(other)
                return tvm_ffi.load_module(other, keep_module_alive=False)
        except Exception as error:  # TVM raises various exceptions
            raise BuildError(f"{path}: its code cannot be loaded: {error}") from error
