"""Differences between Linux, macOS and Windows: processors, memory, files, and the loading of libraries.

All other modules are the same on every system and call this one; what only Linux has (NUMA nodes, huge pages, control
groups) is off elsewhere, in the module of its subject. Independent of TVM.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import mmap
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

IS_WINDOWS = sys.platform == "win32"
IS_MACOS = sys.platform == "darwin"

HAS_PROCESS_LIMITS = not IS_WINDOWS
"""True if a process can limit its own time and memory, as the rendering of untrusted chat templates requires."""

_COPY_BYTES = 1 << 24
_CPUINFO, _MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
_OPEN_FILES = Path("/proc/self/fd")


# Processors.


def allowed_cpus() -> set[int]:
    """Numbers of the CPUs that this process may use; all of the computer where the system has no affinity."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def pin_thread(thread: int, cpus: Iterable[int]) -> bool:
    """Keep a thread (its native number) to some CPUs; False where the system cannot, or refuses."""
    try:
        os.sched_setaffinity(thread, cpus)
    except (AttributeError, OSError):
        return False
    return True


@cache
def processor_name() -> str:
    """The name of the processor, such as "Intel(R) Xeon(R) CPU @ 2.10GHz"; the architecture if it is unknown."""
    with suppress(OSError):
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            if line.startswith("model name") and (name := line.partition(":")[2].strip()):
                return name
    if IS_WINDOWS:
        return os.environ.get("PROCESSOR_IDENTIFIER") or platform.machine()
    if IS_MACOS:
        with suppress(OSError, subprocess.SubprocessError):
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            if name := subprocess.check_output(command, timeout=10, text=True).strip():
                return name
    return platform.processor() or platform.machine()


# Memory.


def installed_memory() -> int | None:
    """Bytes of memory of the computer; None if the system does not tell."""
    if IS_WINDOWS:
        return _windows_memory()[0]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def free_memory() -> int | None:
    """Bytes of free and reclaimable memory of the computer; None if the system does not tell."""
    if IS_WINDOWS:
        return _windows_memory()[1]
    with suppress(OSError):
        found = re.search(r"^MemAvailable:\s*(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
        return int(found[1]) << 10 if found else None
    return None


def address_space_limit() -> int | None:
    """Maximum bytes of this process's address space; None without a limit."""
    return _limit("RLIMIT_AS")


def open_files_limit() -> int | None:
    """Maximum number of files and connections that this process may have open; None without a limit."""
    return _limit("RLIMIT_NOFILE")


def _limit(name: str) -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    try:
        limit = resource.getrlimit(getattr(resource, name))[0]
    except (AttributeError, OSError):
        return None
    return None if limit == resource.RLIM_INFINITY or limit < 0 else limit


def release_freed_memory() -> None:
    """Return freed memory to the system: glibc keeps some 100 MB after compiling, which a server would hold forever."""
    with suppress(OSError, AttributeError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def map_privately(descriptor: int) -> mmap.mmap:
    """Map a whole file that is not empty: writable memory, whose changes do not reach the file.

    Linux and macOS promise no memory for the pages, which are rarely written.
    """
    if IS_WINDOWS:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # Python 3.13 names it
    return mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE | no_reserve)


def map_anonymously(nbytes: int) -> mmap.mmap:
    """Zeroed memory of this process alone, which costs nothing until it is written."""
    return mmap.mmap(-1, nbytes) if IS_WINDOWS else mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE)


