"""The folder of the compile cache: one file per executable, with a limit of size; independent of TVM.

The files of a key are ``KEY.so`` (of ``Executable.export_library``), ``KEY.json`` (a description for people) and
``KEY.hits``, to which every use appends one byte: its length counts the uses, and its time is that of the last one. The
folder also contains machine code of single kernels (`kernel_cache`).

Any number of processes may share a folder without locks: files appear complete, by renaming, and removed files stay
available to processes that have mapped them.

Executables are code: folders or files that belong to another user, or that others may write, are not used, and links
are not followed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BuildError, printable
from ..system import OpenFolder, why_untrusted
from .regular_files import open_regular
from .typed_data import read_json

_log = logging.getLogger("relax_hetero")

FOLDER_VARIABLE = "RELAX_HETERO_CACHE"  # environment variable with the cache folder of this library, or ``off``
LIMIT_VARIABLE = "RELAX_HETERO_CACHE_SIZE"
"""Environment variable with the maximum size of the folder: bytes, or ``500M``, ``20G``."""
DEFAULT_LIMIT_BYTES = 10 << 30

_OFF = ("off", "0", "no", "false", "none")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_KEY = re.compile(r"[0-9a-f]{40}")
_DRAFT = r"\.[0-9a-f]{40}\.(so|json|cubin|figures)\.[0-9a-f]{32}"
_SUFFIXES = ("so", "json", "hits")
_MAX_DESCRIPTION_BYTES = 1 << 20
_refused: set[Path] = set()  # folders for which a warning was logged
_STALE_SECONDS = 3600.0  # age of a draft after which its writer counts as dead


@dataclass(frozen=True)
class Entry:
    """An executable in the folder."""

    key: str
    bytes: int
    # When it was stored and last used, in seconds since 1970.
    created: float
    used: float
    hits: int  # number of uses instead of compiling
    description: dict[str, Any] = field(default_factory=dict)  # data of `CacheFolder.add`; empty if lost


def is_key(value: object) -> bool:
    """Return whether a value is the key of an entry."""
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


@dataclass(frozen=True)
class CacheFolder:
    """A folder of executables."""

    path: Path  # path of the folder, which is created at the first store
    limit: int = DEFAULT_LIMIT_BYTES  # maximum bytes of executables; the least recently used are evicted

    def file(self, key: str) -> Path:
        """The path of a key's executable, whether it exists or not."""
        return self.path / f"{key}.so"

    def add(self, key: str, write: Callable[[Path], None], description: dict[str, Any]) -> None:
        """Store an executable, and evict others beyond the limit.

        `write`: function that writes the given file atomically. `description`: JSON data, for people. Raises OSError
        for a folder that cannot be made or written.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.opened() as folder:
            if folder is None:
                raise OSError(errno.EPERM, "it is not used", str(self.path))
            write(self.file(key))
            write_in(folder, f"{key}.json", json.dumps({"key": key, **description}).encode())
        self.trim()

    @contextmanager
    def opened(self) -> Iterator[OpenFolder | None]:
        """Context with the open folder; None if it is absent or not trusted, which is logged once.

        A folder that other users can write is not trusted, because they could store code there that this user runs.
        """
        try:
            folder = OpenFolder(self.path)
        except (OSError, ValueError):  # the folder does not exist yet
            yield None
            return
        with folder:
            why = why_untrusted(folder.status())
            if why and self.path not in _refused:
                _refused.add(self.path)
                _log.warning("the compile cache %s is not used: %s", printable(str(self.path)), why)
            yield None if why else folder

    def note_hit(self, key: str) -> None:
        """Count a use, if the folder is writable."""
        try:
            with self.opened() as folder:
                if folder is not None:
                    with open(f"{key}.hits", "ab", opener=folder.open_to_write) as file:
                        file.write(b"\n")
        except OSError as error:
            _log.debug("the compile cache counts no uses: %s", error)

    def drop(self, key: str) -> None:
        """Remove an executable, if possible."""
        with self.opened() as folder:
            if folder is not None:
                for suffix in _SUFFIXES:
                    remove_in(folder, f"{key}.{suffix}")

    def entries(self) -> list[Entry]:
        """The entries of the folder, the most recently used first."""
        with self.opened() as folder:
            names = [] if folder is None else folder.files(_KEY.pattern + r"\.so")
            entries = [_entry(folder, name.removesuffix(".so")) for name in names]
        return sorted((entry for entry in entries if entry is not None), key=lambda entry: -entry.used)

    def entry(self, key: str) -> Entry | None:
        """The entry of a key."""
        with self.opened() as folder:
            return _entry(folder, key)

    def trim(self) -> None:
        """Evict the least recently used executables beyond the limit, and remove drafts of dead writers."""
        total = 0
        for entry in self.entries():
            if total + entry.bytes > self.limit:
                self.drop(entry.key)
            else:
                total += entry.bytes
        before = time.time() - _STALE_SECONDS
        with self.opened() as folder:
            if folder is not None:
                for draft in folder.files(_DRAFT):
                    status = folder.regular_status(draft)
                    if status is not None and status.st_mtime < before:
                        remove_in(folder, draft)

    def clear(self) -> None:
        """Remove every executable and the code of single kernels; other files in the folder stay."""
        with self.opened() as folder:
            if folder is not None:
                for name in folder.files(rf"{_KEY.pattern}\.({'|'.join((*_SUFFIXES, 'cubin', 'figures'))})"):
                    remove_in(folder, name)


def write_in(folder: OpenFolder, name: str, data: bytes) -> None:
    """Write a file of an open folder, named by a key: it appears complete."""
    draft = f".{name}.{uuid.uuid4().hex}"  # `CacheFolder.trim` removes drafts of dead writers
    with open(draft, "xb", opener=folder.open_to_write) as file:
        file.write(data)
    folder.rename(draft, name)


def remove_in(folder: OpenFolder, name: str) -> None:
    """Remove a file of an open folder; failures are ignored."""
    try:
        folder.remove(name)
    except OSError as error:
        _log.debug("the compile cache keeps %s: %s", name, error)


def _entry(folder: OpenFolder | None, key: str) -> Entry | None:
    status = None if folder is None else folder.regular_status(f"{key}.so")
    if folder is None or status is None or why_untrusted(status):  # for example, removed by another process meanwhile
        return None
    uses = folder.regular_status(f"{key}.hits")
    hits, used = (uses.st_size, uses.st_mtime) if uses is not None else (0, status.st_mtime)
    return Entry(key, status.st_size, status.st_mtime, max(used, status.st_mtime), hits, _description(folder, key))


def _description(folder: OpenFolder, key: str) -> dict[str, Any]:
    """The description of a key that `CacheFolder.add` wrote; only fields of the expected types."""
    try:
        file, status = open_regular(f"{key}.json", follow=False, folder=folder, is_private=True)
        with file:
            data = read_json(file.read()) if status.st_size <= _MAX_DESCRIPTION_BYTES else None
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict) or data.get("key") != key:
        return {}
    description: dict[str, Any] = {}
    for part in ("functions", "targets"):
        texts = data.get(part)
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            description[part] = texts
    seconds = data.get("seconds")
    if isinstance(seconds, (int, float)) and 0 <= seconds < 1e9:
        description["seconds"] = seconds
    return description


def resolve_cache_folder(cache: bool | str | os.PathLike[str] | None = None) -> CacheFolder | None:
    """The compile cache's folder that an argument ``rh.compile(cache=...)`` selects; None without a cache.

    `cache`: folder. None and True stand for ``executables`` in the environment's folder, which is by default
    ``relax_hetero`` among the user's caches. False, or ``RELAX_HETERO_CACHE=off``, disables the cache. Raises
    BuildError for an invalid folder name, or an invalid size in the environment.
    """
    named = os.environ.get(FOLDER_VARIABLE, "").strip()
    if cache is False or named.lower() in _OFF:
        return None
    if cache is None or cache is True:
        base = os.path.expanduser(named or os.path.join(_user_caches(), "relax_hetero"))
        if not named and not os.path.isabs(base):  # a user without a home
            return None
        path = Path(base, "executables")
    else:
        try:
            name = os.fsdecode(cache)
        except TypeError:
            name = ""
        if not name or "\0" in name:
            raise BuildError(f"cache={cache!r}: expected True, False or a folder's name")
        path = Path(os.path.expanduser(name))
    return CacheFolder(Path(os.path.abspath(path)), _limit())


def _user_caches() -> str:
    # XDG Base Directory Specification.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return base if os.path.isabs(base) else "~/.cache"


def _limit() -> int:
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not text:
        return DEFAULT_LIMIT_BYTES
    size = parse_size(text)
    if size is None:
        raise BuildError(f"{LIMIT_VARIABLE}={text[:100]!r}: expected a number of bytes, or one such as 500M or 20G")
    return size


def parse_size(text: str) -> int | None:
    """Parse a number of bytes such as ``123``, ``500M`` or ``1.5 GiB``; None for other text."""
    match = _SIZE.fullmatch(text.strip()) if len(text) < 40 else None
    return None if match is None else int(float(match[1]) * (1 << _UNITS[match[2].upper()]))
