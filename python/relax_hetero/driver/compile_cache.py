"""Compiled modules are kept on disk and found again, by the same or another process."""

from __future__ import annotations

import functools
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
import tvm_ffi
from tvm import relax, runtime, tirx
from tvm.target import Target, codegen
from tvm_ffi import structural_map

from ..artifact.cache_folder import CacheFolder, folder_of
from ..artifact.container import Container, open_container
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

# The key of a compilation: a hash of all that the code and what it says about itself depend on.
#
# A module is hashed as TVM's JSON, its constants apart: as text they would take a hundred times longer. Then there
# are who resolves encodings on its targets, the options, the settings of the PassContext, and the versions of TVM,
# LLVM and this library, whose own sources are hashed because a checkout changes under one version; of models for CUDA
# devices also the CUDA compiler.

# Hashed by one thread at a time.
_PIECE = 8 << 20
_IMPORTED = time.time()


def why_uncached(mod: tvm.IRModule) -> str:
    """Why a module's code cannot be looked up: what it depends on has no key, or somebody watches it being made.

    Parameters
    ----------
    mod : tvm.IRModule
        With vdevices.

    Returns
    -------
    str
        Empty where nothing stands in the way.
    """
    if tvm.transform.PassContext.current().instruments:
        return "the PassContext has instruments, which see passes only where they run"
    if is_collecting():
        return "a report of the passes is being collected"
    if _sources()[1] > _IMPORTED:
        return "the sources of this library were changed while it was in use"
    if external_modules(mod):
        return "the module brings compiled code along"
    for name, symbols in external_calls(mod).items():
        if symbols:
            return f"kernel {name!r} calls the external function {symbols[0]!r}"
    for target in _targets(mod):
        if resolver_key(target) is None:
            return f"the resolver of {target.kind.name} devices is not ours and has no attribute 'cache_key'"
        if why := backend_of(target).why_uncached():
            return why
    return ""


def compile_key(mod: tvm.IRModule, command_buffers: bool) -> str:
    """A text that two compilations share only if they make the same executable, in any process.

    Parameters
    ----------
    mod : tvm.IRModule
        With vdevices, weights bound; `why_uncached` has no objection.
    command_buffers : bool
        Option of ``rh.compile``.

    Returns
    -------
    str
        40 hexadecimal digits.

    Raises
    ------
    Exception
        An error of TVM's own kind: the module, or a setting of the PassContext, cannot be written as JSON.
    """
    text, constants = _without_constants(mod)
    context = tvm.transform.PassContext.current()
    settings = [context.opt_level, context.required_pass, context.disabled_pass, context.config]
    here = Target.current(allow_none=True)
    parts = [
        _versions(),
        *(f"{target} {resolver_key(target)} {backend_of(target).compiler_identity()}" for target in _targets(mod)),
        str(here),
        str(command_buffers),
        tvm.ir.save_json(settings),
        text,
    ]
    found = hashlib.blake2b(digest_size=20)
    for part in [*(part.encode() for part in parts), *_digests(constants)]:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def _targets(mod: tvm.IRModule) -> list[Target]:
    """The targets that code may be made for: those of the devices, and this CPU's, for hosts that nobody named."""
    return [*(vdevice.target for vdevice in vdevices_of(mod)), native("llvm")]


def _without_constants(mod: tvm.IRModule) -> tuple[str, list[runtime.Tensor]]:
    """A module as text, with variables in the place of tensors, which are numbered in order of the text."""
    constants: list[runtime.Tensor] = []

    def on_constant(constant: tvm.ir.GenericConst) -> relax.Expr:
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
            func = structural_map(func, (tvm.ir.GenericConst, on_constant))
        functions.append([gv, func])
    attributes = sorted(mod.attrs.items()) if mod.attrs else []
    infos = sorted(mod.global_infos.items())
    text: str = tvm.ir.save_json([functions, [list(pair) for pair in attributes], [list(pair) for pair in infos]])
    return text, constants


def _digests(tensors: Sequence[runtime.Tensor]) -> list[bytes]:
    """A hash of every tensor's bytes, large ones in pieces and on all cores."""
    arrays = [bytes_of(tensor) for tensor in tensors]
    pieces = [array[at : at + _PIECE] for array in arrays for at in range(0, array.nbytes, _PIECE)]
    with ThreadPoolExecutor(num_cores(), thread_name_prefix="relax_hetero.key") as threads:
        digests = iter(list(threads.map(_digest, pieces)))
    return [b"".join(next(digests) for _ in range(0, array.nbytes, _PIECE)) for array in arrays]


def _digest(piece: np.ndarray) -> bytes:
    return hashlib.blake2b(piece.data, digest_size=20).digest()


@functools.cache
def _versions() -> str:
    """Versions of what makes code: TVM, LLVM, and this library by its sources."""
    llvm = codegen.llvm_version_major(allow_none=True)
    return f"{_sources()[0]} tvm {tvm.__version__} {_built()} tvm_ffi {tvm_ffi.__version__} llvm {llvm}"


@functools.cache
def _sources() -> tuple[str, float]:
    """A hash of this library's sources, and when they were last changed."""
    digest, changed = hashlib.blake2b(digest_size=20), 0.0
    package = Path(__file__).parents[1]
    for file in sorted([*package.rglob("*.py"), *package.rglob("*.ll")]):
        code = file.read_bytes()
        digest.update(f"{file.relative_to(package)} {len(code)}\n".encode() + code)
        changed = max(changed, file.stat().st_mtime)
    return digest.hexdigest(), changed


def _built() -> str:
    """Sizes and times of TVM's libraries: one that somebody has built keeps its version."""
    libraries = sorted(Path(tvm.__file__).parent.rglob("libtvm*"))
    return " ".join(f"{status.st_size}:{status.st_mtime_ns}" for status in (file.stat() for file in libraries))


