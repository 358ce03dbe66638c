"""The folder of the compile cache: one file per executable, bounded in size; needs nothing of TVM.

Of a key there are ``KEY.so`` (what ``Executable.export_library`` writes), ``KEY.json`` (what a person wants to know of
it) and ``KEY.hits``, to which every use adds one byte: its length counts the uses, its time says when the last one was.

Any number of processes may share a folder without locks: files appear complete, by renaming, and whoever has loaded one
that is then removed keeps it, as unlinked files live on while they are mapped.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BuildError

_log = logging.getLogger("relax_hetero")

FOLDER = "RELAX_HETERO_CACHE"
"""The environment variable that names the folder of what this library keeps, or is ``off``."""
LIMIT = "RELAX_HETERO_CACHE_SIZE"
"""The environment variable of the most that a folder may hold: bytes, or ``500M``, ``20G``."""
DEFAULT_LIMIT = 10 << 30

_OFF = ("off", "0", "no", "false", "none")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_KEY = re.compile(r"[0-9a-f]{40}")
_DRAFT = re.compile(r"\.[0-9a-f]{40}\.(so|json)\.[0-9a-f]{32}")
# Seconds after which what is half-written belongs to a process that was killed.
_STALE = 3600.0


@dataclass(frozen=True)
class Entry:
    """An executable in the folder.

    Attributes
    ----------
    created, used: When it was stored and last used, in seconds since 1970.
    hits: How often it was used instead of compiling.
    about: What `CacheFolder.add` was told of it; empty where that is lost.
    """

    key: str
    bytes: int
    created: float
    used: float
    hits: int
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheFolder:
    """A folder of executables.

    Attributes
    ----------
    path: It is made when something is stored.
    limit: The most bytes that executables may take in it; those that were not used for longest go first.
    """

    path: Path
    limit: int = DEFAULT_LIMIT

    def file(self, key: str) -> Path:
        """The path of the executable of a key, there or not."""
        return self.path / f"{key}.so"

    def add(self, key: str, write: Callable[[Path], None], about: dict[str, Any]) -> None:
        """Store an executable and drop what is then too much.

        Parameters
        ----------
        write: Writes the file it is given, so that it appears complete or not at all.
        about: JSON data, for people.

        Raises
        ------
        OSError: A folder that cannot be made or written.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(self.file(key))
        draft = self.path / f".{key}.json.{uuid.uuid4().hex}"
        draft.write_text(json.dumps(about))
        os.replace(draft, self._about(key))
        self.trim()

    def note_hit(self, key: str) -> None:
        """Count a use; a folder that cannot be written counts nothing."""
        try:
            with open(self._hits(key), "ab") as file:
                file.write(b"\n")
        except OSError as error:
            _log.debug("the compile cache counts no uses: %s", error)

    def drop(self, key: str) -> None:
        """Remove an executable, if it is there and can be."""
        for file in (self.file(key), self._about(key), self._hits(key)):
            _unlink(file)

    def entries(self) -> list[Entry]:
        """The entries of the folder, the last used first."""
        found = [self.entry(file.stem) for file in _files(self.path, re.compile(rf"{_KEY.pattern}\.so"))]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: -entry.used)

    def entry(self, key: str) -> Entry | None:
        """The entry of a key."""
        try:
            status = self.file(key).stat()
        except OSError:  # another process has just removed it
            return None
        try:
            uses = self._hits(key).stat()
            hits, used = uses.st_size, uses.st_mtime
        except OSError:
            hits, used = 0, status.st_mtime
        try:
            about = json.loads(self._about(key).read_text())
        except (OSError, ValueError):
            about = {}
        about = about if isinstance(about, dict) else {}
        return Entry(key, status.st_size, status.st_mtime, max(used, status.st_mtime), hits, about)

    def trim(self) -> None:
        """Remove what was not used for longest, so that the rest is within the limit, and what dead writers left."""
        total = 0
        for entry in self.entries():
            if total + entry.bytes > self.limit:
                self.drop(entry.key)
            else:
                total += entry.bytes
        before = time.time() - _STALE
        for draft in _files(self.path, _DRAFT):
            if _modified(draft) < before:
                _unlink(draft)

    def clear(self) -> None:
        """Remove every executable; other files in the folder stay."""
        for suffix in ("so", "json", "hits"):
            for file in _files(self.path, re.compile(rf"{_KEY.pattern}\.{suffix}")):
                _unlink(file)

    def _about(self, key: str) -> Path:
        return self.path / f"{key}.json"

    def _hits(self, key: str) -> Path:
        return self.path / f"{key}.hits"


def folder_of(cache: bool | str | os.PathLike[str] | None = None) -> CacheFolder | None:
    """The folder that ``rh.compile(cache=...)`` means, None for no cache.

    Parameters
    ----------
    cache: The folder itself, or, for None and True, ``executables`` in the folder that the environment names, which is
        by default ``relax_hetero`` among the user's caches. False: no cache, nor is there one where the environment
        says ``RELAX_HETERO_CACHE=off``.

    Raises
    ------
    BuildError: What is no folder's name, or a limit in the environment that is no size.
    """
    named = os.environ.get(FOLDER, "").strip()
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
    text = os.environ.get(LIMIT, "").strip()
    if not text:
        return DEFAULT_LIMIT
    size = parse_size(text)
    if size is None:
        raise BuildError(f"{LIMIT}={text[:100]!r}: expected a number of bytes, or one such as 500M or 20G")
    return size


def parse_size(text: str) -> int | None:
    """A number of bytes, as ``123``, ``500M`` or ``1.5 GiB``; None for other text."""
    match = _SIZE.fullmatch(text.strip()) if len(text) < 40 else None
    return None if match is None else int(float(match[1]) * (1 << _UNITS[match[2].upper()]))


def _files(folder: Path, name: re.Pattern[str]) -> list[Path]:
    try:
        return [file for file in folder.iterdir() if name.fullmatch(file.name)]
    except OSError:  # there is no such folder yet
        return []


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # its writer has just renamed it
        return time.time()


def _unlink(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        _log.debug("the compile cache keeps %s: %s", file, error)
