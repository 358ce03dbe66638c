"""Rows of the left operand of a quantized matrix product as fragments of tensor cores.

A lane has as many neighbouring values of k as it has weights that share a scale. Few rows are kept in shared memory;
more are loaded from global memory (L2). A float32 row is split into three rows of bfloat16, whose sum it is exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import WARP
from ...core.builder import Expr, int64, when
from ...core.view import Coordinates
from ..core import ptx
from ..core.launch import SharedMemory, local
from .block_plan import GROUP_COLUMNS, STEP, BlockWork


class RowSource(Protocol):
    """Interface of the left operand: a `GpuOperand`, or some of its rows."""

    @property
    def data(self) -> Any:
        """Flat view of its elements."""

    def address(self, at: Coordinates) -> Expr:
        """Position of an element, given "m" and "k"."""


class LeftRows:
    """Writer of the loads of a block's left rows.

    Parameters
    ----------
    lhs : RowSource
        Opened raw.
    thread, low, high : PrimExpr
        Index of the thread, of its lane among the four of a column, and of its column among eight.
    first : PrimExpr
        The block's first row.
    copies : bool
        Whether rows in shared memory are loaded by bulk copies.
    """

    def __init__(
        self,
        work: BlockWork,
        lhs: RowSource,
        shared: SharedMemory,
        thread: Expr,
        lanes: tuple[Expr, Expr],
        first: Expr,
        copies: bool = False,
    ) -> None:
        self.copies = copies
        self.work, self.lhs, self.shared, self.thread, self.first = work, lhs, shared, thread, first
        self.low, self.high = lanes
        self.steps = work.chunk // STEP
        self.words = local(work.plan.groups * self.steps * 2, "uint32")
        self.wide = local(4, "uint32")

    def fragment(self, group: int, step: int) -> list[Expr]:
        """Registers of a step of the loaded chunk."""
        return [self.words[(group * self.steps + step) * 2 + i] for i in range(2)]

    def hold(self) -> None:
        """Load the rows into shared memory, each part as a row; a block barrier must follow."""
        work = self.work
        # Lanes without a row load nothing later.
        for i in range(work.plan.groups * self.steps * 2):
            T.buffer_store(self.words, T.uint32(0), [i])
        if self.copies:
            self._copy()
            return
        threads, unit = work.plan.warps * WARP, 8 if work.parts == 1 else 4
        per_row = work.chunks * work.chunk // unit
        items = work.held_rows // work.parts * per_row
        registers = local(4, "uint32")
        with T.serial(tirx.const(-(-items // threads), "int32")) as iteration:
            item = T.bind(iteration * threads + self.thread)
            with T.If(item < items), T.Then():
                row, k = T.bind(tirx.floordiv(item, per_row)), T.bind(tirx.floormod(item, per_row) * unit)
                row_index, k_index = self.first + T.Cast("int64", row), T.Cast("int64", k)
                if work.problem.rounded:
                    self._load_rounded(registers, row_index, k_index, row_index < self._num_rows)
                    self._store_held(registers, row, k, 4)
                elif work.parts == 1:
                    self._load_halves(registers, row_index, k_index, row_index < self._num_rows, 0, unit)
                    self._store_held(registers, row, k, 4)
                else:
                    self._load_wide(row_index, k_index, row_index < self._num_rows)
                    for part in range(work.parts):
                        part_bits = [T.bind(_bfloat16_part(self.wide[i], tirx.const(part, "int32"))) for i in range(4)]
                        for i in range(2):
                            T.buffer_store(registers, (part_bits[2 * i] >> T.uint32(16)) | part_bits[2 * i + 1], [i])
                        self._store_held(registers, row * work.parts + part, k, 2)

    def open_copies(self) -> None:
        """Initialize the mbarrier of bulk copies; a block barrier must precede `hold`."""
        if self.copies:
            with when(self.thread == 0):
                ptx.barrier_init(self._arrived, 1)
                ptx.barrier_init_fence()

    @property
    def _arrived(self) -> Expr:
        return self.shared.at(self.work.arrived_at)

    def _copy(self) -> None:
        """Load the rows by bulk copies, which are in flight together and take no registers."""
        work = self.work
        row_bytes = work.problem.depth * 2
        with when(self.thread == 0):
            ptx.barrier_expect(self._arrived, work.held_rows * row_bytes)
            for row in range(work.held_rows):
                source = T.address_of(self.lhs.data[self.lhs.address({"m": self.first + row, "k": int64(0)})])
                target = self.shared.at(work.held_at + row * work.pitch * 4)
                ptx.bulk_load(target, source, row_bytes, self._arrived)
        ptx.barrier_wait(self._arrived, tirx.const(0, "int32"))

    def _store_held(self, registers: Any, row: Expr, k: Expr, words: int) -> None:
        offset = self.work.held_at + (row * self.work.pitch + tirx.floordiv(k, 2)) * 4
        ptx.store_shared(self.shared.at(offset), [registers[i] for i in range(words)])

    @property
    def _num_rows(self) -> Expr:
        """Number of rows of the left operand."""
        return self.work.m

    @property
    def _first_held(self) -> Expr:
        """First row in shared memory that the warp multiplies."""
        return 0

    @property
    def _rows_of_lanes(self) -> int:
        """Number of rows in shared memory that the warp multiplies."""
        return self.work.held_rows

    def load_held(self, k: Expr, numbers: Sequence[int]) -> None:
        """Load fragments of some scales of a chunk from shared memory."""
        work = self.work
        words = 2 * work.steps  # of a lane
        width = min(4, words)
        for group in range(work.plan.groups):
            row = self.high + group * GROUP_COLUMNS
            with T.If(row < self._rows_of_lanes), T.Then():
                for number in numbers:
                    in_row = T.Cast("int32", tirx.floordiv(k, 2)) + (number * 4 + self.low) * words
                    first = (self._first_held + row) * work.pitch + in_row
                    for i in range(0, words, width):
                        begin = group * self.steps * 2 + number * words + i
                        targets = [self.words[begin + j] for j in range(width)]
                        ptx.load_shared(targets, self.shared.at(work.held_at + (first + i) * 4))

    def load(self, k: Expr) -> None:
        """Load fragments of a chunk from global memory."""
        work = self.work
        run = 4 * work.steps
        for group in range(work.plan.groups):
            row = self.first + (group * GROUP_COLUMNS + self.high)
            in_group = None
            if work.parts > 1:
                per = GROUP_COLUMNS // work.parts
                row = self.first + (group * per + tirx.floordiv(self.high, work.parts))
                in_group = self.high < per * work.parts
            row = T.bind(row)
            exists = row < work.m if in_group is None else tirx.all(row < work.m, in_group)
            for number in range(work.scaled):
                at = T.bind(k + (number * 4 * run + self.low * run))
                begin = (group * self.steps + number * work.steps) * 2
                if work.parts == 1:
                    self._load_halves(self.words, row, at, exists, begin, run)
                else:
                    self._load_parts(row, at, exists, begin, run)

    def _runs(self, at: Expr, exists: Expr, run: int, max_width: int) -> list[tuple[int, int, Expr]]:
        """Offset, width and predicate of each access to `run` neighbours from k on."""
        k, width = self.work.problem.depth, max_width
        while k % width:
            width //= 2
        runs = []
        for offset in range(0, run, width):
            inside = exists if k % self.work.chunk == 0 else tirx.all(exists, at + offset < k)
            runs.append((offset, width, inside))
        return runs

    def _load_halves(self, target: Expr, row: Expr, at: Expr, exists: Expr, begin: int, run: int) -> None:
        for i in range(run // 2):
            T.buffer_store(target, T.uint32(0), [begin + i])
        for offset, width, inside in self._runs(at, exists, run, min(8, run)):
            address = T.address_of(self.lhs.data[self.lhs.address({"m": row, "k": at + offset})])
            with T.If(inside), T.Then():
                word = begin + offset // 2
                if width > 1:
                    targets = [target[word + i] for i in range(width // 2)]
                    ptx.load_global(targets, address, is_constant=False)
                else:
                    halfword = local(1, "uint16")
                    ptx.load_global([halfword[0]], address, "u16", is_constant=False)
                    value = T.cast(halfword[0], "uint32") << T.uint32(16 * (offset % 2))
                    T.buffer_store(target, target[word] | value, [word])

    def _load_rounded(self, target: Expr, row: Expr, at: Expr, exists: Expr) -> None:
        """Load eight float32 values and round them to pairs of 16 bits."""
        for half in range(2):
            self._load_wide(row, at + 4 * half, exists)
            for i in range(2):
                low, high = (T.reinterpret("float32", self.wide[2 * i + j]) for j in range(2))
                ptx.pack_pair(target[2 * half + i], low, high, self.work.type)

    def _load_parts(self, row: Expr, at: Expr, exists: Expr, begin: int, run: int) -> None:
        part = tirx.floormod(self.high, self.work.parts)
        for offset in range(0, run, 4):
            self._load_wide(row, at + offset, exists)
            parts = [T.bind(_bfloat16_part(self.wide[i], part)) for i in range(4)]
            for i in range(2):
                pair = (parts[2 * i] >> T.uint32(16)) | parts[2 * i + 1]
                T.buffer_store(self.words, pair, [begin + offset // 2 + i])

    def _load_wide(self, row: Expr, at: Expr, exists: Expr) -> None:
        """Load four float32 values."""
        for i in range(4):
            T.buffer_store(self.wide, T.uint32(0), [i])
        for inner, width, inside in self._runs(at, exists, 4, 4):
            position = {"m": row, "k": at + inner}
            with T.If(inside), T.Then():
                address = T.address_of(self.lhs.data[self.lhs.address(position)])
                ptx.load_global([self.wide[inner + i] for i in range(width)], address, is_constant=False)


def _bfloat16_part(bits: Expr, part: Expr) -> Expr:
    """One of three bfloat16 whose sum a float32 is, in the upper half of a word; infinity is preserved."""
    mask = T.uint32(0xFFFF0000)

    def remainder(value: Expr) -> Expr:
        upper = T.reinterpret("float32", value & mask)
        full = T.reinterpret("float32", value)
        return T.reinterpret("uint32", T.Select(tirx.EQ(value & mask, value), T.float32(0), full - upper))

    second = T.bind(remainder(bits))
    third = T.bind(remainder(second))
    selected = T.Select(tirx.EQ(part, 0), bits, T.Select(tirx.EQ(part, 1), second, third))
    return selected & mask
