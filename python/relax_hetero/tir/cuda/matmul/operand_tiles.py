"""How tiles of a product's operands come from global memory to shared memory, in the form that tensor cores read.

A tile of a stage is ``rows`` lines of 128 bytes, the 16-byte chunks of line l moved to ``chunk ^ (l % 8)`` ("swizzle").
A line holds 128 bytes of k of one row; or, of operands of 16 bits whose rows are neighbours in memory, 64 rows of one
k ("columns"), which the tensor cores read transposed.
"""

from __future__ import annotations

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

PRODUCERS = 128
"""Threads that load tiles."""
PACKED_ROWS = 64
"""Rows of a tile of a packed operand."""
_CHUNKS = SWIZZLED_BYTES // CHUNK_BYTES
_GATHERED = 4  # chunks that a thread reads before it stores them


class TileView(Protocol):
    """A parameter that tiles are read from; see `GlobalView`."""

    layout: PackedLayout
    nominal: str
    data: Any

    def address(self, at: Coordinates) -> Expr:
        """Position of an element in `data`."""

    def is_contiguous(self, name: str) -> bool:
        """Return whether the stride along an iteration dimension is known to be 1."""

    def alignment(self, along: str, max_bytes: int) -> int:
        """Alignment in bytes, a power of two up to `max_bytes`, of rows along a contiguous dimension."""


class SwizzledLines:
    """The geometry of a tile whose rows are lines of 128 bytes in shared memory."""

    rows: int
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
        """Lines that the threads copy at a time, a chunk each."""
        return self.threads // _CHUNKS


class Source(Enum):
    """How a tile is read."""

    PACKED = auto()
    """Tiles lie in memory as in shared memory: bulk copies."""
    LINES = auto()
    """k is contiguous, lines are aligned: asynchronous copies."""
    COLUMNS = auto()
    """Rows are neighbours, aligned: asynchronous copies of 64 rows of one k."""
    GATHER = auto()
    """Element by element, through registers: whatever is not aligned, or of a type that is not read transposed."""


class LeftTile(Protocol):
    """Interface of a product's left operand: an `OperandTile`, or the tile of an implicit product."""

    @property
    def view(self) -> TileView:
        """The operand."""

    @property
    def source(self) -> Source:
        """How it is read."""

    @property
    def extent(self) -> Expr:
        """Rows of the operand."""

    @property
    def depth(self) -> Expr:
        """Its k."""

    @property
    def step(self) -> int:
        """The k of a stage."""

    @property
    def size(self) -> int:
        """Bytes of a tile."""

    @property
    def is_transposed(self) -> bool:
        """True if tensor cores read it transposed."""

    @property
    def leading(self) -> int:
        """As of `OperandTile`."""

    @property
    def advance(self) -> int:
        """As of `OperandTile`."""

    def begin(self, at: Coordinates, first: Expr, thread: Expr) -> None:
        """As of `OperandTile`."""

    def load(self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, thread: Expr) -> None:
        """As of `OperandTile`."""


