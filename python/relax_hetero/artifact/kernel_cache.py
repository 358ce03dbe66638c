"""Machine code of single kernels in the folder of the compile cache; independent of TVM.

``KEY.cubin`` contains a digest of key and code, then the code. A model with one changed kernel compiles only that one.
The code may take an eighth of the folder's limit; the least recently used is evicted.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Mapping
from functools import partial

from .cache_folder import CacheFolder, files_in, private_opener, status_of, unlink_in
from .regular_files import open_regular

_log = logging.getLogger("relax_hetero")

_SUFFIX = ".cubin"
_FILES = r"[0-9a-f]{40}\.cubin"
_DIGEST_BYTES = 20
_LIMIT_DIVISOR = 8


def load_code(folder: CacheFolder, key: str) -> bytes | None:
    """The code of a key; None if absent, damaged or of another user."""
    with folder.open_descriptor() as descriptor:
        if descriptor is None:
            return None
        name = key + _SUFFIX
        try:
            file, _ = open_regular(name, follow=False, folder=descriptor, is_private=True)
            with file:
                data = file.read()
            digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
            if digest != _digest(key, code):
                _log.warning("the compile cache's %s is damaged, or the code of another key: made anew", name)
                return None
            os.utime(name, dir_fd=descriptor, follow_symlinks=False)
        except OSError:
            return None
        return code


def store_code(folder: CacheFolder, codes: Mapping[str, bytes]) -> None:
    """Store code by key, if the folder is writable."""
    try:
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with folder.open_descriptor() as descriptor:
            if descriptor is None:
                return
            for key, code in codes.items():
                draft = f".{key}.cubin.{uuid.uuid4().hex}"
                with open(draft, "xb", opener=partial(private_opener, descriptor)) as file:
                    file.write(_digest(key, code) + code)
                os.replace(draft, key + _SUFFIX, src_dir_fd=descriptor, dst_dir_fd=descriptor)
            _trim(descriptor, folder.limit // _LIMIT_DIVISOR)
    except OSError as error:
        _log.debug("the compile cache keeps no kernels: %s", error)


def cached_code(folder: CacheFolder) -> list[int]:
    """Sizes in bytes of the kernels' files in the folder."""
    with folder.open_descriptor() as descriptor:
        statuses = [status_of(descriptor, name) for name in files_in(descriptor, _FILES)]
    return [status.st_size for status in statuses if status is not None]


def _trim(folder: int, limit: int) -> None:
    files = [(name, status_of(folder, name)) for name in files_in(folder, _FILES)]
    total = 0
    for status, name in sorted(((s, n) for n, s in files if s is not None), key=lambda pair: -pair[0].st_mtime):
        total += status.st_size
        if total > limit:
            unlink_in(folder, name)


def _digest(key: str, code: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + code, digest_size=_DIGEST_BYTES).digest()
