"""Epilogue of attention: normalizes a warp's accumulator fragments of 16 rows, and stores them."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES
from ....target.element_types import bytes_of
from ....target.gpu_target import WARP
from ...core.builder import Expr, ceil_div, when
from ...core.view import Coordinates
from ..core import ptx
from ..core.launch import SharedMemory, local, to_int32, unrolled
from ..tile.register_tile import RegisterTile, column_of, first_column, row_of
from ..tile.shared_tile import SwizzledTile
from .score_tile import ScoreTile


class RowStore:
    """Writer of stores of one group of heads.

    Parameters
    ----------
    tile : ScoreTile
        Its softmax is complete.
    at : Coordinates
        Batch and group.
    """

    def __init__(self, tile: ScoreTile, shared: SharedMemory, at: Coordinates) -> None:
        self.tile, self.shared, self.at, self.result = tile, shared, at, tile.tensors.result
        self.rows, self.width = to_int32(tile.rows.count), int(tile.tensors.sizes["e"])

    def emit(self, sums: RegisterTile, row: Expr, staging: Expr, stripe: int) -> None:
        """Normalize and store a warp's rows.

        Parameters
        ----------
        sums : RegisterTile
            Weighted sums of values.
        row : PrimExpr
            The warp's first row, int32.
        staging : PrimExpr
            Offset of the warp's 16 lines of 128 bytes of shared memory, in each stripe of 64 columns.
        stripe : int
            Bytes between stripes.
        """
        tile = self.tile
        tile.average(sums)
        result = self.result
        is_whole = self.width % 8 == 0 and bytes_of(result.nominal) == 2
        if is_whole and result.is_contiguous("k") and result.alignment("k", CHUNK_BYTES) == CHUNK_BYTES:
            self._store_chunks(sums, row, SwizzledTile(self.shared, T.bind(staging), stripe))
            return
        with unrolled(sums.columns // 2) as i:
            column = column_of(i) + first_column(tile.lane)
            own_row = row + tirx.floordiv(tile.lane, 4) + row_of(i) * 8
            with when(tirx.all(column < self.width, own_row < self.rows)):
                self.store_element(own_row, column, sums[i])

    def store_element(self, row: Expr, column: Expr, value: Expr) -> None:
        """Store one element."""
        at = {**self.at, "row": T.Cast("int64", row), "k": T.Cast("int64", column)}
        T.buffer_store(self.result.data, T.Cast(self.result.nominal, value), [self.result.address(at)])

    def _store_chunks(self, sums: RegisterTile, first: Expr, staging: SwizzledTile) -> None:
        """Store rows in chunks of 16 bytes, staged in shared memory."""
        result, lane, chunks = self.result, self.tile.lane, self.width // 8
        pair = local(1, "uint32")
        own_row, within = T.bind(tirx.floordiv(lane, 4)), T.bind(tirx.floormod(lane, 4) * 4)
        for i in range(2 * chunks):
            ptx.pack_pair(pair[0], sums[2 * i], sums[2 * i + 1], result.nominal)
            ptx.store_shared(self.shared.at(staging.address(own_row + i % 2 * 8, i // 2) + within), [pair[0]])
        ptx.warp_barrier()
        registers = local(4, "uint32")
        with T.serial(ceil_div(16 * chunks, WARP)) as iteration:
            item = T.bind(iteration * WARP + lane)
            row, chunk = T.bind(T.truncdiv(item, chunks)), T.bind(T.truncmod(item, chunks))
            result_row = T.bind(first + row)
            with when(tirx.all(row < 16, result_row < self.rows)):
                ptx.load_shared([registers[i] for i in range(4)], self.shared.at(staging.address(row, chunk)))
                at = {**self.at, "row": T.Cast("int64", result_row), "k": T.Cast("int64", chunk * 8)}
                ptx.store_global(T.address_of(result.data[result.address(at)]), [registers[i] for i in range(4)])
