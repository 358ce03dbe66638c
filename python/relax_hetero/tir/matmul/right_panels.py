"""A right operand that lies row-major, packed for tile registers panel by panel, where a product is about to read it.

An activation is packed once for all rows that meet it. Its panels stay in the second-level cache, which a kernel that
packs all of it for a second one leaves to memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.element_types import bytes_of
from ..core.builder import Expr, ceil_div, either, lane_indices, lane_mask, let, loop, materialize, vector_type, zeros
from ..core.view import Coordinates, OperandView, raw_type
from . import amx
from .matmul_spec import MatmulSpec

LANES = 16
"""Columns of a tile."""

# Panels that are packed at once, so that whole stretches of a row are read: as many as fit so many bytes.
MAX_PANELS = 4
PANEL_BYTES = 1 << 19


def is_row_major(rhs: OperandView) -> bool:
    """Return whether the right operand lies as rows of n, which tiles cannot read."""
    return rhs.layout.is_identity and tuple(rhs.index_map[-2:]) == ("k", "n")


def panel_columns(spec: MatmulSpec) -> int:
    """Columns of a panel: those of packed storage, else two tiles, one where n is no wider."""
    packed = spec.rhs.layout.tile(spec.rhs.index_map.index("n"))
    if not is_row_major(spec.rhs):
        return packed
    return LANES if spec.n <= LANES else 2 * LANES


@dataclass(frozen=True)
class RightPanels:
    """Where panels are packed: ``[panel, k / k0, column, k0]``.

    Attributes
    ----------
    k0 : int
        Neighbouring k of a column that lie together; zeros stand for those behind the end of k.
    columns : int
        Number of columns of a panel.
    count : int
        Panels that are packed at once.
    """

    spec: MatmulSpec
    k0: int
    columns: int
    count: int
    memory: Any

    @staticmethod
    def of(spec: MatmulSpec, k0: int) -> RightPanels:
        """Room for some panels; called inside a task."""
        columns = panel_columns(spec)
        elements = ceil_div(spec.k, k0) * k0 * columns
        panels = ceil_div(spec.n, columns)
        fitting = PANEL_BYTES // (elements * bytes_of(spec.rhs.dtype))
        count = max(1, min(MAX_PANELS, panels, fitting))
        return RightPanels(spec, k0, columns, count, amx.scratch(count * elements, raw_type(spec.rhs.nominal)))

    @property
    def elements(self) -> int:
        """Number of elements of a panel."""
        return ceil_div(self.spec.k, self.k0) * self.k0 * self.columns

    def pack(self, at: Coordinates, begin: Expr, end: Expr) -> None:
        """Pack the panels from `begin` to before `end`."""
        whole, left = divmod(self.spec.k, self.k0)
        if whole:
            with loop(whole) as group:
                self._pack_group(at, (begin, end), materialize(group), self.k0)
        if left:
            self._pack_group(at, (begin, end), tirx.const(whole, "int64"), left)

    def _pack_group(self, at: Coordinates, panels: tuple[Expr, Expr], group: Expr, rows: int) -> None:
        """`rows` neighbouring k of every column, zeros after them."""
        begin, end = panels
        left = self.spec.n % self.columns
        with loop(materialize(end - begin)) as number:
            column = materialize((begin + number) * self.columns)
            target = materialize(number * self.elements + group * (self.columns * self.k0))

            def pack(masks: list[Expr | None], column: Expr = column, target: Expr = target) -> None:
                for j, mask in enumerate(masks):
                    self._pack_tile(
                        at, (group, materialize(column + j * LANES)), rows, mask, target + j * (LANES * self.k0)
                    )

            whole: list[Expr | None] = [None] * (self.columns // LANES)
            last = [lane_mask(left - first, LANES) for first in range(0, left, LANES)]
            if left == 0:
                pack(whole)
            elif self.spec.n < self.columns:
                pack(last)
            else:
                either(column + self.columns <= self.spec.n, lambda: pack(whole), lambda: pack(last))

    def _pack_tile(self, at: Coordinates, place: tuple[Expr, Expr], rows: int, mask: Expr | None, target: Expr) -> None:
        """A group of k, of which `rows` exist, of as many columns as a tile has."""
        rhs, (group, column) = self.spec.rhs, place
        dtype = raw_type(rhs.nominal)
        vectors = []
        for i in range(self.k0):
            if i < rows:
                value = rhs.load({**at, "k": group * self.k0 + i, "n": column}, "n", LANES, mask)
                vectors.append(let(T.reinterpret(vector_type(dtype, LANES), value)))
            else:
                vectors.append(zeros(dtype, LANES))
        order = [i * LANES + lane for lane in range(LANES) for i in range(self.k0)]
        index = lane_indices(target, LANES * self.k0)
        T.buffer_store(self.memory, T.Shuffle(vectors, order), [index])
