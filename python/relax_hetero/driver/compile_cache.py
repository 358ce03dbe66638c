"""Compiled modules are kept on disk and found again, by the same or another process."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import tvm

from ..artifact.cache_folder import CacheFolder, folder_of
from ..artifact.container import Container, open_container
from ..artifact.metadata import HIT, MISS, UNUSED, CacheUse
from ..artifact.typed_data import read_json
from ..errors import BuildError
from ..vm.device.tensors import nbytes_of
from ..vm.file.executable import Executable
from ..vm.file.export import check_linking
from ..vm.file.load import load_container
from .compile_key import compile_key, why_uncached

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
