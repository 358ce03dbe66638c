"""Export of executables: links the code, appends weights and metadata, and replaces the target file atomically."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import tvm
import tvm_ffi
from tvm import runtime
from tvm.base import _RUNTIME_ONLY

from ...artifact.container import Version, weight_offsets, write_container
from ...artifact.file_hints import describe_value
from ...artifact.metadata import Metadata
from ...artifact.signing import trailer_of
from ...errors import BuildError
from ...system import COMPILERS, IS_WINDOWS, LINK_OPTIONS, NO_LINK, find_compiler
from ...target.cpu_cores import num_cores
from ..device.cpu_features import with_features
from ..device.interruptible import run_in_threads
from ..device.tensors import bytes_of
from .cuda_modules import with_machine_code, write_block
from .standalone import compile_standalone, is_for_linux

# Kinds of modules that contain source or objects, and must be linked before they can run.
_NEEDS_LINKING = ("c", "static_library")

_LINKING_BYTES = 64 << 20
"""Free bytes for temporary files that linking requires: LLVM aborts the process if it cannot write an object."""

SYMBOL_PREFIX = "__tvm_ffi_"  # prefix of functions' symbols (TVM's `symbol::tvm_ffi_symbol_prefix`)

# For the C source of `c` devices: TVM's generator violates strict aliasing, and calls float16 "half".
_C_OPTIONS = ("-O2", "-fno-strict-aliasing", "-Dhalf=_Float16")


def needs_linking(module: runtime.Module) -> bool:
    """Return whether a module, or one that it imports, must be linked before it can run."""
    return any(each.kind in _NEEDS_LINKING for each in _modules(module))


def _modules(module: runtime.Module) -> Iterator[runtime.Module]:
    yield module
    for imported in module.imports:
        yield from _modules(imported)


def generate_machine_code(module: runtime.Module) -> None:
    """Make LLVM generate the machine code of all its modules in parallel, instead of one by one at first use."""
    tasks = [partial(_look_up_function, each) for each in _modules(module) if each.kind == "llvm"]
    run_in_threads(tasks, num_cores(), "relax_hetero.code")


def _look_up_function(module: runtime.Module) -> None:
    # Kernels that are called by address have symbols without the prefix, and no packed function.
    packed = (str(symbol) for symbol in module["get_func_names"]() if str(symbol).startswith(SYMBOL_PREFIX))
    for symbol in itertools.islice(packed, 1):
        module.get_function(symbol.removeprefix(SYMBOL_PREFIX))


def check_linking(what: str) -> list[str]:
    """The command of the linking C compiler: ``CXX`` or ``CC`` with its options, else the first one found.

    Raises BuildError without a compiler, or space for temporary files; the message begins with `what`.
    """
    named = os.environ.get("CXX") or os.environ.get("CC")
    try:
        command = _split(named) if named else find_compiler()
    except ValueError as error:  # unbalanced quotes
        raise BuildError(f"{what} needs a C compiler: found CXX={named!r}, which is not a command: {error}") from error
    if not command or shutil.which(command[0]) is None:
        found = f"{named!r}, which is not a program" if named else "none on PATH and no CXX set"
        names = ", ".join((*COMPILERS, "the package ziglang"))
        raise BuildError(f"{what} needs a C compiler: found {found}, expected one of: {names}")
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < _LINKING_BYTES:
        raise BuildError(f"{what}: {folder} has {free:,} bytes left for linking, expected {_LINKING_BYTES:,}")
    return command


def _split(command: str) -> list[str]:
    """The words of a command; the path of a program may contain spaces."""
    return [command] if shutil.which(command) else shlex.split(command)


def link_library(
    module: runtime.Module,
    path: Path,
    what: str,  # begin of error messages
    # Machine code of CUDA kernels that the module contains as source, by `cuda_modules.source_key`.
    machine_code: Mapping[str, bytes] | None = None,
    metadata: Metadata | None = None,  # metadata of a file that programs may run without Python
    # The position of each constant among the weights of that file, in bytes from the first.
    offsets: Sequence[int] = (),
) -> None:
    """Link a compiled module into a shared library at `path`.

    Raises BuildError if TVM's or the C compiler is absent, or fails.
    """
    if _RUNTIME_ONLY:
        raise BuildError(f"{what} needs TVM's compiler: found TVM's runtime only")
    command = check_linking(what)
    with tempfile.TemporaryDirectory(prefix="relax_hetero_") as workspace:
        try:
            standalone: list[str] = []
            if metadata is not None and is_for_linux(metadata):
                standalone = compile_standalone(command, metadata, offsets, Path(workspace))
            link = partial(_link, command, standalone)
            pack = partial(_pack, machine_code) if machine_code else _pack_to_llvm
            code = [each for each in dict.fromkeys(_modules(module)) if each.is_compilation_exportable()]
            if all(each.kind == "llvm" for each in code):
                link(str(path), [*_write_objects(code, workspace), pack(module, False, "", workspace)])
            else:
                pack_others = pack if machine_code else None
                options = list(_C_OPTIONS)
                module.export_library(
                    str(path), fcompile=link, fpack_imports=pack_others, workspace_dir=workspace, options=options
                )
        except Exception as error:  # TVM and the linker raise various exceptions
            raise BuildError(f"{what}: linking failed: {error}") from error


def _write_objects(modules: Sequence[runtime.Module], folder: str) -> list[str]:
    """Write the machine code of LLVM modules, which TVM's own export does one by one."""
    files = [os.path.join(folder, f"lib{number}.o") for number in range(len(modules))]
    tasks = [partial(module.write_to_file, file) for module, file in zip(modules, files, strict=True)]
    run_in_threads(tasks, num_cores(), "relax_hetero.code")
    return files


