"""Vectors of a tensor in a thread's registers, loaded and stored by accesses of up to 16 bytes."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.element_types import bytes_of
from ....target.gpu_target import VECTOR_BYTES
from ...core.builder import Expr, lane_indices, materialize
from ...core.view import Coordinates, OperandView, View

_UNITS = {1: "uint8", 2: "uint16"}
MAX_LANES = 8
"""Elements of a vector where types meet: bytes meet floats of which so many take two accesses."""


class VectorRegisters:
    """So many vectors of a parameter's elements in registers, and where each lies in memory.

    Parameters
    ----------
    view : View
        Opened; its element type says how single elements are read.
    first : PrimExpr
        The element that places are counted from, a multiple of `lanes`.
    lanes : int
        Elements of a vector, a power of two.
    count : int
        Vectors.
    """

    def __init__(self, view: View, first: Expr, lanes: int, count: int) -> None:
        size = lanes * bytes_of(view.nominal)
        self._unit = _UNITS.get(size, "uint32")
        per_vector = max(1, size // 4)
        self._per_vector, self._width = per_vector, min(per_vector, VECTOR_BYTES // 4)
        self._memory = view.elements(self._unit)
        # Counted in accesses: TVM reads as one vector only what it can prove to be aligned.
        elements = bytes_of(self._unit) * self._width // bytes_of(view.nominal)
        self._first = materialize(first if elements == 1 else tirx.floordiv(first, elements))
        self._units = T.alloc_buffer((count * per_vector,), self._unit, scope="local")
        self._elements = T.decl_buffer((count * lanes,), view.dtype, data=self._units.data, scope="local")

    def get(self, element: Expr) -> Expr:
        """An element, by its number in all vectors: as `View.data` has it."""
        return self._elements[element]

    def set(self, element: Expr, value: Expr) -> None:
        """Change an element, by its number in all vectors."""
        T.buffer_store(self._elements, value, [element])

    def load(self, vector: int, place: Expr, inside: Expr | None) -> None:
        """Read a vector; zeros where it is not inside.

        Parameters
        ----------
        vector : int
            Its number in registers.
        place : PrimExpr
            Its number from the first element on.
        inside : PrimExpr or None
            Whether it exists; None: it does.
        """
        if inside is None:
            self._copy(vector, place, False)
            return
        with T.If(inside):
            with T.Then():
                self._copy(vector, place, False)
            with T.Else():
                for here, width in self._parts(vector):
                    zero = tirx.const(0, self._unit)
                    T.buffer_store(self._units, zero if width == 1 else T.broadcast(zero, width), [here])

    def keep(self, vector: int, mask: Expr) -> None:
        """Make a vector zeros where `mask`, a uint32, is 0, and leave it where all bits are set; without a branch.

        Loads that stand in no branch are in flight together.
        """
        for word in range(vector * self._per_vector, (vector + 1) * self._per_vector):
            T.buffer_store(self._units, T.bitwise_and(self._units[word], T.Cast(self._unit, mask)), [word])

    def store(self, vector: int, place: Expr, inside: Expr | None) -> None:
        """Write a vector if it is inside; parameters as of `load`."""
        if inside is None:
            self._copy(vector, place, True)
            return
        with T.If(inside), T.Then():
            self._copy(vector, place, True)

    def store_to(self, view: View, place: Expr) -> None:
        """Write the first vector to another parameter, at a place counted from its beginning."""
        self._write(view.elements(self._unit), 0, place * (self._per_vector // self._width))

    def _parts(self, vector: int) -> list[tuple[Expr, int]]:
        start = vector * self._per_vector
        return [
            (lane_indices(tirx.const(start + part, "int32"), self._width), self._width)
            for part in range(0, self._per_vector, self._width)
        ]

    def _copy(self, vector: int, place: Expr, out: bool) -> None:
        base = self._first + tirx.Cast("int64", place * (self._per_vector // self._width))
        if out:
            self._write(self._memory, vector, base)
            return
        for number, (here, width) in enumerate(self._parts(vector)):
            there = lane_indices((base + number) * width, width)
            T.buffer_store(self._units, self._memory[there], [here])

    def _write(self, memory: Any, vector: int, base: Expr) -> None:
        for number, (here, width) in enumerate(self._parts(vector)):
            T.buffer_store(memory, self._units[here], [lane_indices((base + number) * width, width)])


class Vectors(VectorRegisters):
    """Vectors along the last dimension of an operand, from a position on."""

    def __init__(self, view: OperandView, at: Coordinates, lanes: int, count: int) -> None:
        super().__init__(view, view.address(at), lanes, count)
