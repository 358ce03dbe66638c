"""TVM's runtime libraries of device kinds, and the files of CUDA.

With the compiler, importing tvm loads the support of every kind of device; with the runtime only, it is loaded here on
demand.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tvm import libinfo
from tvm.base import _LOADED_LIBS
from tvm_ffi.libinfo import load_lib_ctypes

_lock = threading.Lock()
_failures: dict[str, str] = {}


def load_library(library: str, load_dependencies: Callable[[], bool] = lambda: False) -> bool:
    """Load a library of TVM.

    `library`: name without "lib" and ".so". `load_dependencies`: called after a failure: loads dependencies, and
    returns whether to try again. Returns whether the library is loaded.
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
    """Reason why `load_library` failed, or empty."""
    return _failures.get(library, "")


def _load(library: str) -> str:
    """Load a library of TVM; returns the reason of a failure, or an empty text."""
    try:
        paths = libinfo.package_lib_paths()
        _LOADED_LIBS[library] = load_lib_ctypes("tvm", library, "RTLD_LOCAL", extra_lib_paths=paths)
    except (OSError, RuntimeError) as error:
        return str(error).splitlines()[0] if str(error) else repr(error)
    return ""


# Files of CUDA, in pip's ``nvidia`` packages or in a toolkit. NVIDIA's packages install libraries and headers below
# ``site-packages/nvidia``, where neither the dynamic loader nor a compiler searches. Independent of TVM and of a GPU.

_VARIABLES = ("CUDA_PATH", "CUDA_HOME")
_TOOLKIT = "/usr/local/cuda"


def cuda_roots() -> list[Path]:
    """Folders with a ``lib`` or ``include`` of CUDA: pip's packages, the newest first, then toolkits."""
    return list(dict.fromkeys(path for path in (*_packages(), *_toolkits()) if path.is_dir()))


def cuda_libraries(name: str) -> list[Path]:
    """Files that match a pattern, such as ``libnvrtc.so.*[0-9]``, in the library folders of all roots."""
    libraries: dict[str, Path] = {}
    for root in cuda_roots():
        for folder in ("lib", "lib64", "targets/*/lib"):
            for path in sorted(root.glob(f"{folder}/{name}"), reverse=True):
                libraries.setdefault(os.path.realpath(path), path)
    return list(libraries.values())


def cuda_includes(header: str) -> list[Path]:
    """Include folders that contain a header."""
    folders = ("include", "targets/*/include")
    return [path.parent for root in cuda_roots() for inc in folders for path in sorted(root.glob(f"{inc}/{header}"))]


def nvcc_path() -> Path | None:
    """Path of the toolkit's compiler, or None."""
    on_path = shutil.which("nvcc")
    candidates = [Path(on_path)] if on_path else []
    candidates += [root / "bin" / "nvcc" for root in _toolkits()]
    return next((path for path in candidates if path.is_file() and os.access(path, os.X_OK)), None)


def _packages() -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):  # a module of that name that is not a package
        return
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        # ``cu13`` has all of CUDA 13; earlier versions have a folder for each package.
        yield from sorted(Path(location).glob("cu[0-9]*"), reverse=True)
        yield from sorted(Path(location).glob("cuda_*"))


def _toolkits() -> Iterator[Path]:
    yield from (Path(os.environ[name]) for name in _VARIABLES if os.environ.get(name))
    nvcc = shutil.which("nvcc")
    if nvcc:
        yield Path(os.path.realpath(nvcc)).parents[1]
    yield Path(_TOOLKIT)