_log = logging.getLogger("relax_hetero")
_unwritable: set[Path] = set()

MIN_SECONDS = 1.0
"""Minimum compile time of a module that is kept, unless the caller asks for a cache: less is not worth the cost."""


def through_cache(
    mod: tvm.IRModule,
    cache: bool | str | os.PathLike[str] | None,
    command_buffers: bool,
    build: Callable[[CacheFolder | None], Executable],
) -> Executable:
    """The executable that `build` makes of a module, or the same one, made before.

    Parameters
    ----------
    mod : tvm.IRModule
        With vdevices, weights bound.
    cache : bool or str or PathLike of str or None
        As `folder_of` takes it; None keeps only what took `MIN_SECONDS`.
    command_buffers : bool
        An option that `build` depends on besides.
    build : callable
        Compiles the module; told the folder, for what it keeps there itself.

    Returns
    -------
    Executable
        Its ``metadata.cache`` says where it came from. One that is found, or was just stored, is that of a file.

    Raises
    ------
    HeteroError
        An error of `build`; a cache that is not a folder's name. Whatever else is wrong with a cache, compiling goes
        on.
    """
    folder = folder_of(cache)
    key, why = ("", "it is switched off") if folder is None else _key(mod, command_buffers)
    if folder is None or not key:
        return _with_use(build(folder), CacheUse(UNUSED, why=why))
    found = _find(folder, key)
    if found is not None:
        folder.note_hit(key)
        return found
    start = time.perf_counter()
    executable = build(folder)
    use = CacheUse(MISS, key, round(time.perf_counter() - start, 3))
    executable = _with_use(executable, use)
    if cache is None and use.seconds < MIN_SECONDS:
        return _with_use(executable, replace(use, why=f"not kept, as compiling took less than {MIN_SECONDS:g} s"))
    return _store(folder, executable, use)


def find_cached(mod: tvm.IRModule) -> CacheUse:
    """Return whether ``rh.compile(mod, cache=True)`` would find the module (with vdevices), which stays unused."""
    folder = folder_of()
    key, why = ("", "it is switched off") if folder is None else _key(mod, command_buffers=True)
    if folder is None or not key:
        return CacheUse(UNUSED, why=why)
    try:
        with folder.opened() as descriptor:
            if descriptor is not None:
                return replace(_use_of(_open(folder, key, descriptor)), state=HIT)
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
    except Exception as error:  # what TVM cannot write as JSON has no common class
        return "", f"the module cannot be written as JSON: {error}"


def _with_use(executable: Executable, use: CacheUse) -> Executable:
    executable.metadata = replace(executable.metadata, cache=use)
    return executable


def _find(folder: CacheFolder, key: str) -> Executable | None:
    try:
        executable = _load(folder, key, verify=True)
    except BuildError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            _log.warning("the compile cache is made anew: %s", error)
            folder.drop(key)
        return None
    return None if executable is None else _with_use(executable, CacheUse(HIT, key, executable.metadata.cache.seconds))


def _load(folder: CacheFolder, key: str, verify: bool) -> Executable | None:
    """The executable of a file in the folder; None where there is no folder that may be used."""
    with folder.opened() as descriptor:
        if descriptor is None:
            return None
        return load_container(_open(folder, key, descriptor), verify)


def _open(folder: CacheFolder, key: str, descriptor: int) -> Container:
    """The file of a key, none of its code loaded; BuildError for one that is damaged, or the entry of another key."""
    container = open_container(folder.file(key), folder=descriptor)
    found = _use_of(container).key
    if found != key:
        raise BuildError(f"{container.path}: found the entry of key {found!r}, expected the key that is its name")
    return container


def _use_of(container: Container) -> CacheUse:
    """Key, state and seconds of the compilation that wrote a file."""
    try:
        return CacheUse(**read_json(container.header["metadata"])["cache"])
    except (ValueError, TypeError, LookupError) as error:
        raise BuildError(f"{container.path}: the metadata cannot be read: {error!r}") from error


def _store(folder: CacheFolder, executable: Executable, use: CacheUse) -> Executable:
    """Store an executable; gives that of the file, so that what is compiled behaves as what will be found."""
    why = _why_not_linked()
    nbytes = sum(map(nbytes_of, executable.constants))
    if nbytes > folder.limit:
        why = f"its constants take {nbytes:,} bytes, and the cache {folder.limit:,}"
    if not why:
        why = _write(folder, executable, use)
    if not why:
        try:
            stored = _load(folder, use.key, verify=False)
            if stored is not None:
                return stored
            why = f"{folder.path} was removed"
        except BuildError as error:  # too large for what others keep there, or removed by another process
            why = str(error)
    return _with_use(executable, replace(use, why=f"not kept: {why}"))


def _why_not_linked() -> str:
    """Tools that linking lacks and that running does not need."""
    try:
        check_linking("the compile cache")
    except (BuildError, OSError) as error:
        return str(error)
    return ""


def _write(folder: CacheFolder, executable: Executable, use: CacheUse) -> str:
    """Write an executable's file; gives the reason where it cannot be, and warns of it once."""
    try:
        folder.add(use.key, executable.export_private, _description(executable, use))
    except (BuildError, OSError) as error:
        if folder.path not in _unwritable:
            _unwritable.add(folder.path)
            _log.warning("the compile cache cannot be written: %s", error)
        return str(error)
    return ""


def _description(executable: Executable, use: CacheUse) -> dict[str, object]:
    """Data that ``relax-hetero cache ls`` shows."""
    return {
        "functions": [str(signature) for signature in executable.metadata.signatures.values()],
        "targets": [device.target for device in executable.devices],
        "seconds": use.seconds,
    }
