"""The on-disk cache of compiled modules, shared between processes."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import tvm
from tvm import relax, runtime, tirx
from tvm_ffi import structural_map

from ..artifact.cache_folder import CacheFolder, resolve_cache_folder
from ..artifact.metadata import HIT, MISS, UNUSED, CacheUse
from ..errors import BuildError
from ..target.cpu_cores import num_cores
from ..target.vdevice import vdevices_of
from ..transform.ir.module_attrs import DEFAULTS
from ..transform.ir.rewriting import is_tensor_constant
from ..vm.device.tensors import bytes_of, nbytes_of
from ..vm.file.executable import Executable
from ..vm.file.export import check_linking
from .cached_executables import (
    key_of,
    load_entry,
    load_hit,
    open_entry,
    set_cache_use,
    stored_use,
    surroundings,
    targets_of,
    why_uncached_for,
)
from .link.link import external_calls, external_modules

# The key of a compilation: a hash of everything that the executable depends on.
#
# A module is hashed as TVM's JSON without its constants, which are hashed as bytes, a hundred times faster than as
# text. The key also covers the resolvers and compilers of the targets, the options, the settings of the PassContext,
# and the versions of TVM, LLVM and this library. The library's sources are hashed, because a checkout changes without a
# new version.

_CHUNK_BYTES = 8 << 20  # bytes of constants that one thread hashes at a time
_SWITCHED_OFF = "switched off"


def why_uncached(mod: tvm.IRModule) -> str:
    """The reason why a module cannot be cached: a dependency lacks a key, or its passes are being observed.

    Returns the reason, or an empty text.
    """
    if external_modules(mod):
        return "the module contains compiled code (external modules)"
    for name, symbols in external_calls(mod).items():
        if symbols:
            return f"kernel {name!r} calls the external function {symbols[0]!r}"
    return why_uncached_for(targets_of(vdevices_of(mod)))


def compile_key(
    mod: tvm.IRModule,  # module with vdevices and bound weights, for which `why_uncached` is empty
    command_buffers: bool,  # option of ``rh.compile``
) -> str:
    """The key of a compilation; compilations with equal keys make the same executable, in any process.

    Returns 40 hexadecimal digits. Raises TVM's exception if the module, or a setting of the PassContext, cannot be
    written as JSON.
    """
    text, constants = _split_constants(mod)
    parts = [*surroundings(targets_of(vdevices_of(mod))), str(command_buffers), text]
    return key_of([*(part.encode() for part in parts), *_tensor_digests(constants)])


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


_log = logging.getLogger("relax_hetero")
_unwritable_folders: set[Path] = set()  # folders for which a failed write was logged

MIN_COMPILE_SECONDS = 1.0  # minimum compile time of modules that are stored by default


def load_or_build(
    mod: tvm.IRModule,  # module with vdevices and bound weights
    # Argument of `resolve_cache_folder`; None stores only modules whose compilation took `MIN_COMPILE_SECONDS`.
    cache: bool | str | os.PathLike[str] | None,
    command_buffers: bool,  # option of ``rh.compile``, part of the key
    # Function that compiles the module; its argument is the folder, in which it caches kernels.
    build: Callable[[CacheFolder | None], Executable],
) -> Executable:
    """Load the executable of a module from the cache, or build and store it.

    The executable is loaded from the cache's file if possible; ``metadata.cache`` says whether it was. Raises the
    errors of `build`, and HeteroError if `cache` is invalid. Other errors of the cache do not prevent compiling.
    """
    folder = resolve_cache_folder(cache)
    key, why = ("", _SWITCHED_OFF) if folder is None else _key(mod, command_buffers)
    if folder is None or not key:
        return set_cache_use(build(folder), CacheUse(UNUSED, why=why))
    cached = load_hit(folder, key)
    if cached is not None:
        folder.note_hit(key)
        return cached
    start = time.perf_counter()
    executable = build(folder)
    use = CacheUse(MISS, key, round(time.perf_counter() - start, 3))
    executable = set_cache_use(executable, use)
    if cache is None and use.seconds < MIN_COMPILE_SECONDS:
        why = f"not stored, as compiling took less than {MIN_COMPILE_SECONDS:g} s"
        return set_cache_use(executable, replace(use, why=why))
    return _store(folder, executable, use)


def predict_cache_use(mod: tvm.IRModule) -> CacheUse:
    """Predict the ``metadata.cache`` of ``rh.compile(mod, cache=True)``, for a module with vdevices."""
    folder = resolve_cache_folder()
    key, why = ("", _SWITCHED_OFF) if folder is None else _key(mod, command_buffers=True)
    if folder is None or not key:
        return CacheUse(UNUSED, why=why)
    try:
        with folder.opened() as opened:
            if opened is not None:
                return replace(stored_use(open_entry(folder, key, opened)), state=HIT)
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
            stored = load_entry(folder, use.key, verify=False)
            if stored is not None:
                return stored
            why = f"{folder.path} was removed"
        except BuildError as error:  # evicted or removed by another process
            why = str(error)
    return set_cache_use(executable, replace(use, why=f"not stored: {why}"))


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
