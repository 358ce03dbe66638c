"""Epilogues of attention: normalized rows of a warp, and partial results of splits of the keys."""

from __future__ import annotations

from collections.abc import Sequence
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
from ..tile.softmax import SplitSums, as_bits
from .attention_tensors import AttentionTensors
from .score_tile import ScoreTile

_PAD_FLOATS = 4
"""Floats between lines of accumulators, to avoid bank conflicts."""


class RowStore:
    """Writer of results, after the softmax is complete.

    Parameters
    ----------
    columns : int
        Columns of a warp's tile; 0: all.
    """

    def __init__(self, tensors: AttentionTensors, shared: SharedMemory, columns: int = 0) -> None:
        self.tensors, self.shared, self.result = tensors, shared, tensors.result
        self.rows, self.width = to_int32(tensors.rows.count), int(tensors.sizes["e"])
        self.columns = columns or self.width

    def _address(self, row: Expr, column: Expr) -> Expr:
        at = {**self.tensors.at, "row": T.Cast("int64", row), "k": T.Cast("int64", column)}
        return self.result.address(at)

    def _stores_runs(self, elements: int) -> bool:
        """Return whether runs of 16-bit elements are aligned and contiguous."""
        size, is_half = 2 * elements, bytes_of(self.result.nominal) == 2
        is_whole = self.width % elements == 0 and is_half and self.result.is_contiguous("k")
        return is_whole and self.result.alignment("k", size) == size

    def store_tile(self, tile: ScoreTile, row: Expr, staging: SwizzledTile, column: Expr = 0) -> None:
        """Normalize and store a warp's rows.

        Parameters
        ----------
        row : PrimExpr
            The warp's first row, int32.
        staging : SwizzledTile
            The warp's 16 lines of shared memory.
        column : PrimExpr or int
            The warp's first column, int32; a multiple of 8.
        """
        tile.average()
        if self._stores_runs(CHUNK_BYTES // 2):
            self._store_chunks(tile, row, staging, column)
            return
        with unrolled(tile.sums.columns // 2) as i:
            own_column = column + column_of(i) + first_column(tile.lane)
            own_row = row + tirx.floordiv(tile.lane, 4) + row_of(i) * 8
            with when(tirx.all(own_column < self.width, own_row < self.rows)):
                self._store_element(own_row, own_column, tile.sums[i])

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

    def _store_chunks(self, tile: ScoreTile, first: Expr, staging: SwizzledTile, column: Expr) -> None:
        """Store rows in chunks of 16 bytes, staged in shared memory."""
        sums, lane, chunks = tile.sums, tile.lane, self.columns // 8
        first_chunk = tirx.floordiv(column, 8)
        pair = local(1, "uint32")
        own_row, within = T.bind(tirx.floordiv(lane, 4)), T.bind(tirx.floormod(lane, 4) * 4)
        for i in range(2 * chunks):
            ptx.pack_pair(pair[0], sums[2 * i], sums[2 * i + 1], self.result.nominal)
            ptx.store_shared(
                self.shared.at(staging.address(own_row + i % 2 * 8, first_chunk + i // 2) + within), [pair[0]]
            )
        ptx.warp_barrier()
        registers = local(4, "uint32")
        with T.serial(ceil_div(16 * chunks, WARP)) as iteration:
            item = T.bind(iteration * WARP + lane)
            row, chunk = T.bind(T.truncdiv(item, chunks)), T.bind(first_chunk + T.truncmod(item, chunks))
            result_row = T.bind(first + row)
            with when(tirx.all(row < 16, result_row < self.rows)):
                ptx.load_shared([registers[i] for i in range(4)], self.shared.at(staging.address(row, chunk)))
                target = T.address_of(self.result.data[self._address(result_row, chunk * 8)])
                ptx.store_global(target, [registers[i] for i in range(4)])


class PartialResults:
    """Accumulators and softmax statistics of splits of the keys in shared memory: lines of float32, then pairs.

    Parameters
    ----------
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

    def put(self, tile: ScoreTile, h: int, line: Expr, column: Expr = 0) -> None:
        """Store the first (`h` is 0) or second row of each lane to a line, from `column` on."""
        first = T.bind(first_column(tile.lane))
        with unrolled(tile.sums.columns // 8) as block:
            target = self.addresses(line, column + block * 8 + first)[1]
            ptx.store_shared(self.shared.at(target), [as_bits(tile.sums[block * 4 + 2 * h + c]) for c in range(2)])
        with when(column + first == 0):
            stats = [as_bits(tile.softmax.row_max[h]), as_bits(tile.softmax.row_sum[h])]
            ptx.store_shared(self.shared.at(self.addresses(line, 0)[0]), stats)

    def store(self, tensors: AttentionTensors, thread: Expr, threads: int, factor: float, teams: int = 1) -> None:
        """Combine the results of all blocks of a cluster, in their order, and store this block's share of the rows.

        Parameters
        ----------
        thread : PrimExpr
            Index of the thread among those that store, `threads`.
        factor : float
            Factor from scores to exponents of two; `OnlineSoftmax.factor`.
        teams : int
            Results of each row in a block: those of a row are `rows` lines apart, the rows of a block.
        """
        height, split, quads = tensors.plan.rows, tensors.plan.split_keys, self.width // 4
        remote, store = local(1, "uint32"), RowStore(tensors, self.shared)
        splits = SplitSums(split * teams, factor)

        def read(registers: Sequence[Expr], source: tuple[Expr, int]) -> None:
            offset, block = source
            if split == 1:
                ptx.load_shared(registers, self.shared.at(offset))
                return
            ptx.remote_address(remote[0], ptx.shared_address(self.shared.at(offset)), block)
            ptx.load_remote(registers, remote[0])

        with T.serial(ceil_div(ceil_div(height, split) * quads, threads)) as index:
            item = T.bind(index * threads + thread)
            row = T.bind(tirx.floordiv(item, quads) * split + tensors.rank)
            column, result_row = T.bind(tirx.floormod(item, quads) * 4), T.bind(tensors.row + row)
            exists = tirx.all(result_row < store.rows, column < store.width)
            with when(tirx.all(row < height, exists)):
                lines = [self.addresses(T.bind(row + team * height), column) for team in range(teams)]
                splits.add([((stats, block), (sums, block)) for block in range(split) for stats, sums in lines], read)
                splits.average(tensors.nan_to_zero)
                store.store_quad(splits.total, result_row, column)
