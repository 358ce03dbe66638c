"""Epilogues of attention: normalized rows of a warp, and partial results of splits of the keys."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES
from ....target.element_types import bytes_of
from ....target.gpu_target import WARP
from ...core.builder import Expr, ceil_div, when
from ..core import ptx
from ..core.launch import SharedMemory, local, to_int32, unrolled
from ..tile.register_tile import column_of, first_column, row_of
from ..tile.shared_tile import SwizzledTile
from ..tile.softmax import as_bits
from .attention_tensors import AttentionTensors
from .score_tile import ScoreTile

_PAD_FLOATS = 4
"""Floats between lines of accumulators, to avoid bank conflicts."""


class RowStore:
    """Writer of results, after the softmax is complete.

    Parameters
    ----------
    tensors : AttentionTensors
    shared : SharedMemory
    """

    def __init__(self, tensors: AttentionTensors, shared: SharedMemory) -> None:
        self.tensors, self.shared, self.result = tensors, shared, tensors.result
        self.rows, self.width = to_int32(tensors.rows.count), int(tensors.sizes["e"])

    def _address(self, row: Expr, column: Expr) -> Expr:
        at = {**self.tensors.at, "row": T.Cast("int64", row), "k": T.Cast("int64", column)}
        return self.result.address(at)

    def _stores_runs(self, elements: int) -> bool:
        """Return whether runs of 16-bit elements are aligned and contiguous."""
        size, is_half = 2 * elements, bytes_of(self.result.nominal) == 2
        is_whole = self.width % elements == 0 and is_half and self.result.is_contiguous("k")
        return is_whole and self.result.alignment("k", size) == size

    def store_tile(self, tile: ScoreTile, row: Expr, staging: SwizzledTile) -> None:
        """Normalize and store a warp's rows.

        Parameters
        ----------
        row : PrimExpr
            The warp's first row, int32.
        staging : SwizzledTile
            The warp's 16 lines of shared memory.
        """
        tile.average()
        if self._stores_runs(CHUNK_BYTES // 2):
            self._store_chunks(tile, row, staging)
            return
        with unrolled(tile.sums.columns // 2) as i:
            column = column_of(i) + first_column(tile.lane)
            own_row = row + tirx.floordiv(tile.lane, 4) + row_of(i) * 8
            with when(tirx.all(column < self.width, own_row < self.rows)):
                self._store_element(own_row, column, tile.sums[i])

    def store_quad(self, total: Any, row: Expr, column: Expr) -> None:
        """Store four float32 registers, columns of a row."""
        if self._stores_runs(4):
            pairs = local(2, "uint32")
            for pair in range(2):
                ptx.pack_pair(pairs[pair], total[2 * pair], total[2 * pair + 1], self.result.nominal)
            ptx.store_global(T.address_of(self.result.data[self._address(row, column)]), [pairs[0], pairs[1]])
            return
        for i in range(4):
            with when(True if self.width % 4 == 0 else column + i < self.width):
                self._store_element(row, column + i, total[i])

    def _store_element(self, row: Expr, column: Expr, value: Expr) -> None:
        T.buffer_store(self.result.data, T.Cast(self.result.nominal, value), [self._address(row, column)])

    def _store_chunks(self, tile: ScoreTile, first: Expr, staging: SwizzledTile) -> None:
        """Store rows in chunks of 16 bytes, staged in shared memory."""
        sums, lane, chunks = tile.sums, tile.lane, self.width // 8
        pair = local(1, "uint32")
        own_row, within = T.bind(tirx.floordiv(lane, 4)), T.bind(tirx.floormod(lane, 4) * 4)
        for i in range(2 * chunks):
            ptx.pack_pair(pair[0], sums[2 * i], sums[2 * i + 1], self.result.nominal)
            ptx.store_shared(self.shared.at(staging.address(own_row + i % 2 * 8, i // 2) + within), [pair[0]])
        ptx.warp_barrier()
        registers = local(4, "uint32")
        with T.serial(ceil_div(16 * chunks, WARP)) as iteration:
            item = T.bind(iteration * WARP + lane)
            row, chunk = T.bind(T.truncdiv(item, chunks)), T.bind(T.truncmod(item, chunks))
            result_row = T.bind(first + row)
            with when(tirx.all(row < 16, result_row < self.rows)):
                ptx.load_shared([registers[i] for i in range(4)], self.shared.at(staging.address(row, chunk)))
                target = T.address_of(self.result.data[self._address(result_row, chunk * 8)])
                ptx.store_global(target, [registers[i] for i in range(4)])


class PartialResults:
    """Accumulators and softmax statistics of splits of the keys in shared memory: lines of float32, then pairs.

    Parameters
    ----------
    shared : SharedMemory
    offset, lines, width : int
        Offset in shared memory; number of lines, and their columns, a multiple of 8.
    """

    def __init__(self, shared: SharedMemory, offset: int, lines: int, width: int) -> None:
        self.shared, self.offset, self.width = shared, offset, width
        self._pitch = (width + _PAD_FLOATS) * 4
        self._stats = offset + lines * self._pitch
        self.size = lines * (self._pitch + 8)

    def addresses(self, line: Expr, column: Expr) -> tuple[Expr, Expr]:
        """Offsets of a line's maximum and sum, and of its accumulators from a column on."""
        return self._stats + line * 8, self.offset + line * self._pitch + column * 4

    def put(self, tile: ScoreTile, h: int, line: Expr) -> None:
        """Store the first (`h` is 0) or second row of each lane to a line."""
        first = T.bind(first_column(tile.lane))
        with unrolled(tile.sums.columns // 8) as block:
            target = self.addresses(line, block * 8 + first)[1]
            ptx.store_shared(self.shared.at(target), [as_bits(tile.sums[block * 4 + 2 * h + c]) for c in range(2)])
        with when(first == 0):
            stats = [as_bits(tile.softmax.row_max[h]), as_bits(tile.softmax.row_sum[h])]
            ptx.store_shared(self.shared.at(self.addresses(line, 0)[0]), stats)
