"""Memory of a launch: global arrays, the shared memory of blocks, the local arrays of threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .faults import KernelFault
from .races import Accesses

if TYPE_CHECKING:
    from .lanes import Lanes

ADDRESS_BITS = 40
"""A generic address is the memory's number and, in the lower bits, a byte offset."""

RANK_BITS = 24
"""Bits of the offset in an address of shared memory; above them a block's rank in its cluster plus 1, or 0 for the
own block."""

SHARED = 1
"""The number of shared memory."""

NOTHING = 0xFF
"""Bytes that nobody wrote: NaN in every type of floats."""

_WRITTEN = {size: np.frombuffer(b"\x01" * size, f"u{size}")[0] for size in (1, 2, 4, 8)}


@dataclass(frozen=True)
class View:
    """A buffer: elements of a type in a memory, from a byte offset on.

    Attributes
    ----------
    count : int
        Elements; an index beyond is a fault.
    """

    memory: Any
    offset: int
    dtype: np.dtype
    count: int
    name: str
    strides: tuple[int, ...] = (1,)

    @property
    def address(self) -> np.uint64:
        """The generic address of the first element."""
        return np.uint64((self.memory.number << ADDRESS_BITS) + self.offset)


def _within(lanes: Lanes, mask: Any, index: Any, view: View) -> None:
    if np.ndim(index) == 0:
        bad = not 0 <= index < view.count
        if bad and (mask is None or mask.any()):
            raise KernelFault(f"out of range: index {int(index)} of {view.name}, which has {view.count} elements")
        return
    bad = (index < 0) | (index >= view.count)
    if mask is not None:
        bad = bad & _widened(mask, index)
    if bad.any():
        where = np.argwhere(bad)[0]
        lane = int(where[0]) if bad.shape[0] > 1 else 0
        raise KernelFault(
            f"out of range: index {int(np.broadcast_to(index, bad.shape)[tuple(where)])} of {view.name}, which has "
            f"{view.count} elements, in {lanes.name(lane)}"
        )


def _widened(mask: np.ndarray, index: Any) -> np.ndarray:
    return mask[:, None] if np.ndim(index) == 2 and mask.ndim == 1 else mask


class Local:
    """Arrays of threads: each lane has its own.

    Attributes
    ----------
    touched : (size,) bool
        Bytes that some lane wrote since the last ``wgmma.fence``.
    """

    def __init__(self, number: int, name: str, lanes: int, size: int) -> None:
        self.number, self.name, self.size = number, name, size
        self.bytes = np.full((lanes, size), NOTHING, np.uint8)
        self.written = np.zeros((lanes, size), np.uint8)
        self.touched = np.zeros(size, bool)

    def load(self, lanes: Lanes, mask: Any, view: View, index: Any) -> Any:
        """Load elements; faults where active lanes never wrote them."""
        _within(lanes, mask, index, view)
        elements, where = self._place(lanes, mask, view, index)
        written = _elements(self.written, f"u{view.dtype.itemsize}")[where, elements] == _WRITTEN[view.dtype.itemsize]
        if not written.all() and lanes.blocks.strict:
            bad = ~written if mask is None else ~written & _widened(mask, index)
            if bad.any():
                lane = int(np.argwhere(bad)[0][0])
                raise KernelFault(f"{view.name} is read and was never written, in {lanes.name(lane)}")
        return _elements(self.bytes, view.dtype)[where, elements]

    def store(self, lanes: Lanes, mask: Any, view: View, index: Any, value: Any) -> None:
        """Write elements of the active lanes."""
        _within(lanes, mask, index, view)
        elements, where = self._place(lanes, mask, view, index)
        size = view.dtype.itemsize
        if np.ndim(elements) == 0:
            self.touched[elements * size : (elements + 1) * size] = True
        else:
            self.touched.reshape(-1, size)[np.unique(elements)] = True
        data, written = _elements(self.bytes, view.dtype), _elements(self.written, f"u{view.dtype.itemsize}")
        if mask is None:
            data[where, elements] = value
            written[where, elements] = _WRITTEN[view.dtype.itemsize]
            return
        shape = np.broadcast_shapes(np.shape(where), np.shape(elements))
        active = np.broadcast_to(_widened(mask, index), shape)
        where, elements = np.broadcast_to(where, shape)[active], np.broadcast_to(elements, shape)[active]
        data[where, elements] = np.broadcast_to(value, shape)[active]
        written[where, elements] = _WRITTEN[view.dtype.itemsize]

    def forget(self, mask: Any) -> None:
        """Mark what the active lanes wrote as undefined."""
        if mask is None:
            self.written[:] = 0
        else:
            self.written[mask] = 0

    def _place(self, lanes: Lanes, mask: Any, view: View, index: Any) -> tuple[Any, Any]:
        base = view.offset // view.dtype.itemsize
        if np.ndim(index) == 0:
            if not 0 <= index < view.count:
                index = 0
            return int(base + index), lanes.everyone
        if mask is not None:
            index = np.where(_widened(mask, index), index, 0)
        return base + index, (lanes.everyone if np.ndim(index) == 1 else lanes.everyone[:, None])


