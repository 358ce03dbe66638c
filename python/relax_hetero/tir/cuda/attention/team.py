"""Warpgroups with the same 64 rows, and parts of the keys and of the columns of values each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import WARP, WARPGROUP
from ...core.builder import Expr, when
from ..core import ptx
from ..core.launch import SharedMemory, local
from ..tile.softmax import as_bits, as_float

_ROWS = 64
_VECTOR = 4
"""Registers of a store to shared memory."""


class Team:
    """Exchange through shared memory of what the members of a team have of the same rows.

    A lane has the same rows in each member, so that it reads what the same lanes of others wrote. Calls of `combine`
    and of `gather` alternate, as each has one barrier, which orders the reads of the other with the next writes.

    Parameters
    ----------
    shared : SharedMemory
        Not yet opened.
    size : int
        Warpgroups of the team, all of the block.
    registers : int
        Registers of a thread that `gather` exchanges, a multiple of 4.
    """

    def __init__(self, shared: SharedMemory, size: int, registers: int) -> None:
        self.shared, self.size, self._registers = shared, size, registers
        self._rows_at = shared.reserve(size * _ROWS * 4)
        self._registers_at = shared.reserve(size * registers * WARPGROUP * 4)

    def locate(self, thread: Expr) -> None:
        """Compute the thread's member, and its place in the warpgroup."""
        self.member = T.bind(tirx.floordiv(thread, WARPGROUP))
        self._place = T.bind(tirx.floormod(thread, WARPGROUP))
        lane = tirx.floormod(thread, WARP)
        self._row = T.bind(tirx.floordiv(self._place, WARP) * 16 + tirx.floordiv(lane, 4))
        self._is_first = T.bind(tirx.floormod(lane, 4) == 0)
        self._words = local(max(self._registers, 2), "uint32")

    def combine(self, values: Any, combine: Callable[[Expr, Expr], Expr]) -> None:
        """Combine both rows' values of a lane over the members; lanes of a row have the same value."""
        for h in range(2):
            with when(self._is_first):
                ptx.store_shared(self._row_address(self.member, h), [as_bits(values[h])])
        ptx.block_barrier()
        for h in range(2):
            for member in range(self.size):
                ptx.load_shared([self._words[h]], self._row_address(member, h))
                value = as_float(self._words[h])
                T.buffer_store(values, value if member == 0 else combine(values[h], value), [h])

    def _row_address(self, member: Expr, h: int) -> Expr:
        return self.shared.at(self._rows_at + (member * _ROWS + self._row + 8 * h) * 4)

    def gather(self, target: Any, own: Any) -> None:
        """Concatenate the registers of all members, in their order."""

        def address(member: Expr, vector: int) -> Expr:
            number = member * (self._registers // _VECTOR) + vector
            return self.shared.at(self._registers_at + (number * WARPGROUP + self._place) * (_VECTOR * 4))

        vectors = range(self._registers // _VECTOR)
        for vector in vectors:
            ptx.store_shared(address(self.member, vector), [own[vector * _VECTOR + i] for i in range(_VECTOR)])
        ptx.block_barrier()
        for member in range(self.size):
            for vector in vectors:
                first = member * self._registers + vector * _VECTOR
                ptx.load_shared([target[first + i] for i in range(_VECTOR)], address(member, vector))
