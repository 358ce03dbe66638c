"""Files to executables: check, map the weights, load the code."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

import tvm
import tvm_ffi
from tvm import runtime

from ..errors import BuildError
from .backends import load_backend
from .container import Container, open_container
from .executable import Executable
from .export import checked_path
from .metadata import CPU, Metadata
from .tensors import view_bytes

_lock = threading.Lock()
# The file (device, inode) that each path stood for when its code was loaded.
_loaded: dict[str, tuple[int, int]] = {}
# All files whose code was loaded.
_files: set[tuple[int, int]] = set()


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


def load_code(path: Path, container: Container | None = None) -> runtime.Module:
    """Load a shared library, also where it, or another file of the same name, is loaded already.

    The dynamic loader knows libraries by name first and would return the older one; a new name helps. A file that it
    knows under any name is not loaded again, and what is global in TVM's code, such as the kernels of GPUs that host
    functions have looked up, would be one for both modules and end with one of them: a copy of the code helps.

    Parameters
    ----------
    path : Path
    container : Container, optional
        The opened file, if it is one; a file that has taken its place meanwhile is refused.
    """
    real = os.path.realpath(path)
    with _lock:
        try:
            status = os.stat(real)
            identity = (status.st_dev, status.st_ino)
            if container is not None and container.identity != identity:
                raise OSError("it was replaced while it was being loaded")
            is_known = identity in _files
            _files.add(identity)
            if not is_known and _loaded.setdefault(real, identity) == identity:
                return tvm_ffi.load_module(real, keep_module_alive=False)
            with tempfile.TemporaryDirectory(prefix="relax_hetero_") as folder:
                other = os.path.join(folder, os.path.basename(real))
                if not is_known:
                    os.symlink(real, other)
                elif container is None:
                    shutil.copyfile(real, other)
                else:
                    container.code.tofile(other)
                return tvm_ffi.load_module(other, keep_module_alive=False)
        except Exception as error:  # TVM raises its own kinds
            raise BuildError(f"{path}: its code cannot be loaded: {error}") from error
