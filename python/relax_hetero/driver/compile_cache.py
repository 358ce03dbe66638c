"""The on-disk cache of compiled modules, shared between processes."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, runtime, tirx
from tvm.target import Target, codegen
from tvm_ffi import structural_map

from ..artifact.cache_folder import CacheFolder, is_key, resolve_cache_folder
from ..artifact.container import Container, open_container
from ..artifact.figure_cache import load_figures, store_figures
from ..artifact.metadata import HIT, MISS, UNUSED, CacheUse
from ..artifact.typed_data import read_json
from ..encoding.resolver import resolver_key
from ..errors import BuildError
from ..target.backend import backend_of
from ..target.cpu_cores import num_cores
from ..target.native_target import native
from ..target.vdevice import vdevices_of
from ..transform.ir.module_attrs import DEFAULTS
from ..transform.ir.remarks import is_collecting
from ..transform.ir.rewriting import is_tensor_constant
from ..vm.device.tensors import bytes_of, nbytes_of
from ..vm.file.executable import Executable
from ..vm.file.export import check_linking
from ..vm.file.load import load_container
from .link.link import external_calls, external_modules

# The key of a compilation: a hash of everything that the executable depends on.
#
# A module is hashed as TVM's JSON without its constants, which are hashed as bytes, a hundred times faster than as
# text. The key also covers the resolvers and compilers of the targets, the options, the settings of the PassContext,
# and the versions of TVM, LLVM and this library. The library's sources are hashed, because a checkout changes without a
# new version.

_CHUNK_BYTES = 8 << 20
"""Bytes of constants that one thread hashes at a time."""
_IMPORT_TIME = time.time()
_SWITCHED_OFF = "switched off"


def why_uncached(mod: tvm.IRModule) -> str:
    """The reason why a module cannot be cached: a dependency lacks a key, or its passes are being observed.

    Parameters
    ----------
    mod : tvm.IRModule
        Module with vdevices.

    Returns
    -------
    str
        Reason, or an empty text.
    """
    if external_modules(mod):
        return "the module contains compiled code (external modules)"
    for name, symbols in external_calls(mod).items():
        if symbols:
            return f"kernel {name!r} calls the external function {symbols[0]!r}"
    return _why_uncached_for(_targets(vdevices_of(mod)))


def _why_uncached_for(targets: Sequence[Target]) -> str:
    """The reason why no module for these targets can be cached."""
    if tvm.transform.PassContext.current().instruments:
        return "the PassContext has instruments, which see passes only where they run"
    if is_collecting():
        return "a report of the passes is being collected"
    _, sources_changed = _hash_sources()
    if sources_changed > _IMPORT_TIME:
        return "the sources of this library were changed while it was in use"
    for target in targets:
        if resolver_key(target) is None:
            return f"the resolver of {target.kind.name} devices is a third party's and lacks an attribute 'cache_key'"
        if reason := backend_of(target).why_uncached():
            return reason
    return ""


def compile_key(mod: tvm.IRModule, command_buffers: bool) -> str:
    """The key of a compilation; compilations with equal keys make the same executable, in any process.

    Parameters
    ----------
    mod : tvm.IRModule
        Module with vdevices and bound weights, for which `why_uncached` is empty.
    command_buffers : bool
        Option of ``rh.compile``.

    Returns
    -------
    str
        40 hexadecimal digits.

    Raises
    ------
    Exception
        TVM's exception if the module, or a setting of the PassContext, cannot be written as JSON.
    """
    text, constants = _split_constants(mod)
    parts = [*_surroundings(_targets(vdevices_of(mod))), str(command_buffers), text]
    return _digest([*(part.encode() for part in parts), *_tensor_digests(constants)])


def _surroundings(targets: Sequence[Target]) -> list[str]:
    """All that an executable depends on besides its module: versions, compilers, resolvers and settings."""
    context = tvm.transform.PassContext.current()
    settings = [context.opt_level, context.required_pass, context.disabled_pass, context.config]
    return [
        _versions(),
        *(f"{target} {resolver_key(target)} {backend_of(target).compiler_identity()}" for target in targets),
        str(Target.current(allow_none=True)),
        tvm.ir.save_json(settings),
    ]


def _digest(parts: Sequence[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _targets(vdevices: Sequence[relax.VDevice]) -> list[Target]:
    """The targets that code may be compiled for: those of the devices, and this CPU as the implicit host."""
    return [*(vdevice.target for vdevice in vdevices), native("llvm")]


class FileState(NamedTuple):
    """Identity of a file's content, as build tools see it.

    Attributes
    ----------
    path : str
    device, inode, size, modified, changed : int
        Fields of its status, times in nanoseconds.
    """

    path: str
    device: int
    inode: int
    size: int
    modified: int
    changed: int


def states_of(path: Path) -> tuple[FileState, ...]:
    """States of a file, or of the files in a folder; nothing if it cannot be read."""
    try:
        files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
        statuses = [(str(file), file.stat()) for file in files]
    except (OSError, ValueError):  # a NUL character in its name
        return ()
    return tuple(FileState(name, *map(partial(getattr, status), _IDENTITY)) for name, status in statuses)


_IDENTITY = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")


class FileRequest:
    """A module that follows from files and options: its executable is found without making the module.

    A file is identified by its size and times, not by its content. Each change of it makes a new request, whose module
    may be found in the cache by its content.

    Parameters
    ----------
    files : sequence of FileState
        Files that the module depends on, before they were opened.
    vdevices : sequence of relax.VDevice
        Its devices.
    options : str
        All options of the import and of ``rh.compile``.

    Attributes
    ----------
    is_cacheable : bool
        Whether the cache may have the executable.
    """

    def __init__(self, files: Sequence[FileState], vdevices: Sequence[relax.VDevice], options: str) -> None:
        targets = _targets(vdevices)
        self._folder = None if _why_uncached_for(targets) else resolve_cache_folder()
        self.is_cacheable = self._folder is not None
        if self.is_cacheable:
            identities = repr(list(map(tuple, files)))
            parts = [*_surroundings(targets), *(str(vdevice) for vdevice in vdevices), identities, options]
            self._key = _digest([part.encode() for part in parts])

    def load(self) -> Executable | None:
        """The executable of an earlier request that was equal, unless it left the cache."""
        key = self._executable_key()
        executable = _load_hit(self._folder, key) if self._folder is not None and key else None
        if executable is not None and self._folder is not None:
            self._folder.note_hit(key)
        return executable

    def store(self, executable: Executable) -> None:
        """Remember the executable, if the cache has it."""
        use = executable.metadata.cache
        if self._folder is not None and use is not None and use.state in (HIT, MISS) and not use.why:
            store_figures(self._folder, self._key, use.key)

    def drop(self) -> None:
        """Remove the executable from the cache; processes that have loaded it keep it."""
        key = self._executable_key()
        if self._folder is not None and key:
            self._folder.drop(key)

    def _executable_key(self) -> str:
        """The key of the executable in the cache; empty if it is not known."""
        key = None if self._folder is None else load_figures(self._folder, self._key)
        return str(key) if is_key(key) else ""


def _split_constants(mod: tvm.IRModule) -> tuple[str, list[runtime.Tensor]]:
    """A module as JSON, with variables in place of constants and default inputs, and these tensors in its order."""
    constants: list[runtime.Tensor] = []

    def replace_constant(constant: tvm.ir.GenericConst) -> relax.Expr:
        if not is_tensor_constant(constant):
            return constant
        constants.append(constant.value)
        return relax.Var(f"constant_{len(constants)}", constant.ty)

    functions = []
    for gv, func in sorted(mod.functions.items(), key=lambda pair: pair[0].name_hint):
        if not isinstance(func, tirx.PrimFunc):
            if DEFAULTS in func.attrs:
                constants += func.attrs[DEFAULTS].values()
                func = func.with_attr(DEFAULTS, list(func.attrs[DEFAULTS]))
            func = structural_map(func, (tvm.ir.GenericConst, replace_constant))
        functions.append([gv, func])
    attributes = sorted(mod.attrs.items()) if mod.attrs else []
    global_infos = sorted(mod.global_infos.items())
    text: str = tvm.ir.save_json(
        [functions, [list(pair) for pair in attributes], [list(pair) for pair in global_infos]]
    )
    return text, constants


def _tensor_digests(tensors: Sequence[runtime.Tensor]) -> list[bytes]:
    """The joined hashes of each tensor's chunks, computed on all cores; functions share most tensors."""
    addresses = [(tensor.data_ptr(), nbytes_of(tensor)) for tensor in tensors]
    arrays = {address: bytes_of(tensor) for address, tensor in zip(addresses, tensors, strict=True)}
    chunks = [
        (address, array[begin : begin + _CHUNK_BYTES])
        for address, array in arrays.items()
        for begin in range(0, array.nbytes, _CHUNK_BYTES)
    ]
    with ThreadPoolExecutor(num_cores(), thread_name_prefix="relax_hetero.key") as threads:
        chunk_digests = list(threads.map(_chunk_digest, (chunk for _, chunk in chunks)))
    digests = dict.fromkeys(arrays, b"")
    for (address, _), digest in zip(chunks, chunk_digests, strict=True):
        digests[address] += digest
    return [digests[address] for address in addresses]


