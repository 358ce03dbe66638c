"""Where files of CUDA lie: in pip's ``nvidia`` packages, or in a toolkit; found without an environment variable.

Needs nothing of TVM, and no GPU. NVIDIA's packages put libraries and headers below ``site-packages/nvidia``, where
neither the dynamic loader nor a compiler looks.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_VARIABLES = ("CUDA_PATH", "CUDA_HOME")
_TOOLKIT = "/usr/local/cuda"


def cuda_roots() -> list[Path]:
    """Folders with a ``lib`` or ``include`` of CUDA: pip's packages, then toolkits; the newest of pip's first."""
    return list(dict.fromkeys(path for path in (*_packages(), *_toolkits()) if path.is_dir()))


def cuda_libraries(name: str) -> list[Path]:
    """The files that match a pattern, such as ``libnvrtc.so.*[0-9]``, in the library folders of all roots."""
    found: dict[str, Path] = {}
    for root in cuda_roots():
        for folder in ("lib", "lib64", "targets/*/lib"):
            for path in sorted(root.glob(f"{folder}/{name}"), reverse=True):
                found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def cuda_includes(header: str) -> list[Path]:
    """The include folders that have a header."""
    folders = ("include", "targets/*/include")
    return [path.parent for root in cuda_roots() for inc in folders for path in sorted(root.glob(f"{inc}/{header}"))]


def nvcc_path() -> Path | None:
    """The toolkit's compiler."""
    found = shutil.which("nvcc")
    candidates = [Path(found)] if found else []
    candidates += [root / "bin" / "nvcc" for root in _toolkits()]
    return next((path for path in candidates if path.is_file() and os.access(path, os.X_OK)), None)


def _packages() -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):  # a module of that name that is no package
        return
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        # ``cu13`` has all of CUDA 13; before, each package had a folder.
        yield from sorted(Path(location).glob("cu[0-9]*"), reverse=True)
        yield from sorted(Path(location).glob("cuda_*"))


def _toolkits() -> Iterator[Path]:
    yield from (Path(os.environ[name]) for name in _VARIABLES if os.environ.get(name))
    found = shutil.which("nvcc")
    if found:
        yield Path(os.path.realpath(found)).parents[1]
    yield Path(_TOOLKIT)
