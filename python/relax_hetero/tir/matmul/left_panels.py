"""Packed panels of the left operand, for micro-kernels that read both operands packed (`neon_panels`).

A task packs its block of rows once for all panels of columns: a copy of M by K elements besides M by N by K products.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.cpu_target import CpuTarget
from ...target.tiles import tile_sizes
from ..core.builder import Expr, ceil_div, lane_indices, let, loop, materialize, scratch
from ..core.view import Coordinates
from ..microkernel.k_step import lhs_group, lhs_groups
from ..microkernel.microkernel import VectorTile
from ..microkernel.neon_panels import COLUMNS, PanelKernel, group_bytes, has_panel_step
from .matmul_spec import KRange, MatmulSpec, left_factors

MIN_ROWS = 4
"""Minimum number of rows: the panel of fewer would be read once or twice only."""

_VECTOR_BYTES = 16


@dataclass(frozen=True)
class LeftPanels:
    """Scratch of a task for the left panels of a block of rows, ``[tile, step, row, k0]``.

    Attributes
    ----------
    rows : int
        Rows of a panel, a multiple of 4.
    steps : int
        Maximum number of k-steps of a panel.
    words : Buffer
        Groups of k0 elements, as unsigned integers.
    sums : Buffer
        Accumulators of a tile.
    """

    spec: MatmulSpec
    rows: int
    steps: int
    words: Any
    sums: Any

    @staticmethod
    def rows_of(spec: MatmulSpec, cpu: CpuTarget, k_blocks: Expr) -> int:
        """Rows of a tile with packed panels, 0 if the product reads its left operand in place.

        `k_blocks` is the number of ranges of k with separate panels.
        """
        rhs, dot = spec.rhs, spec.dot
        rows = tile_sizes(cpu).panel_rows
        n, k = (rhs.index_map.index(name) for name in "nk")
        is_packed = rhs.layout.tile(n) == COLUMNS and rhs.layout.tile(k) == dot.k0 and rhs.stride("n") == dot.k0
        is_bounded = isinstance(spec.k, int) or not isinstance(k_blocks, int)
        if not rows or not has_panel_step(dot) or not is_packed or not is_bounded or spec.k == 0:
            return 0
        if not isinstance(spec.m, int):
            return rows
        return 0 if spec.m < MIN_ROWS else min(rows, spec.m)

    @staticmethod
    def of(spec: MatmulSpec, tile_rows: int, tiles: int, max_k: int) -> LeftPanels:
        """Scratch for `tiles` tiles of `tile_rows` rows by at most `max_k`; called inside of a task."""
        rows, steps = _panel_rows(tile_rows), max(1, max_k // spec.dot.k0)
        words = scratch(tiles * steps * rows, _word(spec))
        return LeftPanels(spec, rows, steps, words, scratch(rows * COLUMNS, spec.dot.types[2]))

    @property
    def size(self) -> int:
        """Words of a panel."""
        return self.steps * self.rows

    def kernel(self, rows: int) -> PanelKernel:
        """The micro-kernel of a tile of `rows` rows."""
        return PanelKernel(self.spec.dot, rows, self.rows)

    def pack(self, batch: Coordinates, first_row: Expr, tile: Expr, k: KRange) -> None:
        """Pack the whole k-steps of a panel: `rows` rows from `first_row` on, the last existing one repeated."""
        spec, k0 = self.spec, self.spec.dot.k0
        start = materialize(tile * self.size)
        rows = [materialize(T.min(first_row + i, spec.m - 1)) for i in range(self.rows)]
        whole = materialize(k.size // k0)
        width = _VECTOR_BYTES // group_bytes(spec.dot)  # steps that a vector load of a row reads
        is_contiguous = spec.lhs.stride("k") == 1 and spec.lhs.layout.tile(spec.lhs.index_map.index("k")) in (1, k0)
        vectors = materialize(whole // width) if is_contiguous else 0
        if not (isinstance(vectors, int) and vectors == 0):
            with loop(vectors) as number:
                self._pack_steps(batch, rows, start, k, materialize(number * width), width)
        with loop(materialize(whole - vectors * width)) as number:
            step = materialize(vectors * width + number)
            for row, at_row in enumerate(rows):
                factors = left_factors(spec, {**batch, "m": at_row, "k": k.begin + step * k0}, None)
                word = tirx.reinterpret(_word(spec), lhs_group(spec.dot, factors))
                T.buffer_store(self.words, word, [start + step * self.rows + row])

    def _pack_steps(
        self, batch: Coordinates, rows: list[Expr], start: Expr, k: KRange, step: Expr, width: int
    ) -> None:
        """Pack `width` steps: vectors of groups of rows are transposed."""
        spec, dot = self.spec, self.spec.dot
        at_k = materialize(k.begin + step * dot.k0)
        for first in range(0, self.rows, 4):
            vectors = [
                let(lhs_groups(dot, spec.lhs.load({**batch, "m": row, "k": at_k}, "k", width * dot.k0), width))
                for row in rows[first : first + 4]
            ]
            for number in range(width):
                column = T.Shuffle(vectors, [row * width + number for row in range(4)])
                at = start + (step + number) * self.rows + first
                T.buffer_store(self.words, column, [lane_indices(at, 4)])

    def multiply(self, sums: VectorTile, tile: Expr, k: KRange, first_k: Expr, right: Expr) -> None:
        """Add the products of the whole k-steps of a range to accumulators.

        Parameters
        ----------
        tile : PrimExpr
            Number of the panel.
        first_k : PrimExpr or int
            First k of the panel.
        right : PrimExpr
            Position of the right factors of the range.
        """
        kernel, k0 = self.kernel(sums.rows), self.spec.dot.k0

        def slots() -> list[tuple[int, Any]]:
            places = [(i * sums.vectors + j, 2 * i + j) for i in range(sums.rows) for j in range(sums.vectors)]
            return [(number, lane_indices(tirx.const(slot * sums.lanes, "int64"), sums.lanes)) for number, slot in places]

        for number, index in slots():
            T.buffer_store(self.sums, sums.sums[number], [index])
        left = tile * self.size + (k.begin - first_k) // k0 * self.rows
        steps = materialize(k.size // k0)
        T.evaluate(
            tirx.call_extern(
                "void",
                kernel.name,
                T.address_of(self.sums[0]),
                T.address_of(self.words[left]),
                T.address_of(self.spec.rhs.data[right]),
                tirx.const(steps, "int64") if isinstance(steps, int) else steps,
            )
        )
        for number, index in slots():
            sums.sums[number] = self.sums[index]


def _panel_rows(tile_rows: int) -> int:
    """Rows of a panel of tiles: whole registers."""
    return -(-tile_rows // 4) * 4


def _word(spec: MatmulSpec) -> str:
    return f"uint{8 * group_bytes(spec.dot)}"


def panel_kernels(spec: MatmulSpec, tile_rows: int, sizes: Iterable[int]) -> list[str]:
    """The micro-kernels, in LLVM IR, of tiles of `sizes` rows in panels of `tile_rows`."""
    rows = {spec.dot.whole_rows(size) for size in sizes}
    return [PanelKernel(spec.dot, size, _panel_rows(tile_rows)).text() for size in sorted(rows)]
