"""The folder of the compile cache: one file per executable, bounded in size; needs nothing of TVM.

Of a key there are ``KEY.so`` (what ``Executable.export_library`` writes), ``KEY.json`` (what a person wants to know of
it) and ``KEY.hits``, to which every use adds one byte: its length counts the uses, its time says when the last one was.
Machine code of single kernels lies beside them (`kernel_cache`).

Any number of processes may share a folder without locks: files appear complete, by renaming, and whoever has loaded one
that is then removed keeps it, as unlinked files live on while they are mapped.

An executable is code: a folder or file of another user, or that others may write, is not used, and no link is followed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import BuildError, printable
from .regular_files import open_regular, why_foreign
from .typed_data import read_json

_log = logging.getLogger("relax_hetero")

FOLDER_VARIABLE = "RELAX_HETERO_CACHE"
"""The environment variable that names the folder of what this library keeps, or is ``off``."""
LIMIT_VARIABLE = "RELAX_HETERO_CACHE_SIZE"
"""The environment variable of the most that a folder may hold: bytes, or ``500M``, ``20G``."""
DEFAULT_LIMIT_BYTES = 10 << 30

_OFF = ("off", "0", "no", "false", "none")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_KEY = re.compile(r"[0-9a-f]{40}")
_DRAFT = r"\.[0-9a-f]{40}\.(so|json|cubin)\.[0-9a-f]{32}"
_SUFFIXES = ("so", "json", "hits")
# Of what is written for people, in bytes.
_MAX_DESCRIPTION_BYTES = 1 << 20
# Folders that were warned of.
_refused: set[Path] = set()
# Seconds after which what is half-written belongs to a process that was killed.
_STALE_SECONDS = 3600.0


@dataclass(frozen=True)
class Entry:
    """An executable in the folder.

    Attributes
    ----------
    created, used : float
        When it was stored and last used, in seconds since 1970.
    hits : int
        How often it was used instead of compiling.
    description : dict of str to object
        Data given to `CacheFolder.add`; empty where that is lost.
    """

    key: str
    bytes: int
    created: float
    used: float
    hits: int
    description: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheFolder:
    """A folder of executables.

    Attributes
    ----------
    path : Path
        It is made when something is stored.
    limit : int
        The most bytes that executables may take in it; those that were not used for longest go first.
    """

    path: Path
    limit: int = DEFAULT_LIMIT_BYTES

    def file(self, key: str) -> Path:
        """The path of the executable of a key, there or not."""
        return self.path / f"{key}.so"

    def add(self, key: str, write: Callable[[Path], None], description: dict[str, Any]) -> None:
        """Store an executable and drop what is then too much.

        Parameters
        ----------
        write : callable
            Writes the file it is given, so that it appears complete or not at all.
        description : dict of str to object
            JSON data, for people.

        Raises
        ------
        OSError
            A folder that cannot be made or written.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.opened() as folder:
            if folder is None:
                raise OSError(errno.EPERM, "it is not used", str(self.path))
            write(self.file(key))
            draft = f".{key}.json.{uuid.uuid4().hex}"
            with open(draft, "x", opener=partial(private_opener, folder)) as file:
                file.write(json.dumps({"key": key, **description}))
            os.replace(draft, f"{key}.json", src_dir_fd=folder, dst_dir_fd=folder)
        self.trim()

    @contextmanager
    def opened(self) -> Iterator[int | None]:
        """The descriptor of the folder while it is open; None where there is none, or it is not to be trusted.

        Whoever may write to it could put code there that this user runs. A warning says so, once.
        """
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError):  # there is no such folder yet
            yield None
            return
        try:
            why = why_foreign(os.fstat(folder))
            if why and self.path not in _refused:
                _refused.add(self.path)
                _log.warning("the compile cache %s is not used: %s", printable(str(self.path)), why)
            yield None if why else folder
        finally:
            os.close(folder)

    def note_hit(self, key: str) -> None:
        """Count a use; a folder that cannot be written counts nothing."""
        try:
            with self.opened() as folder:
                if folder is not None:
                    with open(f"{key}.hits", "ab", opener=partial(private_opener, folder)) as file:
                        file.write(b"\n")
        except OSError as error:
            _log.debug("the compile cache counts no uses: %s", error)

    def drop(self, key: str) -> None:
        """Remove an executable, if it is there and can be."""
        with self.opened() as folder:
            for suffix in _SUFFIXES:
                unlink_in(folder, f"{key}.{suffix}")

    def entries(self) -> list[Entry]:
        """The entries of the folder, the last used first."""
        with self.opened() as folder:
            found = [_entry(folder, name.removesuffix(".so")) for name in files_in(folder, _KEY.pattern + r"\.so")]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: -entry.used)

    def entry(self, key: str) -> Entry | None:
        """The entry of a key."""
        with self.opened() as folder:
            return _entry(folder, key)

    def trim(self) -> None:
        """Remove what was not used for longest, so that the rest is within the limit, and what dead writers left."""
        total = 0
        for entry in self.entries():
            if total + entry.bytes > self.limit:
                self.drop(entry.key)
            else:
                total += entry.bytes
        before = time.time() - _STALE_SECONDS
        with self.opened() as folder:
            for draft in files_in(folder, _DRAFT):
                status = status_of(folder, draft)
                if status is not None and status.st_mtime < before:
                    unlink_in(folder, draft)

    def clear(self) -> None:
        """Remove every executable and the code of single kernels; other files in the folder stay."""
        with self.opened() as folder:
            for name in files_in(folder, rf"{_KEY.pattern}\.({'|'.join((*_SUFFIXES, 'cubin', 'figures'))})"):
                unlink_in(folder, name)


