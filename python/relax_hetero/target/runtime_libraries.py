"""TVM's runtime libraries for kinds of devices, loaded when they are needed.

A process with the compiler loads the support of every kind of device when tvm is imported; one with the runtime only
loads none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tvm import libinfo
from tvm.base import _LOADED_LIBS
from tvm_ffi.libinfo import load_lib_ctypes

_lock = threading.Lock()
_failures: dict[str, str] = {}


def load_library(library: str, load_dependencies: Callable[[], bool] = lambda: False) -> bool:
    """Load a library of TVM if it is there.

    Parameters
    ----------
    library : str
        Name without "lib" and ".so".
    load_dependencies : callable
        Called after a failure: loads what the library needs, and says whether another try is worthwhile.

    Returns
    -------
    bool
        Whether it is loaded now.
    """
    with _lock:
        if library in _LOADED_LIBS:
            return True
        if library in _failures:
            return False
        failure = _load(library)
        if failure and load_dependencies():
            failure = _load(library)
        if failure:
            _failures[library] = failure
        return not failure


def why_not_loaded(library: str) -> str:
    """Why `load_library` has failed; empty where it has not."""
    return _failures.get(library, "")


def _load(library: str) -> str:
    """Load a library of TVM; the reason where that fails."""
    try:
        paths = libinfo.package_lib_paths()
        _LOADED_LIBS[library] = load_lib_ctypes("tvm", library, "RTLD_LOCAL", extra_lib_paths=paths)
    except (OSError, RuntimeError) as error:
        return str(error).splitlines()[0] if str(error) else repr(error)
    return ""
