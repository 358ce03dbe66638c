"""Executables to files: link the code, append weights and metadata, replace the target in one step."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import runtime
from tvm.base import _RUNTIME_ONLY

from ...artifact.container import write_container
from ...artifact.metadata import Metadata
from ...errors import BuildError
from ...target.cpu_cores import num_cores
from ..device.cpu_features import with_features
from ..device.interruptible import run_in_threads
from ..device.tensors import bytes_of

# Modules that hold source or objects, and run only after they were linked.
_NEEDS_LINKING = ("c", "static_library")

# Of the symbols of functions (TVM's symbol::tvm_ffi_symbol_prefix).
SYMBOL_PREFIX = "__tvm_ffi_"

# For the source of `c` devices: TVM's generator reinterprets through pointers, and calls float16 "half".
_C_OPTIONS = ("-O2", "-fno-strict-aliasing", "-Dhalf=_Float16")


def needs_linking(module: runtime.Module) -> bool:
    """Whether a module or one it imports cannot run in the process as it is."""
    return any(part.kind in _NEEDS_LINKING for part in _modules(module))


def _modules(module: runtime.Module) -> Iterator[runtime.Module]:
    yield module
    for part in module.imports:
        yield from _modules(part)


def generate_code(module: runtime.Module) -> None:
    """Have LLVM write the machine code of every module of its own, all at once: it would do so one by one later."""
    parts = [partial(_first_function, part) for part in _modules(module) if part.kind == "llvm"]
    run_in_threads(parts, num_cores(), "relax_hetero.code")


def _first_function(part: runtime.Module) -> None:
    # Kernels that are called by address have symbols without the prefix, and no packed function.
    packed = (str(symbol) for symbol in part["get_func_names"]() if str(symbol).startswith(SYMBOL_PREFIX))
    for symbol in itertools.islice(packed, 1):
        part.get_function(symbol.removeprefix(SYMBOL_PREFIX))


def find_compiler(what: str) -> str:
    """The C compiler that links (``CXX``, ``CC``, else the first known on PATH); BuildError says why it is needed."""
    from tvm.support.cc import get_cc

    compiler: str | None = get_cc()
    program = compiler.split()[0] if compiler and compiler.strip() else ""
    if not program or shutil.which(program) is None:
        found = f"{compiler!r}, which is no program" if compiler else "none on PATH and no CXX set"
        raise BuildError(f"{what} needs a C compiler: found {found}, expected g++, gcc, clang++, clang, c++ or cc")
    return program


def link_library(module: runtime.Module, path: Path, what: str) -> None:
    """Link a compiled module into a shared library at `path`.

    Raises
    ------
    BuildError: No compiler of TVM or C in this process, or one that fails; `what` says what for.
    """
    if _RUNTIME_ONLY:
        raise BuildError(f"{what} needs TVM's compiler: found TVM's runtime only")
    find_compiler(what)
    with tempfile.TemporaryDirectory(prefix="relax_hetero_") as workspace:
        try:
            module.export_library(str(path), workspace_dir=workspace, options=list(_C_OPTIONS))
        except Exception as error:  # TVM and the linker raise their own kinds
            raise BuildError(f"{what}: linking failed: {error}") from error


def checked_path(path: object, what: str) -> str:
    """`path` as text; BuildError, beginning with `what`, where it is no path."""
    try:
        return os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise BuildError(f"{what}: {path!r} ({type(path).__name__}) is no path") from None


def write_executable(
    path: Path, module: runtime.Module, metadata: Metadata, constants: Sequence[runtime.Tensor]
) -> None:
    """Link and write a new executable to `path`; see `replacing`."""
    with tempfile.TemporaryDirectory(prefix="relax_hetero_") as folder, replacing(path) as target:
        library = Path(folder) / "library.so"
        link_library(module, library, f"exporting {path}")
        write_container(target, library, header_of(metadata), [bytes_of(tensor) for tensor in constants])


def write_copy(path: Path, data: Any) -> None:
    """Write the bytes of an executable that was loaded."""
    with replacing(path) as target, open(target, "wb") as file:
        file.write(data)


def header_of(metadata: Metadata) -> dict[str, Any]:
    """The header of the file, as JSON data: versions and metadata."""
    metadata = replace(metadata, devices=tuple(with_features(spec) for spec in metadata.devices))
    return {"tvm": tvm.__version__, "tvm_ffi": tvm_ffi.__version__, "metadata": metadata.to_json()}


class replacing:
    """A new file beside `path` that takes its place when the block ends well, and vanishes otherwise.

    The old file's contents live on for whoever has it open or loaded: it is unlinked, never written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = Path(os.path.realpath(path))  # of a link, the file it leads to
        self.temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")

    def __enter__(self) -> Path:
        if self.path.is_dir():
            raise BuildError(f"exporting {self.path}: found a folder, expected the name of a file")
        if not self.path.parent.is_dir():
            raise BuildError(f"exporting {self.path}: there is no folder {self.path.parent}")
        if not os.access(self.path.parent, os.W_OK):
            raise BuildError(f"exporting {self.path}: the folder {self.path.parent} is not writable")
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                os.replace(self.temporary, self.path)
        except OSError as failure:
            raise BuildError(f"exporting {self.path}: {failure}") from failure
        finally:
            self.temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise BuildError(f"exporting {self.path}: {error}") from error
