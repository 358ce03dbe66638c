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
    container: The opened file, if it is one; a file that has taken its place meanwhile is refused.
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
