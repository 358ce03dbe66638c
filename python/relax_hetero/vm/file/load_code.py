"""The code of a file, loaded into this process."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

import tvm_ffi
from tvm import runtime

from ...artifact.container import Container
from ...errors import BuildError

_lock = threading.Lock()
# The file (device, inode) that each path stood for when its code was loaded.
_loaded: dict[str, tuple[int, int]] = {}
# All files whose code was loaded.
_files: set[tuple[int, int]] = set()


def load_code(path: Path, container: Container | None = None) -> runtime.Module:
    """Load a shared library, also where it, or another file of the same name, is loaded already.

    The dynamic loader knows libraries by name first and would return the older one; a new name helps. A file that it
    knows under any name is not loaded again, and what is global in TVM's code, such as the kernels of GPUs that host
    functions have looked up, would be one for both modules and end with one of them: a copy of the code helps.

    Parameters
    ----------
    container : Container, optional
        The opened file, if it is one; another that has taken its place meanwhile is not loaded.
    """
    with _lock:
        try:
            if container is None:
                source = os.path.realpath(path)
                status = os.stat(source)
                identity = (status.st_dev, status.st_ino)
            else:
                source, identity = _open_file(container), container.identity
            # Of a version, the library does not stand at the begin of the file.
            is_known = identity in _files or (container is not None and container.code_begin > 0)
            _files.add(identity)
            if not is_known and container is None and _loaded.setdefault(source, identity) == identity:
                return tvm_ffi.load_module(source, keep_module_alive=False)
            with tempfile.TemporaryDirectory(prefix="relax_hetero_") as folder:
                name = os.path.basename(path)
                # TVM knows what a file is by the end of its name.
                other = os.path.join(folder, name if name.endswith((".so", ".dylib", ".dll")) else "library.so")
                if not is_known:
                    os.symlink(source, other)
                elif container is None:
                    shutil.copyfile(source, other)
                else:
                    container.code.tofile(other)
                return tvm_ffi.load_module(other, keep_module_alive=False)
        except Exception as error:  # TVM raises its own kinds
            raise BuildError(f"{path}: its code cannot be loaded: {error}") from error


def _open_file(container: Container) -> str:
    """A name of the very file that was opened and checked, whatever its path leads to now."""
    name = f"/proc/self/fd/{container.descriptor}"
    if os.path.exists(name):
        return name
    real = os.path.realpath(container.path)
    status = os.stat(real)
    if (status.st_dev, status.st_ino) != container.identity:
        raise OSError("it was replaced while it was being loaded")
    return real
