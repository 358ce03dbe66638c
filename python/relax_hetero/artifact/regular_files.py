"""Safe opening of files that others may have made: regular files only, without blocking.

Opening a FIFO waits for a writer, opening a device may have effects, and a link leads elsewhere. Therefore a path is
checked before it is opened, and the open file again, because the path may have changed meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


def open_regular(
    path: str | os.PathLike[str], *, follow: bool = True, folder: int | None = None, is_private: bool = False
) -> tuple[BinaryIO, os.stat_result]:
    """Open a regular file for reading.

    Parameters
    ----------
    follow : bool
        Whether the last component of `path` may be a link.
    folder : int, optional
        Descriptor of an open folder that `path` is relative to.
    is_private : bool
        Whether to refuse a file of another user, or that others may write.

    Returns
    -------
    (BinaryIO, os.stat_result)
        Open file, which the caller closes, and its status.

    Raises
    ------
    OSError
        A file that is missing, unreadable or not regular (see its `strerror`).
    """
    try:
        _refuse_special(path, os.stat(path, dir_fd=folder, follow_symlinks=follow))
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
        descriptor = os.open(path, flags, dir_fd=folder)
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


def why_untrusted(status: os.stat_result) -> str:
    """The reason not to trust code in a file or folder, because others can write it; empty if it is trusted."""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"its group or others may write to it (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w)"
    return ""


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
