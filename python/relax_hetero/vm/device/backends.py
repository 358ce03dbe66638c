"""Device support of TVM's runtime, loaded when it is needed.

A process with the compiler loads every backend when tvm is imported; one with the runtime only loads none.
"""

from __future__ import annotations

import threading

from tvm import libinfo
from tvm.base import _LOADED_LIBS
from tvm_ffi.libinfo import load_lib_ctypes

_lock = threading.Lock()


def load_backend(name: str) -> bool:
    """Load ``libtvm_runtime_<name>`` if it is there; whether it is loaded now."""
    library = f"tvm_runtime_{name}"
    with _lock:
        if library not in _LOADED_LIBS:
            try:
                paths = libinfo.package_lib_paths()
                _LOADED_LIBS[library] = load_lib_ctypes("tvm", library, "RTLD_LOCAL", extra_lib_paths=paths)
            except (OSError, RuntimeError):
                return False
        return True
