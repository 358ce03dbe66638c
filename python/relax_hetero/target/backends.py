"""TVM's support for kinds of devices, loaded when it is needed.

A process with the compiler loads the support of every kind of device when tvm is imported; one with the runtime only
loads none. Support for CUDA needs a library of CUDA, which pip's packages put where the dynamic loader does not look.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading

from tvm import libinfo
from tvm.base import _LOADED_LIBS
from tvm_ffi.libinfo import load_lib_ctypes

from .cuda_files import cuda_libraries

_lock = threading.Lock()
_failures: dict[str, str] = {}


def load_backend(name: str) -> bool:
    """Load ``libtvm_runtime_<name>`` if it is there; whether it is loaded now."""
    library = f"tvm_runtime_{name}"
    with _lock:
        if library in _LOADED_LIBS:
            return True
        if name in _failures:
            return False
        failure = _load(library)
        if failure and name == "cuda" and _has_driver():
            for path in cuda_libraries("libcudart.so.*[0-9]"):
                with contextlib.suppress(OSError):  # of another machine, or broken: TVM's library says what it misses
                    ctypes.CDLL(str(path))
            failure = _load(library)
        if failure:
            _failures[name] = failure
        return not failure


def why_not_loaded(name: str) -> str:
    """Why `load_backend` has failed; empty where it has not."""
    return _failures.get(name, "")


def _load(library: str) -> str:
    """Load a library of TVM; the reason where that fails."""
    try:
        paths = libinfo.package_lib_paths()
        _LOADED_LIBS[library] = load_lib_ctypes("tvm", library, "RTLD_LOCAL", extra_lib_paths=paths)
    except (OSError, RuntimeError) as error:
        return str(error).splitlines()[0] if str(error) else repr(error)
    return ""


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