class _WindowsMemory(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API."""

    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "free", "pages", "free_pages", "virtual", "free_virtual", "_")),
    ]


def _windows_memory() -> tuple[int | None, int | None]:
    """Bytes of memory, and of free memory."""
    status = _WindowsMemory(ctypes.sizeof(_WindowsMemory))
    library: Any = ctypes
    if not library.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None, None
    return status.total, status.free


# Files.


def _flags(*names: str) -> int:
    """Flags of `os.open`; those that a system lacks are 0."""
    return sum(getattr(os, name, 0) for name in names)


READ_FLAGS = _flags("O_RDONLY", "O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY", "O_BINARY", "O_NOINHERIT")
"""Flags of `os.open` to read a file that may be a FIFO or a terminal, without side effects."""

NO_LINK = _flags("O_NOFOLLOW")
"""Flag of `os.open` that refuses symbolic links; 0 on Windows, where users cannot make them without a privilege."""

_HAS_FOLDER_DESCRIPTORS = os.open in os.supports_dir_fd


class OpenFolder:
    """An open folder, a context; its files are found even if its path is replaced, except on Windows.

    Raises OSError for a folder that is missing or cannot be read. Raises ValueError for a path with a NUL character.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._descriptor: int | None = None
        if _HAS_FOLDER_DESCRIPTORS:
            self._descriptor = os.open(path, _flags("O_RDONLY", "O_DIRECTORY", "O_CLOEXEC"))
        elif not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.path)

    def __enter__(self) -> OpenFolder:
        return self

    def __exit__(self, *_raised: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _name(self, name: str) -> str:
        return name if _HAS_FOLDER_DESCRIPTORS else os.path.join(self.path, name)

    def status(self) -> os.stat_result:
        """The status of the folder."""
        return os.stat(self.path) if self._descriptor is None else os.fstat(self._descriptor)

    def files(self, pattern: str) -> list[str]:
        """Names in the folder that match a regular expression."""
        names = os.listdir(self.path if self._descriptor is None else self._descriptor)
        return [name for name in names if re.fullmatch(pattern, name)]

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Open a file of the folder; returns its descriptor."""
        return os.open(self._name(name), flags, mode, dir_fd=self._descriptor)

    def open_to_write(self, name: str, flags: int) -> int:
        """Open a regular file, private to this user, without following links: an `opener` of `open`."""
        descriptor = self.open(name, flags | NO_LINK | _flags("O_NONBLOCK", "O_BINARY"))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "no regular file", name)
        return descriptor

    def stat(self, name: str) -> os.stat_result:
        """The status of a file of the folder, or of a link itself."""
        return os.stat(self._name(name), dir_fd=self._descriptor, follow_symlinks=False)

    def regular_status(self, name: str) -> os.stat_result | None:
        """The status of a regular file of the folder, or None."""
        with suppress(OSError):
            status = self.stat(name)
            return status if stat.S_ISREG(status.st_mode) else None
        return None

    def rename(self, old: str, new: str) -> None:
        """Rename a file of the folder, which replaces another one."""
        folder = self._descriptor
        os.replace(self._name(old), self._name(new), src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, name: str) -> None:
        """Remove a file of the folder, if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(self._name(name), dir_fd=self._descriptor)

    def touch(self, name: str) -> None:
        """Set the time of a file of the folder to now."""
        if self._descriptor is None:
            os.utime(self._name(name))
        else:
            os.utime(name, dir_fd=self._descriptor, follow_symlinks=False)


def why_untrusted(status: os.stat_result) -> str:
    """The reason not to trust code in a file or folder, because others can write it; empty if it is trusted.

    Windows keeps access-control lists, which this does not read: there a folder in the user's profile is private.
    """
    if IS_WINDOWS:
        return ""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"its group or others may write to it (mode {stat.S_IMODE(status.st_mode):o}; chmod go-w)"
    return ""


def read_at(file: BinaryIO, nbytes: int, offset: int) -> bytes:
    """Read at most `nbytes` bytes from an offset, which leaves the file's position as it is."""
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), nbytes, offset)
    position = file.tell()
    try:
        file.seek(offset)
        return file.read(nbytes)
    finally:
        file.seek(position)


def copy_to_memory(file: BinaryIO) -> int:
    """Copy a file to memory that no other process can change (a deleted temporary file where there is none).

    Returns the descriptor of the copy, which the caller closes.
    """
    has_memory = hasattr(os, "memfd_create")
    if has_memory:
        descriptor = os.memfd_create("relax_hetero", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as temporary:
            descriptor = os.dup(temporary.fileno())
    try:
        with open(descriptor, "wb", closefd=False) as target:
            shutil.copyfileobj(file, target, _COPY_BYTES)
        if has_memory:
            import fcntl

            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def path_of_open_file(descriptor: int) -> str | None:
    """A path of the very file that is open, even if its own path has been replaced; None except on Linux."""
    path = str(_OPEN_FILES / str(descriptor))
    return path if os.path.exists(path) else None


# Libraries.

LIBRARY_SUFFIX = ".dll" if IS_WINDOWS else ".dylib" if IS_MACOS else ".so"  # suffix of shared libraries
LIBRARY_SUFFIXES = (".so", ".dylib", ".dll")  # suffixes of shared libraries on all systems

LINK_OPTIONS = ("-shared", *(() if IS_WINDOWS else ("-fPIC",)), *(("-undefined", "dynamic_lookup") if IS_MACOS else ()))
"""Options of a C compiler that links a shared library, whose symbols of TVM are found when it is loaded."""

COMPILERS = () if IS_WINDOWS else ("g++", "gcc", "clang++", "clang", "c++", "cc")
"""C compilers that link libraries where they are on PATH. On Windows only those of ziglang need no other package."""


def find_compiler() -> list[str]:
    """The command of a C compiler: the first of `COMPILERS`, else clang in the package ziglang; empty without one."""
    path = next(filter(None, map(shutil.which, COMPILERS)), None)
    if path is None and importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    return [] if path is None else [path]


def has_symbol(name: str) -> bool:
    """Return whether this process defines a symbol of C; on Windows, whether its C library does."""
    return hasattr(ctypes.CDLL("ucrtbase" if IS_WINDOWS else None), name)