@dataclass(frozen=True)
class OperandTile(SwizzledLines):
    """An operand of a product, and the tiles that a stage holds of it.

    Attributes
    ----------
    view : TileView
        Opened raw.
    side : str
        "m" or "n".
    rows : int
        Number of rows of a tile, along `side`.
    extent, depth : PrimExpr or int
        Extents of `side` and of k.
    source : Source
    width : int
        Bytes of an asynchronous copy.
    threads : int
        Number of threads that load it together.
    evicts_first : bool
        Whether bulk copies leave its bytes as the first to go from the second-level cache.
    """

    view: TileView
    side: str
    rows: int
    extent: Expr
    depth: Expr
    source: Source
    width: int
    threads: int = PRODUCERS
    evicts_first: bool = False

    @staticmethod
    def of(
        view: TileView,
        side: str,
        rows: int,
        extent: Expr,
        depth: Expr,
        threads: int = PRODUCERS,
        may_transpose: bool = True,
    ) -> OperandTile:
        """The tile of an opened view, read in the best way that its storage allows.

        Parameters
        ----------
        may_transpose : bool
            Whether the kernel tells tensor cores of tiles that they are to read transposed.
        """
        source, width = source_of(view, side)
        if source is Source.COLUMNS and (rows % PACKED_ROWS or not may_transpose):
            # Columns come in stripes of so many rows, of which a smaller tile has none.
            source, width = Source.GATHER, 0
        return OperandTile(view, side, rows, extent, depth, source, width, threads)

    @property
    def is_transposed(self) -> bool:
        """True if tensor cores read it transposed."""
        return self.source is Source.COLUMNS

    @property
    def is_swizzled(self) -> bool:
        """True if lines hold 128 bytes of k, swizzled; else there are 16 bytes of k of all rows after each other."""
        return not self.view.layout.inner_dims or self.view.layout.swizzle

    @property
    def leading(self) -> int:
        """Leading offset of its matrix descriptor: 16-byte units from 64 rows (or 16 bytes of k) to the next."""
        if not self.is_swizzled:
            return PACKED_ROWS
        return PACKED_ROWS * SWIZZLED_BYTES // 16 if self.is_transposed else 1

    @property
    def stride(self) -> int:
        """Stride of its matrix descriptor: 16-byte units from 8 rows to the next."""
        return 8 * (SWIZZLED_BYTES if self.is_swizzled else CHUNK_BYTES) // 16

    @property
    def advance(self) -> int:
        """16-byte units from the k of a wgmma to that of the next."""
        if not self.is_swizzled:
            return ptx.CONTRACTION_BYTES // CHUNK_BYTES * PACKED_ROWS
        per_line = ptx.CONTRACTION_BYTES // 16
        return ptx.CONTRACTION_BYTES // self.element * SWIZZLED_BYTES // 16 if self.is_transposed else per_line

    @property
    def blocks(self) -> int:
        """Packed tiles in a tile, each of one bulk copy."""
        return self.rows // PACKED_ROWS

    def begin(self, at: Coordinates, first: Expr, thread: Expr) -> None:
        """Compute values that producers need in all steps of a tile; nothing, where addresses follow from the step."""

    def load_bulk(
        self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, barrier: Expr
    ) -> None:
        """Issue the bulk copies of the tile from row `first` and step `step` of k; one thread does it."""
        for block in range(self.blocks):
            self.load_block(shared, offset, at, (first, block), step, barrier)

    def load_block(
        self,
        shared: SharedMemory,
        offset: Expr,
        at: Coordinates,
        place: tuple[Expr, Expr],
        step: Expr,
        barrier: Expr,
    ) -> None:
        """Issue one bulk copy, by one thread.

        Parameters
        ----------
        place : tuple of PrimExpr
            First row of the tile, and the number of the packed tile in it.
        """
        first, block = place
        skipped = block * PACKED_ROWS
        row = self._existing_block(first + (skipped if isinstance(skipped, int) else T.Cast("int64", skipped)))
        k = T.Cast("int64", step) * self.step
        if not self.is_swizzled and not _divides(self.step, self.depth):
            # The last step begins earlier: the left operand is zero where the step before has been.
            k = T.min(k, int64(self.depth - self.step))
        source = T.address_of(self.view.data[self.view.address({**at, self.side: row, "k": k})])
        size = PACKED_ROWS * SWIZZLED_BYTES
        ptx.bulk_load(shared.at(offset + block * size), source, size, barrier, self.evicts_first)

    def prefetch(self, at: Coordinates, first: Expr, step: Expr, steps: int) -> None:
        """Bring so many steps of k of a packed tile, neighbours in memory, to the second-level cache; by one thread."""
        k = T.Cast("int64", step) * self.step
        source = self.view.address({**at, self.side: self._existing_block(first), "k": k})
        ptx.prefetch_bulk(T.address_of(self.view.data[source]), steps * PACKED_ROWS * SWIZZLED_BYTES)

    def load_packed(
        self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, thread: Expr
    ) -> None:
        """Begin to copy a packed tile by all threads; parameters as of `load`."""
        per_block = PACKED_ROWS * _CHUNKS
        k = T.Cast("int64", step) * self.step
        for i in range(self.rows * _CHUNKS // self.threads):
            block, chunk = divmod(i * self.threads, per_block)
            row = self._existing_block(first + block * PACKED_ROWS)
            begin = self.view.address({**at, self.side: row, "k": k})
            source = begin + T.Cast("int64", thread + chunk) * (CHUNK_BYTES // self.element)
            target = offset + (thread + i * self.threads) * CHUNK_BYTES
            ptx.copy_async(shared.at(target), T.address_of(self.view.data[source]), CHUNK_BYTES)

    def _existing_block(self, row: Expr) -> Expr:
        """The first row of a block of a packed operand, the last's where it does not exist."""
        if self._is_whole_blocks(self.blocks):
            return row
        # A tile that does not exist is a copy of the last: what is made of it is not stored.
        return T.min(row, int64((self.extent - 1) // PACKED_ROWS * PACKED_ROWS))

    def _is_whole_blocks(self, blocks: int) -> bool:
        return isinstance(self.extent, int) and -(-self.extent // PACKED_ROWS) % blocks == 0

    def load(self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, thread: Expr) -> None:
        """Copy, or begin to copy, the tile by all producers; of what is packed nothing.

        Parameters
        ----------
        offset : PrimExpr
            Offset of the tile in shared memory.
        at : Coordinates
            Coordinates of the batch.
        first : PrimExpr
            int64: the first row.
        step : PrimExpr
            int32: which step of k.
        thread : PrimExpr
            Number of the thread among the producers.
        """
        if self.source is Source.LINES:
            self._copy(shared, offset, at, first, step, thread)
        elif self.source is Source.COLUMNS:
            for stripe in range(self.rows // PACKED_ROWS):
                begin = first + stripe * PACKED_ROWS
                self._copy(shared, offset + stripe * PACKED_ROWS * SWIZZLED_BYTES, at, begin, step, thread)
        elif self.source is Source.GATHER:
            self._gather(shared, offset, at, first, step, thread)

    def _copy(self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, thread: Expr) -> None:
        """Copy lines: all rows of the tile, or every k of 64 rows."""
        chunk, line = thread % _CHUNKS, thread // _CHUNKS
        target = offset + line * SWIZZLED_BYTES + T.bitwise_xor(chunk, line % 8) * CHUNK_BYTES
        k = T.Cast("int64", step) * self.step
        along, across = (self.side, "k") if self.is_transposed else ("k", self.side)
        begin = {self.side: first, "k": k}
        ends = {self.side: self.extent, "k": self.depth}
        lines = self.step if self.is_transposed else self.rows
        units = {self.side: self.rows if not self.is_transposed else PACKED_ROWS, "k": self.step}
        for i in range(lines // self.lines):
            position = begin[across] + T.Cast("int64", line + i * self.lines)
            exists = None if _divides(units[across], ends[across]) else position < ends[across]
            for part in range(CHUNK_BYTES // self.width):
                element = begin[along] + T.Cast("int64", chunk * (CHUNK_BYTES // self.element))
                element = element + part * self.width // self.element
                valid: Expr = None
                safe, safe_line = element, position
                if not _divides(units[along], ends[along]):
                    left = T.max(T.min((ends[along] - element) * self.element, int64(self.width)), int64(0))
                    valid = T.Cast("int32", left)
                    safe = T.Select(element < ends[along], element, int64(0))
                if exists is not None:
                    valid = T.Select(exists, self.width if valid is None else valid, 0)
                    # Of no line at all, the first: the address is a valid one, and nothing is read there.
                    last = ends[across] - 1
                    safe_line = T.min(position, int64(last) if isinstance(last, int) else T.max(last, int64(0)))
                source = self.view.address({**at, along: safe, across: safe_line})
                place = shared.at(target + i * self.lines * SWIZZLED_BYTES + part * self.width)
                ptx.copy_async(place, T.address_of(self.view.data[source]), self.width, valid)

    def _gather(
        self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, thread: Expr
    ) -> None:
        per_word, words = 4 // self.element, CHUNK_BYTES // 4
        passes = self.rows * _CHUNKS // self.threads
        group = min(passes, _GATHERED)
        held = local(group * words, "uint32")
        rows_are_neighbours = self.view.is_contiguous(self.side)

        def place(number: Expr) -> tuple[Expr, Expr]:
            """Row and chunk that a thread has in a pass; neighbours read neighbours."""
            if rows_are_neighbours:
                index = thread + number * self.threads
                return index % self.rows, index // self.rows
            return thread // _CHUNKS + number * self.lines, thread % _CHUNKS

        with T.serial(passes // group) as part:
            with unrolled(group) as i:
                row, chunk = place(part * group + i)
                position = first + T.Cast("int64", row)
                exists = None if _divides(self.rows, self.extent) else position < self.extent
                for word in range(words):
                    value: Expr = None
                    for e in range(per_word):
                        k = T.Cast("int64", step) * self.step + T.Cast(
                            "int64", chunk * (words * per_word) + word * per_word + e
                        )
                        inside = None if _divides(self.step, self.depth) else k < self.depth
                        bits = self._guarded({**at, self.side: position, "k": k}, exists, inside)
                        bits = bits if e == 0 else T.shift_left(bits, T.uint32(8 * self.element * e))
                        value = bits if value is None else T.bitwise_or(value, bits)
                    T.buffer_store(held, value, [i * words + word])
            with unrolled(group) as i:
                row, chunk = place(part * group + i)
                swizzled = T.bitwise_xor(chunk, row % 8)
                target = shared.at(offset + row * SWIZZLED_BYTES + swizzled * CHUNK_BYTES)
                ptx.store_shared(target, [held[i * words + word] for word in range(words)])

    def _guarded(self, at: Coordinates, *conditions: Expr) -> Expr:
        """An element as uint32, zero where it does not exist."""
        bits = T.Cast("uint32", self.view.data[self.view.address(at)])
        known = [condition for condition in conditions if condition is not None]
        return T.if_then_else(tirx.all(*known), bits, T.uint32(0)) if known else bits


def _divides(unit: int, extent: Expr) -> bool:
    return isinstance(extent, int) and extent % unit == 0


def source_of(view: TileView, side: str) -> tuple[Source, int]:
    """How the tiles of an opened view are read, and the bytes of a copy."""
    if view.layout.inner_dims:
        return Source.PACKED, CHUNK_BYTES
    if view.is_contiguous("k"):
        width = view.alignment("k", CHUNK_BYTES)
        if width >= 4:
            return Source.LINES, width
    elif view.is_contiguous(side) and bytes_of(view.nominal) == 2:
        width = view.alignment(side, CHUNK_BYTES)
        if width >= 4:
            return Source.COLUMNS, width
    return Source.GATHER, 0
