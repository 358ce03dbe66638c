"""Panels of operands, for micro-kernels that read both operands packed (`aarch64_panels`).

A task packs its block of rows once for all panels of columns: a copy of M by K elements besides M by N by K products.
Where a CPU lacks products of float16, bfloat16 or bytes, rows are widened to float32 or int32 as they are packed, and
every panel of columns before the tiles of the block of rows use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.cpu_target import CpuTarget
from ...target.dot_instructions import DotInstruction, is_widened_in_panels, multiplies_by_sve, panel_instruction
from ...target.element_types import bytes_of
from ...target.tiles import tile_sizes
from ..core.builder import Expr, constant, int64, lane_indices, let, loop, materialize, scratch, vector_type
from ..core.view import Coordinates
from ..microkernel.aarch64_panels import SEGMENT_BYTES, PanelKernel, SvePanelKernel, group_bytes, has_neon_step
from ..microkernel.k_step import lhs_group, lhs_groups
from ..microkernel.microkernel import VectorTile
from .matmul_spec import KRange, MatmulSpec, PanelProducts, left_factors

MIN_ROWS = 4  # minimum number of rows: the panel of fewer would be read once or twice only
MAX_LEFT_BYTES = 1 << 21  # maximum bytes of a task's left panels: the L2 cache of server cores has 1 or 2 MiB


@dataclass(frozen=True)
class Panels:
    """Scratch of a task: the left panels of a block of rows, ``[tile, step, row, k0]``, and a widened right one."""

    spec: MatmulSpec
    rows: int  # rows of a panel, a multiple of 4
    columns: int  # columns of a right panel
    steps: int  # maximum number of k-steps of a panel
    words: Any  # groups of k0 elements, as unsigned integers
    sums: Any  # accumulators of a tile
    right: Any  # the widened right panel; None: it is read where it is

    @staticmethod
    def rows_of(spec: MatmulSpec, cpu: CpuTarget, k_blocks: Expr) -> int:
        """Rows of a tile with packed panels, 0 if the product reads its left operand in place.

        `k_blocks` is the number of ranges of k with separate panels.
        """
        rhs, dot = spec.rhs, spec.dot
        rows = tile_sizes(cpu).panel_rows
        n, k = (rhs.index_map.index(name) for name in "nk")
        is_packed = rhs.layout.tile(k) == dot.k0 == rhs.stride("n") and rhs.layout.outer_perm[-1] == k
        is_bounded = isinstance(spec.k, int) or not isinstance(k_blocks, int)
        # A tile has two vectors of columns.
        vector_bytes = rhs.layout.tile(n) // 2 * bytes_of(dot.types[2])
        has_neon = has_neon_step(panel_instruction(dot)) and vector_bytes == SEGMENT_BYTES
        has_sve = multiplies_by_sve(cpu, dot) and vector_bytes == cpu.sve_bytes
        if not rows or not (has_neon or has_sve) or not is_packed or not is_bounded or spec.k == 0:
            return 0
        if not isinstance(spec.m, int):
            return rows
        return 0 if spec.m < MIN_ROWS else min(rows, spec.m)

    @staticmethod
    def max_tiles(spec: MatmulSpec, tile_rows: int, max_k: int) -> int:
        """Maximum number of tiles of a block of rows, by the size of their panels."""
        bytes_of_tile = tile_rows * max_k * bytes_of(panel_instruction(spec.dot).types[0])
        return max(1, MAX_LEFT_BYTES // max(1, bytes_of_tile))

    @staticmethod
    def of(spec: MatmulSpec, tile_rows: int, tiles: int, max_k: int) -> Panels:
        """Scratch for `tiles` tiles of `tile_rows` rows by at most `max_k`; called inside of a task."""
        dot, columns = panel_instruction(spec.dot), panel_width(spec)
        rows, steps = _panel_rows(tile_rows), max(1, max_k // dot.k0)
        words, sums = scratch(tiles * steps * rows, _word(dot)), scratch(rows * columns, dot.types[2])
        right = scratch(steps * columns, dot.types[1]) if is_widened_in_panels(spec.dot) else None
        return Panels(spec, rows, columns, steps, words, sums, right)

    @property
    def dot(self) -> DotInstruction:
        """The instruction of the micro-kernel."""
        return panel_instruction(self.spec.dot)

    def _steps_in(self, size: Expr) -> Expr:
        """Steps of the micro-kernel in whole steps of the product."""
        k0 = self.spec.dot.k0
        return size // k0 * (k0 // self.dot.k0)

    @property
    def size(self) -> int:
        """Words of a panel."""
        return self.steps * self.rows

    def pack_left(self, batch: Coordinates, first_row: Expr, tile: Expr, k: KRange) -> None:
        """Pack the whole k-steps of a panel: `rows` rows from `first_row` on, the last existing one repeated."""
        spec, k0 = self.spec, self.dot.k0
        start = materialize(tile * self.size)
        rows = [materialize(T.min(first_row + i, spec.m - 1)) for i in range(self.rows)]
        width = SEGMENT_BYTES // group_bytes(self.dot)  # steps that a vector load of a row reads
        is_contiguous = spec.lhs.stride("k") == 1 and spec.lhs.layout.tile(spec.lhs.index_map.index("k")) == 1
        whole = materialize(self._steps_in(k.size))
        vectors = materialize(whole // width) if is_contiguous else 0
        if not (isinstance(vectors, int) and vectors == 0):
            with loop(vectors) as number:
                step = materialize(number * width)
                self._pack_steps(batch, rows, materialize(k.begin + step * k0), start + step * self.rows, width)
        with loop(materialize(whole - vectors * width)) as number:
            step = materialize(vectors * width + number)
            for row, at_row in enumerate(rows):
                at = {**batch, "m": at_row, "k": k.begin + step * k0}
                word = tirx.reinterpret(
                    _word(self.dot), lhs_group(self.dot, self._widen_left(left_factors(spec, at, None, k0)))
                )
                T.buffer_store(self.words, word, [start + step * self.rows + row])

    def _pack_steps(self, batch: Coordinates, rows: list[Expr], at_k: Expr, start: Expr, width: int) -> None:
        """Pack `width` steps: vectors of groups of rows are transposed."""
        for first in range(0, self.rows, 4):
            loads = [
                self.spec.lhs.load({**batch, "m": row, "k": at_k}, "k", width * self.dot.k0)
                for row in rows[first : first + 4]
            ]
            word = vector_type(_word(self.dot), width)
            vectors = [
                let(tirx.reinterpret(word, lhs_groups(self.dot, self._widen_left(values), width))) for values in loads
            ]
            for number in range(width):
                column = T.Shuffle(vectors, [row * width + number for row in range(4)])
                T.buffer_store(self.words, column, [lane_indices(start + number * self.rows + first, 4)])

    def _widen_left(self, values: Any) -> Any:
        """Factors in the type of the micro-kernel."""
        return values if self.right is None else _widened(values[0] if isinstance(values, list) else values)

    def widen_right(self, batch: Coordinates, column: Expr, k: KRange) -> None:
        """Widen the whole k-steps of the right panel at a column, unless it is read where it is."""
        if self.right is None:
            return
        k0 = self.spec.dot.k0
        with loop(materialize(k.size // k0)) as step:
            start = materialize(step * (self.columns * k0))
            loaded = self.spec.rhs.load_run({**batch, "k": k.begin + step * k0, "n": column}, self.columns * k0)
            # Pairs are moved as bits: TVM's legalization would widen values of bfloat16.
            values = let(_bits(loaded) if self.spec.rhs.dtype == "bfloat16" else loaded)
            for i in range(k0):
                factors = values if k0 == 1 else T.Shuffle([values], list(range(i, self.columns * k0, k0)))
                index = lane_indices(start + i * self.columns, self.columns)
                T.buffer_store(self.right, _widened(factors), [index])

    def products(self, tile: Expr, first_k: Expr) -> PanelProducts:
        """The products of the panel of a tile, from `first_k` on."""
        return lambda sums, k, at: self._multiply(sums, tile, k, first_k, at)

    def _multiply(
        self,
        sums: VectorTile,
        tile: Expr,  # number of the panel
        k: KRange,
        first_k: Expr,  # first k of the panel
        at: Coordinates,  # position of the tile
    ) -> None:
        """Add the products of the whole k-steps of a range to accumulators."""
        rhs, kernel = self.spec.rhs, _kernel(self.spec, sums.rows, self.rows)

        def slots() -> list[tuple[int, Any]]:
            places = [(i, j) for i in range(sums.rows) for j in range(sums.vectors)]
            return [
                (
                    i * sums.vectors + j,
                    lane_indices(tirx.const(kernel.segment(i, j) * sums.lanes, "int64"), sums.lanes),
                )
                for i, j in places
            ]

        for number, index in slots():
            T.buffer_store(self.sums, sums.sums[number], [index])
        first_step = (k.begin - first_k) // self.dot.k0
        left = self.words[tile * self.size + first_step * self.rows]
        right = (
            rhs.data[rhs.address({**at, "k": int64(k.begin)})]
            if self.right is None
            else self.right[int64(first_step * self.columns)]
        )
        steps = materialize(self._steps_in(k.size))
        T.evaluate(
            tirx.call_extern(
                "void",
                kernel.name,
                T.address_of(self.sums[0]),
                T.address_of(left),
                T.address_of(right),
                int64(steps),
            )
        )
        for number, index in slots():
            sums.sums[number] = self.sums[index]


def _panel_rows(tile_rows: int) -> int:
    """Rows of a panel of tiles: whole registers."""
    return -(-tile_rows // 4) * 4


def panel_width(spec: MatmulSpec) -> int:
    """Columns of a right panel."""
    return int(spec.rhs.layout.tile(spec.rhs.index_map.index("n")))


def _kernel(spec: MatmulSpec, rows: int, panel_rows: int) -> PanelKernel:
    """The micro-kernel of tiles of `rows` rows."""
    dot, vector_bytes = panel_instruction(spec.dot), panel_width(spec) // 2 * bytes_of(spec.dot.types[2])
    kind = SvePanelKernel if vector_bytes > SEGMENT_BYTES else PanelKernel
    return kind(dot, rows, panel_rows, vector_bytes)


def _word(dot: DotInstruction) -> str:
    return f"uint{8 * group_bytes(dot)}"


def _bits(values: Expr) -> Expr:
    return tirx.reinterpret(vector_type("uint16", values.ty.dtype.lanes), values)


def _widened(values: Expr) -> Expr:
    """Bytes as int32; float16, bfloat16 or its bits as float32, of which a bfloat16 is the upper half."""
    lanes = values.ty.dtype.lanes
    if values.ty.dtype.bits == 8:
        return tirx.Cast(vector_type("int32", lanes), values)
    if str(values.ty.dtype).startswith("float16"):
        return tirx.Cast(vector_type("float32", lanes), values)
    bits = values if str(values.ty.dtype).startswith("uint16") else _bits(values)
    wide = tirx.Cast(vector_type("uint32", lanes), bits)
    return tirx.reinterpret(vector_type("float32", lanes), tirx.shift_left(wide, constant(16, "uint32", lanes)))


def panel_kernels(spec: MatmulSpec, tile_rows: int, sizes: Iterable[int]) -> list[str]:
    """The micro-kernels, in LLVM IR, of tiles of `sizes` rows in panels of `tile_rows`."""
    rows = {spec.dot.whole_rows(size) for size in sizes}
    return [_kernel(spec, size, _panel_rows(tile_rows)).text() for size in sorted(rows)]
