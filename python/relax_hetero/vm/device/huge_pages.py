"""Weights on huge pages (2 MiB on x86-64), which take 512 times fewer entries of the TLB than pages of 4 KiB.

Linux backs anonymous memory with huge pages on request (transparent huge pages), without a copy. Files are backed with
them by some kernels and file systems only; weights of other files are copied to anonymous memory if enough is free.

Source: madvise(2); Linux, Documentation/admin-guide/mm/transhuge.rst.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tvm import runtime

from ...artifact.metadata import CPU
from ...display.text import bytes_text
from ...system import map_anonymously
from .host_memory import available_memory
from .tensors import ALIGNMENT, AddressRange, address_range, alias, bytes_of, nbytes_of, view_bytes

VARIABLE = "RELAX_HETERO_HUGE_PAGES"  # environment variable that turns this off: ``off``
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MIN_BYTES = 16 << 20  # fewer weights need too few pages to matter
_MAX_GAP = 64 << 10  # largest gap between two weights, such as a header of malloc, that may be part of a huge page
_MAPPING_BYTES = 256 << 20  # bytes of a mapping for several weights
_DONTNEED, _HUGEPAGE, _POPULATE_READ, _COLLAPSE = 4, 14, 22, 25  # advice of madvise(2)
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ...(.) \S+ \S+ (\d+)")
_HUGE_IN_FILES = re.compile(r"(?:FilePmdMapped|ShmemPmdMapped): +([1-9]\d*) kB")


@dataclass(frozen=True)
class HugePages:
    """Result of `on_huge_pages`."""

    nbytes: int  # bytes of the weights
    huge: int  # bytes of huge pages that back them; those of a mapped file by its first page
    copied: int  # bytes that were copied from a mapped file

    def __str__(self) -> str:
        copied = f", {bytes_text(self.copied)} copied from the file" if self.copied else ""
        return f"{bytes_text(self.huge)} of {bytes_text(self.nbytes)} of weights are on huge pages{copied}"


def on_huge_pages(tensors: Sequence[runtime.Tensor]) -> tuple[list[runtime.Tensor], HugePages | None]:
    """Weights backed with huge pages where that is possible: the same tensors, or copies of those in mapped files.

    Returns None if nothing was tried: turned off, not Linux, or few weights.
    """
    weights = {i: tensor for i, tensor in enumerate(tensors) if _is_in_memory(tensor)}
    nbytes, page = sum(map(nbytes_of, weights.values())), _page_bytes()
    if not page or nbytes < _MIN_BYTES:
        return list(tensors), None
    mappings, result = _Mappings(), list(tensors)
    in_files = {i: tensor for i, tensor in weights.items() if mappings.is_file(tensor.data_ptr())}
    in_memory = [address_range(tensor) for i, tensor in weights.items() if i not in in_files]
    huge, copied = sum(_collapsed(part) for part in _whole_pages(in_memory, page, mappings)), 0
    pages = list(_whole_pages(map(address_range, in_files.values()), page, mappings))
    if pages and _are_huge(pages[0][0], page):
        huge += sum(end - begin for begin, end in pages)
    elif pages and mappings.are_private([tensor.data_ptr() for tensor in in_files.values()]):
        copies = _copies(list(in_files.values()), page)
        for index, tensor in zip(in_files, copies, strict=False):
            result[index] = tensor
        copied = sum(map(nbytes_of, copies))
    return result, HugePages(nbytes, huge + copied, copied)


def release_file_pages(tensors: Iterable[runtime.Tensor]) -> None:
    """Let Linux take back the memory of tensors in mapped files, which were not written to; it reads them again."""
    tensors = list(filter(_is_in_memory, tensors))
    if not tensors or not Path("/proc/self/maps").exists():
        return
    mappings = _Mappings()
    in_files = [tensor for tensor in tensors if mappings.is_file(tensor.data_ptr())]
    for part in _whole_pages(map(address_range, in_files), mmap.PAGESIZE, mappings):
        _advise(part, _DONTNEED)


class WeightMemory:
    """Memory for weights that are computed one after the other: huge pages from their first use on.

    Weights share large mappings, each of which is freed with its last array. Memory that no weight uses costs nothing,
    since Linux backs a page when it is first written.
    """

    def __init__(self) -> None:
        self._free = np.empty(0, "uint8")

    def zeros(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        """A new array of zeros, aligned to `ALIGNMENT` bytes, or numpy's where no large mapping is to be had."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if padded > len(self._free):
            try:
                self._free = _anonymous_memory(max(padded, _MAPPING_BYTES), _page_bytes())
            except OSError:  # a limit of address space, or of memory that may be promised
                return np.zeros(shape, dtype)
        data, self._free = self._free[:nbytes], self._free[padded:]
        return data.view(dtype).reshape(shape)


