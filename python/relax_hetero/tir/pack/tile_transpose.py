"""Copies between row-major and packed storage that transpose in registers.

``(n, k) -> [n/32, k, 32]``, ``(m, k) -> [m/8, k, 8]``, and with k in words, ``(n, k) -> [n/32, k/4, 32, 4]``: blocks of
rows are read as vectors along k and go through a network of two-register shuffles.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.cpu_target import CpuTarget
from ...target.element_types import bytes_of
from ..core.builder import Expr, ceil_div, int64, lane_indices, loop, minimum, zeros
from ..core.packed_storage import PackedStorage, extents_of, is_multiple, split_tail
from ..core.work_split import for_parts
from ..math.vector_math import once


def transpose_tiles(source: PackedStorage, destination: PackedStorage, cpu: CpuTarget) -> bool:
    """Pack or unpack layouts whose innermost tile lies along another dimension than the last.

    Returns False, with nothing written, for other layouts and for CPUs without vectors.
    """
    packed, packing = (destination, True) if source.layout.is_identity else (source, False)
    plain = source if packing else destination
    if not plain.layout.is_identity or cpu.isa.vector_bytes == 0:
        return False
    transpose = _Transpose.of(plain, packed, packing, extents_of([source, destination]), cpu)
    if transpose is None:
        return False
    transpose.write(cpu)
    return True


class _Transpose:
    """Code of a transposing copy: rows along the tiled dimension, columns along the last one, in words."""

    def __init__(
        self,
        plain: PackedStorage,
        packed: PackedStorage,
        packing: bool,
        extents: list[Expr],
        rows: int,
        group: int,
        lanes: int,
    ) -> None:
        self.plain, self.packed, self.packing = plain, packed, packing
        self.rows, self.last, self.group, self.lanes = rows, len(packed.shape) - 1, group, lanes
        self.tile = packed.layout.tile(rows)
        self.block = min(self.tile, lanes)
        self.height = extents[rows]
        self.width = ceil_div(extents[self.last], group)
        word = f"uint{tvm.DataType(plain.data.dtype).bits * group}"
        self.word = word
        self.plain_words = plain.data if group == 1 else plain.elements(word)
        self.packed_words = packed.data if group == 1 else packed.elements(word)

    @staticmethod
    def of(
        plain: PackedStorage, packed: PackedStorage, packing: bool, extents: list[Expr], cpu: CpuTarget
    ) -> _Transpose | None:
        """The transpose for a pair of storages, or None."""
        layout, last = packed.layout, len(packed.shape) - 1
        inner = [d for d in layout.inner_dims if layout.tile(d) > 1]
        group = 1
        if len(inner) == 2 and inner[1] == last and is_multiple(extents[last], layout.tile(last)):
            group = layout.tile(inner.pop())
        if len(inner) != 1 or inner[0] == last or layout.swizzle or (group == 1 and layout.tile(last) != 1):
            return None
        size = bytes_of(str(plain.data.dtype)) * group
        lanes = cpu.isa.vector_bytes // max(4, size)
        tile = layout.tile(inner[0])
        wide_enough = not isinstance(extents[last], int) or extents[last] // group >= lanes
        if size not in (1, 2, 4, 8) or not wide_enough or lanes < 2:
            return None
        whole_blocks = tile % lanes == 0
        neighbours = packing and layout.outer_perm[-1] == last and lanes % tile == 0
        if not (whole_blocks or neighbours):
            return None
        return _Transpose(plain, packed, packing, extents, inner[0], group, lanes)

    def write(self, cpu: CpuTarget) -> None:
        """The loops: panels of rows over the cores, blocks of columns inside."""
        outer_dims = [d for d in self.packed.layout.outer_perm if d not in (self.rows, self.last)]
        counts = [self.packed.tiles[d] for d in outer_dims] + [self.packed.tiles[self.rows]]

        def panel(positions: list[Expr]) -> None:
            outer = dict(zip([*outer_dims, self.rows], positions, strict=True))
            split_tail(self.height, self.tile, outer[self.rows], lambda full: self._panel(outer, full))

        for_parts(counts, self.packed.bytes(), cpu, panel)

    def _panel(self, outer: dict[int, Expr], full: bool) -> None:
        if isinstance(self.width, int):
            self._columns(outer, full)
            return
        with T.If(self.width >= self.lanes):
            with T.Then():
                self._columns(outer, full)
            with T.Else():
                self._narrow(outer)

    def _columns(self, outer: dict[int, Expr], full: bool) -> None:
        with loop(ceil_div(self.width, self.lanes)) as block:
            # The last block ends with the row: columns that it shares with the block before are copied twice.
            start = block * self.lanes
            if not is_multiple(self.width, self.lanes):
                start = T.bind(minimum(start, int64(self.width) - self.lanes))
            for first in range(0, self.tile, self.block):
                (self._pack if self.packing else self._unpack)(outer, start, first, full)

    def _plain_index(self, outer: dict[int, Expr], row: Expr, column: Expr) -> Expr:
        outer_position = {**outer, self.rows: row, self.last: column * self.group}
        offset = self.plain.offset(outer_position, {})
        return offset if self.group == 1 else tirx.floordiv(offset, self.group)

    def _packed_index(self, outer: dict[int, Expr], column: Expr, within: Expr) -> Expr:
        offset = self.packed.offset({**outer, self.last: column}, {self.rows: within})
        return offset if self.group == 1 else tirx.floordiv(offset, self.group)

    def _pack(self, outer: dict[int, Expr], start: Expr, first: int, full: bool) -> None:
        loaded = []
        for i in range(self.block):
            row = outer[self.rows] * self.tile + first + i
            safe_row = row if full else T.min(row, self.height - 1)
            value = self.plain_words[lane_indices(self._plain_index(outer, safe_row, start), self.lanes)]
            if not full:
                exists = T.broadcast(row < self.height, self.lanes)
                value = T.Select(exists, value, zeros(self.word, self.lanes))
            loaded.append(T.bind(value))
        columns = self.lanes // self.block
        for i, vector in enumerate(riffle(loaded, self.lanes)):
            index = self._packed_index(outer, start + i * columns, tirx.const(first, "int64"))
            T.buffer_store(self.packed_words, vector, [lane_indices(index, self.lanes)])

    def _unpack(self, outer: dict[int, Expr], start: Expr, first: int, full: bool) -> None:
        loaded = []
        for i in range(self.lanes):
            index = self._packed_index(outer, start + i, tirx.const(first, "int64"))
            loaded.append(T.bind(self.packed_words[lane_indices(index, self.lanes)]))
        for i, vector in enumerate(riffle(loaded, self.lanes)):
            row = outer[self.rows] * self.tile + first + i
            plain_index = lane_indices(self._plain_index(outer, T.min(row, self.height - 1), start), self.lanes)
            if full:
                T.buffer_store(self.plain_words, vector, [plain_index])
                continue
            with T.If(row < self.height), T.Then():
                T.buffer_store(self.plain_words, vector, [plain_index])

    def _narrow(self, outer: dict[int, Expr]) -> None:
        """Rows shorter than a vector, word by word."""
        with loop(self.width) as column, loop(self.tile) as within:
            row = outer[self.rows] * self.tile + within
            plain_index, packed_index = self._plain_index(outer, row, column), self._packed_index(outer, column, within)
            if self.packing:
                value = T.if_then_else(row < self.height, self.plain_words[plain_index], tirx.const(0, self.word))
                T.buffer_store(self.packed_words, value, [packed_index])
            else:
                with T.If(row < self.height), T.Then():
                    T.buffer_store(self.plain_words, self.packed_words[packed_index], [plain_index])


def riffle(vectors: list[Expr], lanes: int) -> list[Expr]:
    """The transpose of rows: columns, several short ones to a vector.

    Every stage interleaves the rows of two halves, as a deck of cards is riffled.
    """
    low, high = riffle_orders(lanes)
    groups = [[vector] for vector in vectors]
    while len(groups) > 1:
        half = len(groups) // 2
        groups = [
            [once(T.Shuffle([a, b], order)) for a, b in zip(first, second, strict=True) for order in (low, high)]
            for first, second in zip(groups[:half], groups[half:], strict=True)
        ]
    return groups[0]


def riffle_orders(lanes: int) -> tuple[list[int], list[int]]:
    """Lane numbers of the two results of interleaving two vectors."""
    order = [index for i in range(lanes) for index in (i, lanes + i)]
    return order[:lanes], order[lanes:]
