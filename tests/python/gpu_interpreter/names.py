"""Variables of a kernel get numbers, under which lanes keep their values."""

from __future__ import annotations

from typing import Any


class Names:
    """Slots of variables and buffers; TVM's variables are compared by identity.

    Attributes
    ----------
    written : set of int
        Buffers that are stored to, or whose address is taken.
    aliases : dict of int to int
        Buffers that are views of others.
    cell, global_cell : int
        Bytes of the smallest access of shared memory, and of the smallest by an instruction of global memory.
    cells : dict of int to int
        Bytes of an element of each buffer that is accessed.
    roles : bool
        Whether warps of a block may have different work: each warpgroup runs by itself.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._kept: list[Any] = []
        self.written: set[int] = set()
        self.aliases: dict[int, int] = {}
        self.roles = False
        self.cell = 16
        self.cells: dict[int, int] = {}
        self.global_cell = 16

    def slot(self, var: Any) -> int:
        """The number of a variable, a new one for a new variable."""
        key = hash(var)
        if key not in self._slots:
            self._slots[key] = len(self._kept)
            self._kept.append(var)  # alive, so that no other variable gets its address
        return self._slots[key]

    def accessed(self, size: int) -> None:
        """Record an access to shared memory in units of `size` bytes."""
        self.cell = min(self.cell, size)

    def root(self, slot: int) -> int:
        """The buffer that a view is a view of."""
        while slot in self.aliases:
            slot = self.aliases[slot]
        return slot

    def cell_of(self, slot: int, own: int) -> int:
        """Bytes of the smallest access of the memory of a buffer whose own elements have `own`."""
        views = [size for one, size in self.cells.items() if self.root(one) == slot]
        return min([own, self.global_cell, *views])

    def is_written(self, slot: int) -> bool:
        """True if anything may write the memory of a buffer."""
        return any(self.root(one) == slot for one in self.written)

    def is_buffer(self, var: Any) -> bool:
        """True if a variable is a buffer."""
        return type(var.ty).__name__ == "BufferType"

    def __len__(self) -> int:
        return len(self._kept)