def _anonymous_memory(nbytes: int, page: int) -> np.ndarray:
    """Zeroed memory from a multiple of `page` on, with huge pages of that size from its first use on; 0: without."""
    memory = np.frombuffer(map_anonymously(nbytes + page), "uint8")
    if page:
        memory = memory[-memory.ctypes.data % page :]
        _advise((memory.ctypes.data, memory.ctypes.data + nbytes // page * page), _HUGEPAGE)
    return memory[:nbytes]


def _is_in_memory(tensor: runtime.Tensor) -> bool:
    return tensor.device.dlpack_device_type() == CPU and nbytes_of(tensor) > 0


def _page_bytes() -> int:
    """Bytes of a huge page; 0 if there are none, or they are turned off."""
    if not sys.platform.startswith("linux") or os.environ.get(VARIABLE, "").lower() in ("off", "0"):
        return 0
    try:
        if not Path("/proc/self/smaps").exists() or "[never]" in (_SETTINGS / "enabled").read_text():
            return 0
        return int((_SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


class _Mappings:
    """Mappings of this process, at the time of construction."""

    def __init__(self) -> None:
        found = map(_MAPPING.match, Path("/proc/self/maps").read_text(errors="replace").splitlines())
        fields = [match.groups() for match in found if match]
        self._begins = [int(begin, 16) for begin, *_ in fields]
        self._private = [sharing == "p" for _, _, sharing, _ in fields]
        self._inodes = [int(inode) for *_, inode in fields]

    def index(self, address: int) -> int:
        """Number of the mapping with an address."""
        return bisect_right(self._begins, address) - 1

    def is_file(self, address: int) -> bool:
        """Return whether an address is in a mapped file."""
        return self._inodes[self.index(address)] != 0

    def are_private(self, addresses: Iterable[int]) -> bool:
        """Return whether writes to the mappings of these addresses stay in this process."""
        return all(self._private[self.index(address)] for address in addresses)


def _whole_pages(ranges: Iterable[AddressRange], page: int, mappings: _Mappings) -> Iterator[AddressRange]:
    """Whole huge pages within ranges; neighbours of one mapping are joined."""
    joined: list[AddressRange] = []
    for begin, end in sorted(ranges):
        is_near = joined and begin - joined[-1][1] <= _MAX_GAP
        if is_near and mappings.index(begin) == mappings.index(joined[-1][1] - 1):
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    for begin, end in joined:
        first, last = -(-begin // page) * page, end // page * page
        if first < last:
            yield first, last


def _advise(part: AddressRange, advice: int) -> bool:
    begin, end = part
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice) == 0


def _collapsed(part: AddressRange) -> int:
    """Back anonymous memory with huge pages; returns its bytes, 0 if Linux refuses, as before 6.1."""
    return part[1] - part[0] if _advise(part, _HUGEPAGE) and _advise(part, _COLLAPSE) else 0


def _are_huge(begin: int, page: int) -> bool:
    """Return whether Linux backs a mapped file with huge pages, judged by one page of it."""
    if not _advise((begin, begin + page), _POPULATE_READ):
        return False
    is_inside = False
    with open("/proc/self/smaps", errors="replace") as lines:
        for line in lines:
            if match := _MAPPING.match(line):
                is_inside = int(match[1], 16) <= begin < int(match[2], 16)
            elif is_inside and _HUGE_IN_FILES.match(line):
                return True
    return False


def _copies(tensors: Sequence[runtime.Tensor], page: int) -> list[runtime.Tensor]:
    """Copies of tensors in one piece of anonymous memory, huge pages from its first use on; none if memory is short."""
    offsets = np.cumsum([0, *(-(-nbytes_of(tensor) // ALIGNMENT) * ALIGNMENT for tensor in tensors)]).tolist()
    if offsets[-1] > available_memory() // 2:
        return []
    try:
        memory = _anonymous_memory(offsets[-1], page)
    except OSError:  # a limit of address space, or of memory that may be promised
        return []
    copies = []
    for tensor, offset in zip(tensors, offsets, strict=False):
        part = memory[offset : offset + nbytes_of(tensor)]
        part[:] = bytes_of(tensor)
        copies.append(alias(view_bytes(part, tuple(tensor.shape), str(tensor.dtype)), tensor.device))
    return copies