def _elements(data: np.ndarray, dtype: Any) -> np.ndarray:
    """The complete elements of a type in some bytes, without an incomplete one at the end."""
    size = np.dtype(dtype).itemsize
    return data[:, : data.shape[1] // size * size].view(dtype)


class Addressed:
    """Memory that several threads reach: bytes of `instances` (blocks), with the last accesses of each cell.

    Parameters
    ----------
    cell : int
        Bytes of a cell, the unit of the search for races: the smallest element type of accesses.
    defined : bool
        Whether the contents are defined before anything is written.
    tracked : bool
        Whether anything writes at all.
    size : int, optional
        Bytes that exist, where `data` has more.
    """

    def __init__(
        self,
        number: int,
        name: str,
        data: np.ndarray,
        cell: int,
        *,
        defined: bool,
        tracked: bool,
        shared: bool,
        size: int | None = None,
    ) -> None:
        self.number, self.name, self.shared = number, name, shared
        self.bytes = data
        self.size = data.shape[1] if size is None else size
        self.written = None if defined else np.zeros(data.shape, np.uint8)
        self.begin(tracked, cell)

    def begin(self, tracked: bool, cell: int) -> None:
        """Forget all accesses; `tracked`: whether anything writes from here on, in units of `cell` bytes at least."""
        self.cell, self.cells = cell, -(-self.bytes.shape[1] // cell)
        self.accesses = Accesses(self.name, self.cells * self.bytes.shape[0]) if tracked else None

    def load(self, lanes: Lanes, mask: Any, view: View, index: Any, instance: Any = None) -> Any:
        """Elements; faults of range, of memory never written, and races.

        Parameters
        ----------
        instance : np.ndarray, optional
            Block whose shared memory is read; by default the lanes' own.
        """
        _within(lanes, mask, index, view)
        elements = self._index(mask, view, index)
        instance = self._instance(lanes, index, instance)
        size = view.dtype.itemsize
        if self.written is not None:
            written = _elements(self.written, f"u{size}")[instance, elements] == _WRITTEN[size]
            if not written.all() and lanes.blocks.strict:
                bad = ~written if mask is None else ~written & _widened(mask, index)
                if bad.any():
                    lane = int(np.argwhere(bad)[0][0]) if np.ndim(bad) else 0
                    raise KernelFault(f"{view.name} is read and was never written, in {lanes.name(lane)}")
        if self.accesses is not None:
            uids, cells = self._touched(lanes, mask, size, elements, instance)
            self.accesses.read(lanes.clocks, uids, cells)
        return _elements(self.bytes, view.dtype)[instance, elements]

    def store(self, lanes: Lanes, mask: Any, view: View, index: Any, value: Any, instance: Any = None) -> None:
        """Write elements of the active lanes; faults of range and races."""
        _within(lanes, mask, index, view)
        elements = self._index(mask, view, index)
        instance = self._instance(lanes, index, instance)
        size = view.dtype.itemsize
        assert self.accesses is not None, f"{self.name} was taken for an input that is only read"
        uids, cells = self._touched(lanes, mask, size, elements, instance)
        self.accesses.write(lanes.clocks, uids, cells)
        shape = np.broadcast_shapes((lanes.count,) if np.ndim(elements) < 2 else (lanes.count, 1), np.shape(elements))
        elements, instance = np.broadcast_to(elements, shape), np.broadcast_to(instance, shape)
        value = np.broadcast_to(value, shape)
        if mask is not None:
            active = np.broadcast_to(_widened(mask, elements), shape)
            elements, instance, value = elements[active], instance[active], value[active]
        _elements(self.bytes, view.dtype)[instance, elements] = value
        if self.written is not None:
            _elements(self.written, f"u{size}")[instance, elements] = _WRITTEN[size]

    def note_atomic(self, lanes: Lanes, mask: Any, view: View, index: Any) -> None:
        """Check an atomic operation on one element a lane for range and races."""
        _within(lanes, mask, index, view)
        elements, instance = self._index(mask, view, index), self._instance(lanes, index)
        assert self.accesses is not None
        uids, cells = self._touched(lanes, mask, view.dtype.itemsize, elements, instance)
        self.accesses.write(lanes.clocks, uids, cells, atomic=True)

    def _index(self, mask: Any, view: View, index: Any) -> Any:
        base = view.offset // view.dtype.itemsize
        if np.ndim(index) == 0:
            return base + (index if 0 <= index < view.count else 0)
        if mask is not None:
            index = np.where(_widened(mask, index), index, 0)
        return base + index

    def _instance(self, lanes: Lanes, index: Any, instance: Any = None) -> Any:
        if not self.shared or self.bytes.shape[0] == 1:
            return 0
        instance = lanes.instance if instance is None else instance
        return instance[:, None] if np.ndim(index) == 2 else instance

    def cells_of(self, instance: int, start: int, size: int) -> np.ndarray:
        """The cells of `size` bytes from `start` on.

        Raises
        ------
        KernelFault
            There are not so many bytes.
        """
        if not 0 <= start <= start + size <= self.size:
            raise KernelFault(f"out of range: bytes {start} to {start + size} of {self.name}, which has {self.size}")
        first = instance * self.cells
        return np.arange(first + start // self.cell, first + -(-(start + size) // self.cell))

    def require(self, instance: int, start: int, size: int, who: str) -> None:
        """Raise a fault if some of the bytes were never written."""
        if self.written is not None and not self.written[instance, start : start + size].all():
            offset = start + int(np.flatnonzero(self.written[instance, start : start + size] == 0)[0])
            raise KernelFault(f"{self.name}, byte {offset}, is read by {who} and was never written, or not yet")

    def _touched(self, lanes: Lanes, mask: Any, size: int, items: Any, instance: Any) -> tuple[np.ndarray, np.ndarray]:
        """Threads and cells, flat, of an access to elements `at` of `size` bytes."""
        per = max(1, size // self.cell)
        cells = (np.asarray(items, np.int64) * size) // self.cell + np.asarray(instance, np.int64) * self.cells
        if cells.ndim < 2:
            cells = np.broadcast_to(cells, (lanes.count,))[:, None]
        else:
            cells = np.broadcast_to(cells, (lanes.count, cells.shape[1]))
        if per > 1:
            cells = (cells[:, :, None] + np.arange(per)).reshape(lanes.count, -1)
        uids = np.broadcast_to(lanes.uid[:, None], cells.shape)
        if mask is not None:
            active = mask if mask.ndim == 1 else mask.any(axis=1)
            uids, cells = uids[active], cells[active]
        return uids.reshape(-1), cells.reshape(-1)


def memory_of(lanes: Lanes, number: int) -> Any:
    """The memory of a number, as these lanes see it."""
    if number == SHARED:
        return lanes.blocks.shared
    for local in lanes.locals.values():
        if local.number == number:
            return local
    if number not in lanes.blocks.memories:
        raise KernelFault(f"an address points to no memory: memory {number}")
    return lanes.blocks.memories[number]


def pointed(lanes: Lanes, mask: Any, address: Any, dtype: np.dtype) -> tuple[View, Any]:
    """The memory that addresses point into, viewed as elements of a type, and each lane's index.

    Raises
    ------
    KernelFault
        An address is not aligned to the type, or points to no memory.
    """
    address = np.asarray(address, np.uint64)
    used = address.reshape(-1) if address.ndim == 0 or mask is None else address[mask]
    numbers = np.unique(used >> np.uint64(ADDRESS_BITS))
    if len(numbers) != 1:
        raise NotImplementedError("addresses of one instruction in several memories")
    memory = memory_of(lanes, int(numbers[0]))
    offset = (address & np.uint64((1 << ADDRESS_BITS) - 1)).astype(np.int64)
    if (used.astype(np.int64) % dtype.itemsize).any():
        raise KernelFault(f"an address in {memory.name} is not a multiple of {dtype.itemsize} bytes")
    view = View(memory, 0, dtype, memory.size // dtype.itemsize, memory.name)
    return view, (offset // dtype.itemsize)[()]


def shared_place(lanes: Lanes, address: Any, mask: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The block (counted from the first that runs) and byte offset of addresses of shared memory; 0 beyond `mask`.

    Raises
    ------
    KernelFault
        A generic address of other memory, or a block that the cluster does not have.
    """
    address = np.broadcast_to(np.asarray(address), (lanes.count,)).astype(np.uint64)
    address = address if mask is None else np.where(mask, address, np.uint64(0))
    number = address >> np.uint64(ADDRESS_BITS)
    if ((number != 0) & (number != SHARED)).any():
        raise KernelFault("an address of shared memory is wanted, found one of other memory")
    rank = ((address >> np.uint64(RANK_BITS)) & np.uint64(0xFF)).astype(np.int64)
    offset = (address & np.uint64((1 << RANK_BITS) - 1)).astype(np.int64)
    cluster = lanes.blocks.cluster
    if (rank > cluster).any():
        raise KernelFault(f"shared memory of block {int(rank.max()) - 1} of a cluster of {cluster}")
    return np.where(rank == 0, lanes.instance, lanes.instance // cluster * cluster + rank - 1), offset
