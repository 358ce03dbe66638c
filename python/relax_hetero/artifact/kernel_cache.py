"""Machine code of single kernels in the folder of the compile cache; independent of TVM.

``KEY.cubin`` contains a digest of key and code, then the code. A model with one changed kernel compiles only that one.
The code may take an eighth of the folder's limit; the least recently used is evicted.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping

from ..system import OpenFolder
from .cache_folder import CacheFolder, remove_in, write_in
from .regular_files import open_regular

_log = logging.getLogger("relax_hetero")

_SUFFIX = ".cubin"
_FILES = r"[0-9a-f]{40}\.cubin"
_DIGEST_BYTES = 20
_LIMIT_DIVISOR = 8


def load_code(folder: CacheFolder, key: str) -> bytes | None:
    """The code of a key; None if absent, damaged or of another user."""
    with folder.opened() as opened:
        if opened is None:
            return None
        name = key + _SUFFIX
        try:
            file, _ = open_regular(name, follow=False, folder=opened, is_private=True)
            with file:
                data = file.read()
            digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
            if digest != _digest(key, code):
                _log.warning("the compile cache's %s is damaged, or the code of another key: made anew", name)
                return None
            opened.touch(name)
        except OSError:
            return None
        return code


def store_code(folder: CacheFolder, codes: Mapping[str, bytes]) -> None:
    """Store code by key, if the folder is writable."""
    try:
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with folder.opened() as opened:
            if opened is None:
                return
            for key, code in codes.items():
                write_in(opened, key + _SUFFIX, _digest(key, code) + code)
            _trim(opened, folder.limit // _LIMIT_DIVISOR)
    except OSError as error:
        _log.debug("the compile cache keeps no kernels: %s", error)


def cached_code(folder: CacheFolder) -> list[int]:
    """Sizes in bytes of the kernels' files in the folder."""
    with folder.opened() as opened:
        statuses = [] if opened is None else [opened.regular_status(name) for name in opened.files(_FILES)]
    return [status.st_size for status in statuses if status is not None]


def _trim(folder: OpenFolder, limit: int) -> None:
    files = [(name, folder.regular_status(name)) for name in folder.files(_FILES)]
    total = 0
    for status, name in sorted(((s, n) for n, s in files if s is not None), key=lambda pair: -pair[0].st_mtime):
        total += status.st_size
        if total > limit:
            remove_in(folder, name)


def _digest(key: str, code: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + code, digest_size=_DIGEST_BYTES).digest()
