"""Safe opening of files that others may have made: regular files only, without blocking.

Opening a FIFO waits for a writer, opening a device may have effects, and a link leads elsewhere. Therefore a path is
checked before it is opened, and the open file again, because the path may have changed meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from ..system import NO_LINK, READ_FLAGS, OpenFolder, why_untrusted

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


def open_regular(
    path: str | os.PathLike[str],
    *,
    follow: bool = True,  # whether the last component of `path` may be a link
    folder: OpenFolder | None = None,  # folder that `path` is the name of a file of; then links are refused
    is_private: bool = False,  # whether to refuse a file of another user, or that others may write
) -> tuple[BinaryIO, os.stat_result]:
    """Open a regular file for reading.

    Returns the open file, which the caller closes, and its status. Raises OSError for a file that is missing,
    unreadable or not regular (see its `strerror`).
    """
    try:
        if folder is None:
            _refuse_special(path, os.stat(path, follow_symlinks=follow))
            descriptor = os.open(path, READ_FLAGS | (0 if follow else NO_LINK))
        else:
            name = os.fspath(path)
            _refuse_special(name, folder.stat(name))
            descriptor = folder.open(name, READ_FLAGS | NO_LINK)
    except ValueError as error:  # a NUL character or a surrogate
        raise OSError(errno.EINVAL, f"no file has such a name: {error}") from error
    try:
        status = os.fstat(descriptor)
        _refuse_special(path, status)
        why = why_untrusted(status) if is_private else ""
        if why:
            raise OSError(errno.EPERM, why, os.fspath(path))
        return os.fdopen(descriptor, "rb"), status
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str], max_bytes: int | None = None) -> bytes:
    """Read a regular file; OSError as `open_regular`, and for more than `max_bytes` bytes."""
    file, status = open_regular(path)
    with file:
        if max_bytes is not None and status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, expected at most {max_bytes:,}")
        return file.read()


def _refuse_special(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise OSError(errno.EINVAL, f"found {kind}, expected a regular file", os.fspath(path))