def _pack_to_llvm(module: runtime.Module, system: bool, prefix: str, folder: str) -> str:
    """Write an object file with the modules that a module imports."""
    target = next(each for each in _modules(module) if each.kind == "llvm")["_get_target_string"]()
    file = os.path.join(folder, "imports.o")
    tvm.get_global_func("runtime.ModulePackImportsToLLVM")(module, system, target, prefix).write_to_file(file)
    return file


def _pack(machine_code: Mapping[str, bytes], module: runtime.Module, system: bool, prefix: str, folder: str) -> str:
    """Write a file for the linker with the modules that a module imports, CUDA kernels as machine code."""
    block = tvm.get_global_func("runtime.ModulePackImportsToTensor")(module).numpy().tobytes()
    return str(write_block(with_machine_code(block, machine_code), Path(folder)))


def _link(
    command: Sequence[str], standalone: Sequence[str], output: str, objects: Sequence[str], options: Sequence[str] = ()
) -> None:
    """Link objects and C sources; unlike TVM's function, this accepts compilers with options, as ``ccache g++``."""
    arguments = [*command, *LINK_OPTIONS, "-o", output, *options, *objects, *standalone]
    if IS_WINDOWS:
        arguments += _windows_inputs(Path(output))
    process = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if process.returncode:
        text = process.stdout.decode(errors="replace")
        raise RuntimeError(
            f"{shlex.join(command)} ended with {process.returncode}:\n{text}\nCommand: {shlex.join(arguments)}"
        )


def _windows_inputs(library: Path) -> list[str]:
    """Files that a library for Windows is linked with, whose symbols are found at link time.

    They are TVM's functions that raise errors, and a symbol of MSVC's C library that code with floating-point numbers
    refers to, which other C libraries lack.
    """
    source = library.with_suffix(".c")
    source.write_text("__declspec(selectany) int _fltused = 0;\n")
    return [str(source), tvm_ffi.libinfo.find_windows_implib()]


def checked_path(path: object, what: str) -> str:
    """`path` as text; a BuildError that begins with `what` if it is not a path."""
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise BuildError(f"{what}: {describe_value(path)}; expected a path") from None
    if not text or "\0" in text:
        raise BuildError(f"{what}: {text!r} is not a path")
    return text


def write_executable(path: Path, parts: Sequence[Part], key: bytes | None = None, mode: int = 0o666) -> None:
    """Link and write a new executable to `path`, signed with `key` if given; see `replacing`.

    `parts`: the executable, then its versions.
    """
    with tempfile.TemporaryDirectory(prefix="relax_hetero_") as folder, replacing(path, mode) as target:
        libraries = [Path(folder) / f"library{number}.so" for number in range(len(parts))]
        headers = [header_of(part.metadata) for part in parts]
        weights = [[bytes_of(tensor) for tensor in part.constants] for part in parts]
        for part, library, data in zip(parts, libraries, weights, strict=True):
            part.write_library(library, f"exporting {path}", weight_offsets(data))
        versions = [
            Version(library, header["metadata"], data)
            for library, header, data in zip(libraries[1:], headers[1:], weights[1:], strict=True)
        ]
        write_container(target, libraries[0], headers[0], weights[0], versions)
        _sign(target, key)


class Part(Protocol):
    """Executable, or version of one, to be written."""

    metadata: Metadata
    constants: list[runtime.Tensor]

    def write_library(self, path: Path, what: str, offsets: Sequence[int]) -> None:
        """Write the shared library to `path`, for weights at `offsets`; error messages begin with `what`."""


def write_copy(path: Path, data: Any, key: bytes | None = None, mode: int = 0o666) -> None:
    """Write the bytes of a loaded executable, signed with `key` if given."""
    with replacing(path, mode) as target:
        with open(target, "wb") as file:
            file.write(data)
        _sign(target, key)


def _sign(path: Path, key: bytes | None) -> None:
    if key is not None:
        with open(path, "r+b") as file:
            trailer = trailer_of(file, key)
            file.seek(0, os.SEEK_END)
            file.write(trailer)


def header_of(metadata: Metadata) -> dict[str, Any]:
    """The header of a file as JSON data: versions of TVM, and metadata."""
    metadata = replace(metadata, devices=tuple(with_features(spec) for spec in metadata.devices))
    return {"tvm": tvm.__version__, "tvm_ffi": tvm_ffi.__version__, "metadata": metadata.to_json()}


class replacing:
    """Context of a temporary file that replaces `path` when the block succeeds, and is deleted otherwise.

    Processes that have the old file open or loaded keep its contents: it is unlinked, never written. `mode`:
    permissions of the new file, subject to the umask.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        self._mode = mode
        self.path = path = Path(os.path.realpath(path))  # symbolic links are followed
        self.temporary = path.parent / f".{path.name[:100]}.{uuid.uuid4().hex}"

    def __enter__(self) -> Path:
        try:
            self._check()
            # NO_LINK and O_EXCL refuse links that others have planted; the permissions are final from the start.
            os.close(os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, self._mode))
        except OSError as error:  # for example, a name that is too long or a folder without permission
            raise BuildError(f"exporting {self.path}: {error.strerror or error}") from error
        return self.temporary

    def _check(self) -> None:
        if self.path.is_dir():
            raise BuildError(f"exporting {self.path}: found a folder, expected the name of a file")
        if self.path.exists() and not self.path.is_file():
            raise BuildError(f"exporting {self.path}: found a device, FIFO or socket, expected the name of a file")
        if not self.path.parent.is_dir():
            raise BuildError(f"exporting {self.path}: there is no folder {self.path.parent}")
        if not os.access(self.path.parent, os.W_OK):
            raise BuildError(f"exporting {self.path}: the folder {self.path.parent} is not writable")

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
