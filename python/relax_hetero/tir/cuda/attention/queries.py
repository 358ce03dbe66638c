"""A block's rows of queries in shared memory: copies of dense queries, or heads that are normalized and rotated."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES
from ....target.gpu_target import WARP
from ...core.builder import Expr, ceil_div
from ..core import ptx
from ..core.launch import SWIZZLED_ALIGN, SharedMemory
from ..tile.operand_tiles import OperandTile
from ..tile.shared_tile import ChunkedTile, MatrixOperand, SharedTile, SwizzledTile
from .attention_plan import WARP_ROWS
from .attention_tensors import DenseTensors, PagedTensors, in_tile
from .head_vector import HeadVector, Store

_ROWS_IN_FLIGHT = 4
"""Query rows that a warp loads at a time."""


class QueryTile(ABC):
    """Queries of the rows of a block; results are staged in their memory, in stripes of 64 columns.

    Attributes
    ----------
    offset : int
        Offset in shared memory.
    """

    offset: int

    def __init__(self, shared: SharedMemory, rows: int) -> None:
        self.shared, self.rows = shared, rows

    @abstractmethod
    def load(self, thread: Expr) -> None:
        """Load the queries."""

    @abstractmethod
    def tile(self) -> SharedTile:
        """Tile of all rows."""

    @abstractmethod
    def matrix(self, row: Expr) -> MatrixOperand:
        """Operand of wgmma: 64 rows from `row` on."""

    def staging(self, row: Expr) -> SwizzledTile:
        """Tile in which the results of a warp's rows from `row` on are staged."""
        offset = T.bind(self.offset + row * SWIZZLED_BYTES)
        return SwizzledTile(self.shared, offset, self.rows * SWIZZLED_BYTES)


class DenseQueries(QueryTile):
    """Queries of a tensor, copied by `threads` threads."""

    def __init__(self, tensors: DenseTensors, shared: SharedMemory, threads: int, may_transpose: bool) -> None:
        super().__init__(shared, tensors.plan.rows)
        self.tensors, d, e = tensors, int(tensors.sizes["d"]), int(tensors.sizes["e"])
        count = tensors.rows.count
        self.operand = OperandTile.of(tensors.query, "row", self.rows, count, d, threads, may_transpose)
        self.steps = ceil_div(d, self.operand.step)
        size = self.operand.size * max(self.steps, ceil_div(e, self.operand.step))
        self.offset = shared.reserve(size, SWIZZLED_ALIGN)

    def load(self, thread: Expr) -> None:
        """Issue the copies of the queries, and commit them with all copies of the thread so far."""
        row = T.bind(T.Cast("int64", self.tensors.row))
        for step in range(self.steps):
            target = self.offset + step * self.operand.size
            self.operand.load(self.shared, target, self.tensors.at, row, step, thread)
        ptx.copy_commit()

    def tile(self) -> SharedTile:
        """Tile of all rows."""
        return SwizzledTile(self.shared, self.offset, self.operand.size)

    def matrix(self, row: Expr) -> MatrixOperand:
        """Operand of wgmma: 64 rows from `row` on."""
        return MatrixOperand.of(self.shared, self.offset + row * SWIZZLED_BYTES, self.operand)


class PagedQueries(QueryTile):
    """Heads of the projection, which each warp normalizes and rotates for some of the rows.

    Parameters
    ----------
    warps : int
        Warps that load the queries; 0: one for every 16 rows.
    for_wgmma : bool
        Whether wgmma reads the queries, by the async proxy.
    """

    def __init__(self, tensors: PagedTensors, shared: SharedMemory, warps: int = 0, for_wgmma: bool = False) -> None:
        super().__init__(shared, tensors.plan.rows)
        self.tensors, self.for_wgmma, self.warps = tensors, for_wgmma, warps or self.rows // WARP_ROWS
        row_bytes = ceil_div(tensors.problem.size * 2, SWIZZLED_BYTES) * SWIZZLED_BYTES
        self.offset = shared.reserve(self.rows * row_bytes, SWIZZLED_BYTES)

    def load(self, thread: Expr) -> None:
        """Prepare the warp's rows, several at a time, and wait for all warps; rows beyond the chunk are clamped."""
        warp_rows = self.rows // self.warps
        tensors, lane, warp = self.tensors, T.bind(tirx.floormod(thread, WARP)), T.bind(tirx.floordiv(thread, WARP))
        vectors = [HeadVector(tensors, lane) for _ in range(_ROWS_IN_FLIGHT)]
        with T.serial(warp_rows // len(vectors)) as iteration:
            rows = [T.bind(warp * warp_rows + iteration * len(vectors) + i) for i in range(len(vectors))]
            for vector, row in zip(vectors, rows, strict=True):
                vector.load(T.bind(T.min(tensors.row + row, tensors.num_rows - 1)), tensors.at["group"], "query")
            for vector, row in zip(vectors, rows, strict=True):
                vector.finish("query", self.store_to(row))
        if self.for_wgmma:
            ptx.async_proxy_fence()
        ptx.block_barrier()

    def store_to(self, row: Expr) -> Store:
        """Function that stores the elements of a row."""

        def store(element: Expr, bits: Expr) -> None:
            ptx.store_shared(self.shared.at(self.offset + in_tile(element, row, self.rows) * 2), [bits], "u16")

        return store

    def tile(self) -> SharedTile:
        """Tile of all rows."""
        return ChunkedTile(self.shared, self.offset, self.rows)

    def matrix(self, row: Expr) -> MatrixOperand:
        """Operand of wgmma: 64 rows from `row` on."""
        begin, height = self.offset + row * CHUNK_BYTES, self.rows
        return MatrixOperand(self.shared, begin, height, lambda step: step * 2 * height, 8, is_swizzled=False)
