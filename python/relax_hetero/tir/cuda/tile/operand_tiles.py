"""Copies of operand tiles from global to shared memory, in the layout that tensor cores read.

A tile of a stage is ``rows`` lines of 128 bytes, in which 16-byte chunks of line l are swizzled to ``chunk ^ (l % 8)``.
A line holds 128 bytes of k of one row; or, for m-major (n-major) operands of 16 bits, 64 rows of one k, which tensor
cores read transposed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES, PackedLayout
from ....target.element_types import bytes_of
from ...core.builder import Expr, int64
from ...core.view import Coordinates
from ..core import ptx
from ..core.launch import SharedMemory, local, unrolled
from ..core.operand import divides

PRODUCERS = 128  # producer threads
PACKED_ROWS = 64  # rows of a tile of a packed operand
_CHUNKS = SWIZZLED_BYTES // CHUNK_BYTES
_GATHERS_IN_FLIGHT = 4  # chunks that a thread loads before it stores them
MIN_LINE_ALIGNMENT = 4  # bytes of the smallest asynchronous copy: lines with less alignment are gathered


class TileView(Protocol):
    """Interface of a parameter from which tiles are read; see `GlobalView`."""

    layout: PackedLayout
    nominal: str
    data: Any

    def address(self, at: Coordinates) -> Expr:
        """Offset of an element in `data`."""

    def is_contiguous(self, name: str) -> bool:
        """Return whether the stride along an iteration dimension is known to be 1."""

    def alignment(self, along: str, max_bytes: int) -> int:
        """Alignment in bytes, a power of two up to `max_bytes`, of rows along a contiguous dimension."""


class Source(Enum):
    """Method of loading a tile."""

    PACKED = auto()  # bulk copies of tiles packed in the layout of shared memory
    LINES = auto()  # asynchronous copies of aligned lines, with contiguous k
    COLUMNS = auto()  # asynchronous copies of 64 contiguous, aligned rows of one k
    GATHER = auto()
    """Element by element through registers: unaligned operands, and types that cannot be read transposed."""


class StageTile(ABC):
    """An operand of a product and its tile in a stage: lines of 128 bytes in shared memory.

    Attributes
    ----------
    view : TileView
        Opened raw.
    rows : int
        Rows of a tile.
    extent, depth : PrimExpr or int
        Rows of the operand, and extent of k.
    threads : int
        Number of producer threads.
    """

    rows: int
    extent: Expr
    depth: Expr
    source: Source
    threads: int
    if TYPE_CHECKING:

        @property
        def view(self) -> TileView:
            """The operand."""

    @property
    def element(self) -> int:
        """Bytes of an element."""
        return bytes_of(self.view.nominal)

    @property
    def step(self) -> int:
        """The k of a stage."""
        return SWIZZLED_BYTES // self.element

    @property
    def size(self) -> int:
        """Bytes of a tile."""
        return self.rows * SWIZZLED_BYTES

    @property
    def lines(self) -> int:
        """Lines that the threads copy at a time, a chunk per thread."""
        return self.threads // _CHUNKS

    @property
    def is_transposed(self) -> bool:
        """True if tensor cores read it transposed."""
        return False

    @property
    def leading(self) -> int:
        """Leading dimension offset of the matrix descriptor: 16-byte units between 64 rows (or 16 bytes of k)."""
        return 1

    @property
    def advance(self) -> int:
        """16-byte units by which the descriptor advances to the k of the next wgmma."""
        return ptx.CONTRACTION_BYTES // 16

    @abstractmethod
    def begin(self, at: Coordinates, first: Expr, thread: Expr) -> None:
        """Compute values that producers need in all k-steps of a tile."""

    @abstractmethod
    def load(
        self,
        shared: SharedMemory,
        offset: Expr,  # offset of the tile in shared memory
        at: Coordinates,  # coordinates of the batch
        first: Expr,  # first row, int64
        step: Expr,  # number of the k-step, int32
        thread: Expr,  # index of the thread among the producers
    ) -> None:
        """Copy the tile by all producers, asynchronously if possible; packed tiles are left to `load_bulk`."""


@dataclass(frozen=True)
class OperandTile(StageTile):
    """An operand in memory and its tile in a stage; other attributes are those of `StageTile`."""

    view: TileView
    row_dim: str  # dimension of its rows, "m" or "n"
    rows: int
    extent: Expr
    depth: Expr
    source: Source
    width: int  # bytes of an asynchronous copy
    threads: int = PRODUCERS
    evicts_first: bool = False  # whether bulk copies have L2 evict their bytes first

    @staticmethod
    def of(
        view: TileView,
        row_dim: str,
        rows: int,
        extent: Expr,
        depth: Expr,
        threads: int = PRODUCERS,
        may_transpose: bool = True,  # whether the kernel supports transposed tiles
    ) -> OperandTile:
        """Tile of an opened view, with the best method of loading that its storage allows."""
        source, width = source_of(view, row_dim)
        if source is Source.COLUMNS and (rows % PACKED_ROWS or not may_transpose):
            # Transposed tiles consist of stripes of 64 rows.
            source, width = Source.GATHER, 0
        return OperandTile(view, row_dim, rows, extent, depth, source, width, threads)

    @property
    def is_transposed(self) -> bool:
        """True if tensor cores read it transposed."""
        return self.source is Source.COLUMNS

    @property
    def is_swizzled(self) -> bool:
        """True if lines hold 128 swizzled bytes of k; else 16 bytes of k of all rows are contiguous."""
        return not self.view.layout.inner_dims or self.view.layout.swizzle

    @property
    def leading(self) -> int:
        """Leading dimension offset of the matrix descriptor: 16-byte units between 64 rows (or 16 bytes of k)."""
        if not self.is_swizzled:
            return PACKED_ROWS
        return PACKED_ROWS * SWIZZLED_BYTES // 16 if self.is_transposed else 1

    @property
    def step_bytes(self) -> int:
        """Bytes of a line in a k-step: 128, or those of a shorter k that is stored in chunks."""
        is_short = not self.is_swizzled and isinstance(self.depth, int)
        return min(SWIZZLED_BYTES, self.depth * self.element) if is_short else SWIZZLED_BYTES

    @property
    def size(self) -> int:
        """Bytes of a tile."""
        return self.rows * self.step_bytes

    @property
    def stride(self) -> int:
        """Stride dimension offset of the matrix descriptor: 16-byte units between groups of 8 rows."""
        return 8 * (SWIZZLED_BYTES if self.is_swizzled else CHUNK_BYTES) // 16

    @property
    def advance(self) -> int:
        """16-byte units by which the descriptor advances to the k of the next wgmma."""
        if not self.is_swizzled:
            return ptx.CONTRACTION_BYTES // CHUNK_BYTES * PACKED_ROWS
        return ptx.CONTRACTION_BYTES // self.element * SWIZZLED_BYTES // 16 if self.is_transposed else super().advance

    @property
    def blocks(self) -> int:
        """Packed tiles of 64 rows in a tile, each copied by one bulk copy."""
        return self.rows // PACKED_ROWS

    def begin(self, at: Coordinates, first: Expr, thread: Expr) -> None:
        """Compute nothing, as addresses follow from the step."""

    def load_bulk(
        self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, barrier: Expr
    ) -> None:
        """Issue the bulk copies of the tile at row `first` and k-step `step`, by one thread."""
        for block in range(self.blocks):
            self.load_block(shared, offset, at, (first, block), step, barrier)

    def load_block(
        self,
        shared: SharedMemory,
        offset: Expr,
        at: Coordinates,
        place: tuple[Expr, Expr],  # first row of the tile, and index of the packed tile in it
        step: Expr,
        barrier: Expr,
    ) -> None:
        """Issue the bulk copy of a packed tile, by one thread."""
        first, block = place
        skip = block * PACKED_ROWS
        row = self._clamp_block(first + (skip if isinstance(skip, int) else T.Cast("int64", skip)))
        k = T.Cast("int64", step) * self.step
        if not self.is_swizzled and self.step_bytes == SWIZZLED_BYTES and not divides(self.depth, self.step):
            # An incomplete last step begins earlier: the left operand is zero where it overlaps the step before.
            k = T.min(k, int64(self.depth - self.step))
        source = T.address_of(self.view.data[self.view.address({**at, self.row_dim: row, "k": k})])
        size = PACKED_ROWS * self.step_bytes
        ptx.bulk_load(shared.at(offset + block * size), source, size, barrier, self.evicts_first)

    def prefetch(self, at: Coordinates, first: Expr, step: Expr, steps: int) -> None:
        """Prefetch `steps` k-steps of a packed tile, contiguous in memory, into L2, by one thread."""
        k = T.Cast("int64", step) * self.step
        source = self.view.address({**at, self.row_dim: self._clamp_block(first), "k": k})
        ptx.prefetch_bulk(T.address_of(self.view.data[source]), steps * PACKED_ROWS * SWIZZLED_BYTES)

    def load_packed(
        self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, thread: Expr
    ) -> None:
        """Issue asynchronous copies of a packed tile by all threads; parameters as in `load`."""
        per_block = PACKED_ROWS * _CHUNKS
        k = T.Cast("int64", step) * self.step
        for i in range(self.rows * _CHUNKS // self.threads):
            block, chunk = divmod(i * self.threads, per_block)
            row = self._clamp_block(first + block * PACKED_ROWS)
            begin = self.view.address({**at, self.row_dim: row, "k": k})
            source = begin + T.Cast("int64", thread + chunk) * (CHUNK_BYTES // self.element)
            target = offset + (thread + i * self.threads) * CHUNK_BYTES
            ptx.copy_async(shared.at(target), T.address_of(self.view.data[source]), CHUNK_BYTES)

    def _clamp_block(self, row: Expr) -> Expr:
        """Clamp the first row of a packed tile to the last existing one."""
        if isinstance(self.extent, int) and -(-self.extent // PACKED_ROWS) % self.blocks == 0:
            return row
        # Results of tiles beyond the extent are not stored.
        return T.min(row, int64((self.extent - 1) // PACKED_ROWS * PACKED_ROWS))

    def load(self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, thread: Expr) -> None:
        """Copy the tile; parameters as in `StageTile.load`."""
        if self.source is Source.LINES:
            self._copy(shared, offset, at, first, step, thread)
        elif self.source is Source.COLUMNS:
            for stripe in range(self.rows // PACKED_ROWS):
                begin = first + stripe * PACKED_ROWS
                self._copy(shared, offset + stripe * PACKED_ROWS * SWIZZLED_BYTES, at, begin, step, thread)
        elif self.source is Source.GATHER:
            self._gather(shared, offset, at, first, step, thread)

    def _copy(self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, thread: Expr) -> None:
        """Copy lines asynchronously: all rows of the tile, or all k of 64 rows."""
        chunk, line = thread % _CHUNKS, thread // _CHUNKS
        target = offset + line * SWIZZLED_BYTES + T.bitwise_xor(chunk, line % 8) * CHUNK_BYTES
        k = T.Cast("int64", step) * self.step
        along, across = (self.row_dim, "k") if self.is_transposed else ("k", self.row_dim)
        begin = {self.row_dim: first, "k": k}
        ends = {self.row_dim: self.extent, "k": self.depth}
        lines = self.step if self.is_transposed else self.rows
        units = {self.row_dim: self.rows if not self.is_transposed else PACKED_ROWS, "k": self.step}
        for i in range(lines // self.lines):
            position = begin[across] + T.Cast("int64", line + i * self.lines)
            is_line = None if divides(ends[across], units[across]) else position < ends[across]
            for copy in range(CHUNK_BYTES // self.width):
                element = begin[along] + T.Cast("int64", chunk * (CHUNK_BYTES // self.element))
                element = element + copy * self.width // self.element
                valid_bytes: Expr = None
                clamped_element, clamped_line = element, position
                if not divides(ends[along], units[along]):
                    bytes_left = T.max(T.min((ends[along] - element) * self.element, int64(self.width)), int64(0))
                    valid_bytes = T.Cast("int32", bytes_left)
                    clamped_element = T.Select(element < ends[along], element, int64(0))
                if is_line is not None:
                    valid_bytes = T.Select(is_line, self.width if valid_bytes is None else valid_bytes, 0)
                    # The address must be valid even where nothing is read.
                    last = ends[across] - 1
                    clamped_line = T.min(position, int64(last) if isinstance(last, int) else T.max(last, int64(0)))
                source = self.view.address({**at, along: clamped_element, across: clamped_line})
                place = shared.at(target + i * self.lines * SWIZZLED_BYTES + copy * self.width)
                ptx.copy_async(place, T.address_of(self.view.data[source]), self.width, valid_bytes)

    def _gather(
        self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, thread: Expr
    ) -> None:
        per_word, words = 4 // self.element, CHUNK_BYTES // 4
        passes = self.rows * _CHUNKS // self.threads
        group = min(passes, _GATHERS_IN_FLIGHT)
        registers = local(group * words, "uint32")
        rows_are_neighbours = self.view.is_contiguous(self.row_dim)

        def row_and_chunk(number: Expr) -> tuple[Expr, Expr]:
            """Row and chunk of a thread in a pass, such that loads are coalesced."""
            if rows_are_neighbours:
                index = thread + number * self.threads
                return index % self.rows, index // self.rows
            return thread // _CHUNKS + number * self.lines, thread % _CHUNKS

        with T.serial(passes // group) as batch:
            with unrolled(group) as i:
                row, chunk = row_and_chunk(batch * group + i)
                position = first + T.Cast("int64", row)
                is_row = None if divides(self.extent, self.rows) else position < self.extent
                for word in range(words):
                    value: Expr = None
                    for e in range(per_word):
                        k = T.Cast("int64", step) * self.step + T.Cast(
                            "int64", chunk * (words * per_word) + word * per_word + e
                        )
                        in_k = None if divides(self.depth, self.step) else k < self.depth
                        bits = self._load_guarded({**at, self.row_dim: position, "k": k}, is_row, in_k)
                        bits = bits if e == 0 else T.shift_left(bits, T.uint32(8 * self.element * e))
                        value = bits if value is None else T.bitwise_or(value, bits)
                    T.buffer_store(registers, value, [i * words + word])
            with unrolled(group) as i:
                row, chunk = row_and_chunk(batch * group + i)
                swizzled = T.bitwise_xor(chunk, row % 8)
                target = shared.at(offset + row * SWIZZLED_BYTES + swizzled * CHUNK_BYTES)
                ptx.store_shared(target, [registers[i * words + word] for word in range(words)])

    def _load_guarded(self, at: Coordinates, *conditions: Expr) -> Expr:
        """Load an element as uint32, zero if its predicates are false."""
        bits = T.Cast("uint32", self.view.data[self.view.address(at)])
        predicates = [condition for condition in conditions if condition is not None]
        return T.if_then_else(tirx.all(*predicates), bits, T.uint32(0)) if predicates else bits


def source_of(view: TileView, row_dim: str) -> tuple[Source, int]:
    """Method of loading the tiles of an opened view, and the bytes of a copy."""
    if view.layout.inner_dims:
        return Source.PACKED, CHUNK_BYTES
    if view.is_contiguous("k"):
        width = view.alignment("k", CHUNK_BYTES)
        if width >= MIN_LINE_ALIGNMENT:
            return Source.LINES, width
    elif view.is_contiguous(row_dim) and bytes_of(view.nominal) == 2:
        width = view.alignment(row_dim, CHUNK_BYTES)
        if width >= MIN_LINE_ALIGNMENT:
            return Source.COLUMNS, width
    return Source.GATHER, 0


def arrive(barrier: Expr, is_gathered: bool) -> None:
    """Arrive at a full barrier when the thread's copies of `StageTile.load` are complete."""
    if is_gathered:
        ptx.async_proxy_fence()
        ptx.barrier_arrive(barrier)
    else:
        ptx.barrier_arrive_after_copies(barrier)