def _chunk_digest(chunk: np.ndarray) -> bytes:
    return hashlib.blake2b(chunk.data, digest_size=20).digest()


@functools.cache
def _versions() -> str:
    """Versions of TVM and LLVM, and a hash of this library's sources."""
    llvm = codegen.llvm_version_major(allow_none=True)
    return f"{_hash_sources()[0]} tvm {tvm.__version__} {_tvm_libraries()} tvm_ffi {tvm_ffi.__version__} llvm {llvm}"


@functools.cache
def _hash_sources() -> tuple[str, float]:
    """The hash of this library's sources, and the time of their last change in seconds since 1970."""
    digest, last_change = hashlib.blake2b(digest_size=20), 0.0
    package = Path(__file__).parents[1]
    for file in sorted([*package.rglob("*.py"), *package.rglob("*.ll")]):
        code = file.read_bytes()
        digest.update(f"{file.relative_to(package)} {len(code)}\n".encode() + code)
        last_change = max(last_change, file.stat().st_mtime)
    return digest.hexdigest(), last_change


def _tvm_libraries() -> str:
    """Sizes and modification times of TVM's libraries, because all builds from source have the same version."""
    libraries = sorted(Path(tvm.__file__).parent.rglob("libtvm*"))
    return " ".join(f"{status.st_size}:{status.st_mtime_ns}" for status in (file.stat() for file in libraries))


