"""Vectors of a tensor in a thread's registers, with loads and stores of up to 16 bytes."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.element_types import bytes_of
from ....target.gpu_target import VECTOR_BYTES
from ...core.builder import Expr, lane_indices, materialize
from ...core.view import Coordinates, OperandView, View
from .dialect import has_ptx

_UNITS = {1: "uint8", 2: "uint16"}
MAX_LANES = 8  # maximum elements of a vector in kernels of mixed types: 8 float32 take two accesses


class VectorRegisters:
    """Vectors of a parameter's elements in registers, and their memory."""

    def __init__(
        self,
        view: View,  # opened; its element type is that of single elements in registers
        first: Expr,  # offset of vector 0 in memory, a multiple of `lanes`
        lanes: int,  # elements of a vector, a power of two
        count: int,  # number of vectors in registers
    ) -> None:
        size = lanes * bytes_of(view.nominal)
        self._unit = _UNITS.get(size, "uint32") if has_ptx() else view.dtype
        per_vector = max(1, size // bytes_of(self._unit))
        self._per_vector, self._width = per_vector, min(per_vector, VECTOR_BYTES // bytes_of(self._unit))
        self._memory = view.elements(self._unit)
        # In units of accesses: TVM vectorizes only accesses that it can prove to be aligned.
        elements = bytes_of(self._unit) * self._width // bytes_of(view.nominal)
        self._first = materialize(first if elements == 1 else tirx.floordiv(first, elements))
        self._units = T.alloc_buffer((count * per_vector,), self._unit, scope="local")
        self._elements = T.decl_buffer((count * lanes,), view.dtype, data=self._units.data, scope="local")

    def get(self, element: Expr) -> Expr:
        """Read an element, by its number in the registers."""
        return self._elements[element]

    def set(self, element: Expr, value: Expr) -> None:
        """Write an element, by its number in the registers."""
        T.buffer_store(self._elements, value, [element])

    def load(
        self,
        vector: int,  # number of the vector in registers
        index: Expr,  # number of the vector in memory, counted from `first`
        inside: Expr | None,  # predicate; None: always true
    ) -> None:
        """Load a vector, zeros if its predicate is false."""
        if inside is None:
            self._copy(vector, index, False)
            return
        with T.If(inside):
            with T.Then():
                self._copy(vector, index, False)
            with T.Else():
                for lanes, width in self._accesses(vector):
                    zero = tirx.const(0, self._unit)
                    T.buffer_store(self._units, zero if width == 1 else T.broadcast(zero, width), [lanes])

    def keep(self, vector: int, mask: Expr) -> None:
        """Zero a vector if `mask`, a uint32, is 0, and keep it if all bits are set.

        Unlike predicated loads, loads without a branch are in flight together.
        """
        for word in range(vector * self._per_vector, (vector + 1) * self._per_vector):
            if self._unit.startswith("uint"):
                kept = T.bitwise_and(self._units[word], T.Cast(self._unit, mask))
            else:
                kept = T.Select(mask != 0, self._units[word], tirx.const(0, self._unit))
            T.buffer_store(self._units, kept, [word])

    def store(self, vector: int, index: Expr, inside: Expr | None) -> None:
        """Store a vector if its predicate is true; parameters as in `load`."""
        if inside is None:
            self._copy(vector, index, True)
            return
        with T.If(inside), T.Then():
            self._copy(vector, index, True)

    def store_to(self, view: View, index: Expr) -> None:
        """Store the first vector to another parameter, at a vector number counted from its beginning."""
        self._write(view.elements(self._unit), 0, index * (self._per_vector // self._width))

    def _accesses(self, vector: int) -> list[tuple[Expr, int]]:
        start = vector * self._per_vector
        return [
            (lane_indices(tirx.const(start + word, "int32"), self._width), self._width)
            for word in range(0, self._per_vector, self._width)
        ]

    def _copy(self, vector: int, index: Expr, stores: bool) -> None:
        base = self._first + tirx.Cast("int64", index * (self._per_vector // self._width))
        if stores:
            self._write(self._memory, vector, base)
            return
        for number, (lanes, width) in enumerate(self._accesses(vector)):
            T.buffer_store(self._units, self._memory[lane_indices((base + number) * width, width)], [lanes])

    def _write(self, memory: Any, vector: int, base: Expr) -> None:
        for number, (lanes, width) in enumerate(self._accesses(vector)):
            T.buffer_store(memory, self._units[lanes], [lane_indices((base + number) * width, width)])


class Vectors(VectorRegisters):
    """Vectors along the last dimension of an operand, starting at a position."""

    def __init__(self, view: OperandView, at: Coordinates, lanes: int, count: int) -> None:
        super().__init__(view, view.address(at), lanes, count)
