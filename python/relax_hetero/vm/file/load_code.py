"""Loading of a file's code into this process."""

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
from ...system import IS_WINDOWS, LIBRARY_SUFFIX, LIBRARY_SUFFIXES, path_of_open_file

_lock = threading.Lock()
_loaded_paths: dict[str, tuple[int, int]] = {}  # the file (device, inode) of each path whose code was loaded
_loaded_files: set[tuple[int, int]] = set()  # all files (device, inode) whose code was loaded


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
