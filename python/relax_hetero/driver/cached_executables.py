"""Executables in the compile cache: what their keys cover besides modules, requests by files, and loading.

None of this imports the passes, so that a language model that was compiled before is there soon.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import tvm
import tvm_ffi
from tvm import relax
from tvm.target import Target, codegen

from ..artifact.cache_folder import CacheFolder, is_key, resolve_cache_folder
from ..artifact.container import Container, open_container
from ..artifact.figure_cache import load_figures, store_figures
from ..artifact.metadata import HIT, MISS, CacheUse
from ..artifact.typed_data import read_json
from ..encoding.resolver import resolver_key
from ..errors import BuildError
from ..system import OpenFolder
from ..target.backend import backend_of
from ..target.native_target import native
from ..transform.ir.collecting import is_collecting
from ..vm.file.executable import Executable
from ..vm.file.load import load_container

_log = logging.getLogger("relax_hetero")
_IMPORT_TIME = time.time()


def why_uncached_for(targets: Sequence[Target]) -> str:
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


def surroundings(targets: Sequence[Target]) -> list[str]:
    """All that an executable depends on besides its module: versions, compilers, resolvers and settings."""
    context = tvm.transform.PassContext.current()
    settings = [context.opt_level, context.required_pass, context.disabled_pass, context.config]
    return [
        _versions(),
        *(f"{target} {resolver_key(target)} {backend_of(target).compiler_identity()}" for target in targets),
        str(Target.current(allow_none=True)),
        tvm.ir.save_json(settings),
    ]


def key_of(parts: Sequence[bytes]) -> str:
    """A key of 40 hexadecimal digits, a hash of parts."""
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def targets_of(vdevices: Sequence[relax.VDevice]) -> list[Target]:
    """The targets that code may be compiled for: those of the devices, and this CPU as the implicit host."""
    return [*(vdevice.target for vdevice in vdevices), native("llvm")]


class FileState(NamedTuple):
    """Identity of a file's content, as build tools see it."""

    path: str
    # Fields of its status, times in nanoseconds.
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
    """

    def __init__(
        self,
        # Files that the module depends on, before they were opened; without any, the cache is not used.
        files: Sequence[FileState],
        vdevices: Sequence[relax.VDevice],  # its devices
        options: str,  # all options of the import and of ``rh.compile``
    ) -> None:
        targets = targets_of(vdevices)
        self._folder = None if not files or why_uncached_for(targets) else resolve_cache_folder()
        self.is_cacheable = self._folder is not None  # whether the cache may have the executable
        if self.is_cacheable:
            identities = repr(list(map(tuple, files)))
            parts = [*surroundings(targets), *(str(vdevice) for vdevice in vdevices), identities, options]
            self._key = key_of([part.encode() for part in parts])

    def load(self) -> Executable | None:
        """The executable of an earlier request that was equal, unless it left the cache."""
        key = self._executable_key()
        executable = load_hit(self._folder, key) if self._folder is not None and key else None
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
    for file in sorted(file for kind in ("*.py", "*.ll", "*.[ch]") for file in package.rglob(kind)):
        code = file.read_bytes()
        digest.update(f"{file.relative_to(package)} {len(code)}\n".encode() + code)
        last_change = max(last_change, file.stat().st_mtime)
    return digest.hexdigest(), last_change


def _tvm_libraries() -> str:
    """Sizes and modification times of TVM's libraries, because all builds from source have the same version."""
    libraries = sorted(Path(tvm.__file__).parent.rglob("libtvm*"))
    return " ".join(f"{status.st_size}:{status.st_mtime_ns}" for status in (file.stat() for file in libraries))


def set_cache_use(executable: Executable, use: CacheUse) -> Executable:
    """Note in an executable's metadata how it came about; returns the executable."""
    executable.metadata = replace(executable.metadata, cache=use)
    return executable


def load_hit(folder: CacheFolder, key: str) -> Executable | None:
    """Load and verify the executable of a key, if the folder has it; damaged ones are removed."""
    try:
        executable = load_entry(folder, key, verify=True)
    except BuildError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            _log.warning("the module is compiled and cached again: %s", error)
            folder.drop(key)
        return None
    if executable is not None:
        set_cache_use(executable, CacheUse(HIT, key, executable.metadata.cache.seconds))
    return executable


def load_entry(folder: CacheFolder, key: str, verify: bool) -> Executable | None:
    """Load an executable from the folder; None if the folder may not be used."""
    with folder.opened() as opened:
        return None if opened is None else load_container(open_entry(folder, key, opened), verify)


def open_entry(folder: CacheFolder, key: str, opened: OpenFolder) -> Container:
    """Open the file of a key without loading code; BuildError if it is damaged or belongs to another key."""
    container = open_container(folder.file(key), folder=opened)
    stored_key = stored_use(container).key
    if stored_key != key:
        raise BuildError(f"{container.path}: found the entry of key {stored_key!r}, expected the key in its name")
    return container


def stored_use(container: Container) -> CacheUse:
    """Key, state and duration of the compilation that wrote a file."""
    try:
        return CacheUse(**read_json(container.header["metadata"])["cache"])
    except (ValueError, TypeError, LookupError) as error:
        raise BuildError(f"{container.path}: the metadata cannot be read: {error!r}") from error