_log = logging.getLogger("relax_hetero")
# Folders for which a failed write was logged.
_unwritable_folders: set[Path] = set()

MIN_COMPILE_SECONDS = 1.0
"""Minimum compile time of modules that are stored by default."""


def load_or_build(
    mod: tvm.IRModule,
    cache: bool | str | os.PathLike[str] | None,
    command_buffers: bool,
    build: Callable[[CacheFolder | None], Executable],
) -> Executable:
    """Load the executable of a module from the cache, or build and store it.

    Parameters
    ----------
    mod : tvm.IRModule
        Module with vdevices and bound weights.
    cache : bool or str or PathLike of str or None
        Argument of `resolve_cache_folder`; None stores only modules whose compilation took `MIN_COMPILE_SECONDS`.
    command_buffers : bool
        Option of ``rh.compile``, part of the key.
    build : callable
        Function that compiles the module; its argument is the folder, in which it caches kernels.

    Returns
    -------
    Executable
        Executable, loaded from the cache's file if possible; ``metadata.cache`` says whether it was.

    Raises
    ------
    HeteroError
        An error of `build`, or an invalid `cache`. Other errors of the cache do not prevent compiling.
    """
    folder = resolve_cache_folder(cache)
    key, why = ("", _SWITCHED_OFF) if folder is None else _key(mod, command_buffers)
    if folder is None or not key:
        return _set_cache_use(build(folder), CacheUse(UNUSED, why=why))
    cached = _load_hit(folder, key)
    if cached is not None:
        folder.note_hit(key)
        return cached
    start = time.perf_counter()
    executable = build(folder)
    use = CacheUse(MISS, key, round(time.perf_counter() - start, 3))
    executable = _set_cache_use(executable, use)
    if cache is None and use.seconds < MIN_COMPILE_SECONDS:
        why = f"not stored, as compiling took less than {MIN_COMPILE_SECONDS:g} s"
        return _set_cache_use(executable, replace(use, why=why))
    return _store(folder, executable, use)