def private_opener(folder: int, name: str, flags: int) -> int:
    """Open a file of the folder for writing: never through a link, and for nobody else."""
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", name)
    return descriptor


def _entry(folder: int | None, key: str) -> Entry | None:
    status = status_of(folder, f"{key}.so")
    if folder is None or status is None or why_foreign(status):  # another process has just removed it, say
        return None
    uses = status_of(folder, f"{key}.hits")
    hits, used = (uses.st_size, uses.st_mtime) if uses is not None else (0, status.st_mtime)
    return Entry(key, status.st_size, status.st_mtime, max(used, status.st_mtime), hits, _description(folder, key))


def _description(folder: int, key: str) -> dict[str, Any]:
    """Description of a key that `CacheFolder.add` wrote for people; only parts of the kinds that it writes."""
    try:
        file, status = open_regular(f"{key}.json", follow=False, folder=folder, is_private=True)
        with file:
            found = read_json(file.read()) if status.st_size <= _MAX_DESCRIPTION_BYTES else None
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("key") != key:
        return {}
    about: dict[str, Any] = {}
    for part in ("functions", "targets"):
        texts = found.get(part)
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            about[part] = texts
    seconds = found.get("seconds")
    if isinstance(seconds, (int, float)) and 0 <= seconds < 1e9:
        about["seconds"] = seconds
    return about


def folder_of(cache: bool | str | os.PathLike[str] | None = None) -> CacheFolder | None:
    """The folder that ``rh.compile(cache=...)`` means, None for no cache.

    Parameters
    ----------
    cache : bool or str or PathLike of str, optional
        The folder itself, or, for None and True, ``executables`` in the folder that the environment names, which is by
        default ``relax_hetero`` among the user's caches. False: no cache, nor is there one where the environment says
        ``RELAX_HETERO_CACHE=off``.

    Raises
    ------
    BuildError
        The name is not that of a folder, or a limit in the environment is not a size.
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
    # As the XDG Base Directory Specification has it.
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
    """A number of bytes, as ``123``, ``500M`` or ``1.5 GiB``; None for other text."""
    match = _SIZE.fullmatch(text.strip()) if len(text) < 40 else None
    return None if match is None else int(float(match[1]) * (1 << _UNITS[match[2].upper()]))


def files_in(folder: int | None, name: str) -> list[str]:
    """The names in a folder that match a pattern."""
    pattern = re.compile(name)
    return [] if folder is None else [found for found in os.listdir(folder) if pattern.fullmatch(found)]


def status_of(folder: int | None, name: str) -> os.stat_result | None:
    """The status of a regular file in a folder."""
    try:
        status = None if folder is None else os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    return status if status is not None and stat.S_ISREG(status.st_mode) else None


def unlink_in(folder: int | None, name: str) -> None:
    """Remove a file of an open folder; one that is gone, or has to stay, is no error."""
    try:
        if folder is not None:
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.debug("the compile cache keeps %s: %s", name, error)
