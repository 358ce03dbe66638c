"""Options of C and C++ compilers for programs that include ``relax_hetero.h``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tvm_ffi import libinfo

from ..errors import BuildError

_PACKAGE = Path(__file__).parents[1]
CMAKE_FOLDER = _PACKAGE / "cmake"  # folder of ``relax_hetero-config.cmake``


def include_folders() -> list[str]:
    """Folders of headers: of this package, of TVM-FFI and of DLPack."""
    folders = [str(_PACKAGE / "include"), libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    return list(dict.fromkeys(folders))


def libraries() -> list[Path]:
    """TVM's run time and TVM-FFI; BuildError if one is missing."""
    spec = importlib.util.find_spec("tvm")  # without importing it, which would load the compiler
    folders = [] if spec is None else [Path(folder) / "lib" for folder in spec.submodule_search_locations or ()]
    found = [folder / "libtvm_runtime.so" for folder in folders if (folder / "libtvm_runtime.so").is_file()]
    if not found:
        places = ", ".join(map(str, folders)) or "this Python, which has no package tvm"
        raise BuildError(f"TVM's run time: found no libtvm_runtime.so in {places}")
    return [found[0], Path(libinfo.find_libtvm_ffi())]


def compile_options() -> list[str]:
    """Options to compile a program."""
    return [f"-I{folder}" for folder in include_folders()]


def link_options() -> list[str]:
    """Options to link a program, which then finds the libraries where they are now."""
    # Programs call few functions of the run time, but need its loaders.
    options = [option for library in libraries() for option in (str(library), f"-Wl,-rpath,{library.parent}")]
    return ["-Wl,--no-as-needed", *options, "-ldl"]