def predict_cache_use(mod: tvm.IRModule) -> CacheUse:
    """Predict the ``metadata.cache`` of ``rh.compile(mod, cache=True)``, for a module with vdevices."""
    folder = resolve_cache_folder()
    key, why = ("", _SWITCHED_OFF) if folder is None else _key(mod, command_buffers=True)
    if folder is None or not key:
        return CacheUse(UNUSED, why=why)
    try:
        with folder.open_descriptor() as descriptor:
            if descriptor is not None:
                return replace(_stored_use(_open(folder, key, descriptor)), state=HIT)
    except BuildError as error:
        _log.debug("the compile cache lacks this module: %s", error)
    return CacheUse(MISS, key)


def _key(mod: tvm.IRModule, command_buffers: bool) -> tuple[str, str]:
    """The key of a module, or an empty one and the reason."""
    why = why_uncached(mod)
    if why:
        return "", why
    try:
        return compile_key(mod, command_buffers), ""
    except Exception as error:  # TVM's exceptions here have no common class
        return "", f"the module cannot be written as JSON: {error}"


def _set_cache_use(executable: Executable, use: CacheUse) -> Executable:
    executable.metadata = replace(executable.metadata, cache=use)
    return executable


def _load_hit(folder: CacheFolder, key: str) -> Executable | None:
    try:
        executable = _load(folder, key, verify=True)
    except BuildError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            _log.warning("the module is compiled and cached again: %s", error)
            folder.drop(key)
        return None
    if executable is not None:
        _set_cache_use(executable, CacheUse(HIT, key, executable.metadata.cache.seconds))
    return executable


def _load(folder: CacheFolder, key: str, verify: bool) -> Executable | None:
    """Load an executable from the folder; None if the folder may not be used."""
    with folder.open_descriptor() as descriptor:
        if descriptor is None:
            return None
        return load_container(_open(folder, key, descriptor), verify)


def _open(folder: CacheFolder, key: str, descriptor: int) -> Container:
    """Open the file of a key without loading code; BuildError if it is damaged or belongs to another key."""
    container = open_container(folder.file(key), folder=descriptor)
    stored_key = _stored_use(container).key
    if stored_key != key:
        raise BuildError(f"{container.path}: found the entry of key {stored_key!r}, expected the key in its name")
    return container


def _stored_use(container: Container) -> CacheUse:
    """Key, state and duration of the compilation that wrote a file."""
    try:
        return CacheUse(**read_json(container.header["metadata"])["cache"])
    except (ValueError, TypeError, LookupError) as error:
        raise BuildError(f"{container.path}: the metadata cannot be read: {error!r}") from error


def _store(folder: CacheFolder, executable: Executable, use: CacheUse) -> Executable:
    """Store an executable, and return the stored one, so that first and later compilations behave alike."""
    why = _why_linking_fails()
    constant_bytes = sum(map(nbytes_of, executable.constants))
    if constant_bytes > folder.limit:
        why = f"its constants have {constant_bytes:,} bytes, and the cache holds at most {folder.limit:,}"
    if not why:
        why = _write(folder, executable, use)
    if not why:
        try:
            stored = _load(folder, use.key, verify=False)
            if stored is not None:
                return stored
            why = f"{folder.path} was removed"
        except BuildError as error:  # evicted or removed by another process
            why = str(error)
    return _set_cache_use(executable, replace(use, why=f"not stored: {why}"))


def _why_linking_fails() -> str:
    """The reason why this process cannot link a library, or an empty text."""
    try:
        check_linking("the compile cache")
    except (BuildError, OSError) as error:
        return str(error)
    return ""


def _write(folder: CacheFolder, executable: Executable, use: CacheUse) -> str:
    """Write an executable's file; return the reason of a failure, which is logged once per folder."""
    try:
        folder.add(use.key, executable.export_private, _description(executable, use))
    except (BuildError, OSError) as error:
        if folder.path not in _unwritable_folders:
            _unwritable_folders.add(folder.path)
            _log.warning("the compile cache cannot be written: %s", error)
        return str(error)
    return ""


def _description(executable: Executable, use: CacheUse) -> dict[str, object]:
    """Data for ``relax-hetero cache ls``."""
    return {
        "functions": [str(signature) for signature in executable.metadata.signatures.values()],
        "targets": [device.target for device in executable.devices],
        "seconds": use.seconds,
    }
