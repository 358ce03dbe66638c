"""The heads of an attention where they lie: slices of one tensor, merged or apart, in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import Operand
from ..core.builder import (
    Expr,
    Function,
    broadcast,
    held,
    lane_indices,
    masked_store,
    settled,
    vector_type,
    zeros,
)
from ..core.view import View
from ..elementwise.expression_ops import cast

HALVES = ("bfloat16", "float16")
"""Element types that are computed in float32."""

Coordinates = Mapping[str, Expr]
"""A position by the names of iteration dimensions, int64; names that are missing are at 0."""


class HeadsView(View):
    """A parameter of an attention kernel, its elements found by iteration coordinates; see `View`.

    Parameters
    ----------
    function : Function
    name : str
    operand : Operand
        A dimension of it may run along several iteration dimensions, outermost first: ``"h*d"``.
    starts : sequence of int
        Where it begins in each dimension.
    sizes : mapping of str to PrimExpr
        Of every iteration dimension.
    """

    def __init__(
        self, function: Function, name: str, operand: Operand, starts: Sequence[int], sizes: Mapping[str, Expr]
    ) -> None:
        self._dims = [text.split("*") for text in operand.index_map]
        self._starts, self._sizes = list(starts), sizes
        super().__init__(function, name, [function.extent(dim) for dim in operand.shape], operand.dtype)

    def open(self, raw: bool = False) -> None:
        """As of any view. Conditions are read as bytes, bfloat16 as bits: vectors cannot be bound, nor be masked."""
        self.open_as({"bool": "int8", "bfloat16": "uint16"}.get(self.nominal, self.nominal))
        self._strides: dict[str, Expr] = {}
        self._start: Expr = 0
        distance: Expr = 1
        for extent, names, start in reversed(list(zip(self.physical, self._dims, self._starts, strict=True))):
            if start:
                self._start = self._start + distance * start
            step = distance
            for name in reversed(names):
                self._strides[name] = step
                step = settled(_product(step, self._sizes.get(name, 1)))
            distance = settled(_product(distance, int(extent) if isinstance(extent, tirx.IntImm) else extent))
        self._start = settled(self._start)

    def runs_along(self, name: str) -> bool:
        """Whether the tensor has the iteration dimension (else it is broadcast along it)."""
        return name in self._strides

    def stride(self, name: str) -> Expr:
        """Distance of neighbours along an iteration dimension, 0 where it is broadcast."""
        return self._strides.get(name, 0)

    def address(self, at: Coordinates) -> Expr:
        """Position of an element in the flat view; coordinates of dimensions it lacks are ignored."""
        offset: Expr = self._start
        for name, position in at.items():
            if name in self._strides:
                offset = offset + position * self._strides[name]
        return tirx.const(offset, "int64") if isinstance(offset, int) else offset

    def pairs(self) -> Any:
        """A flat view of elements of 16 bits, of which an even number lies in each dimension, in words of two."""
        return self.elements("float32")

    def element(self, place: Expr) -> Expr:
        """The element at a place, in the type that is computed in."""
        return self._computed(self.data[place])

    def load(self, place: Expr, along: str, lanes: int, mask: Expr | None = None) -> Expr:
        """Elements from a place (of `address`) along an iteration dimension, in the type that is computed in.

        They are zero where the mask does not hold.
        """
        return self._computed(self.load_bits(place, along, lanes, mask))

    def _computed(self, value: Expr) -> Expr:
        return cast(self.typed(value), "float32") if self.nominal in HALVES else value

    def store(self, place: Expr, value: Expr, lanes: int, mask: Expr | None) -> None:
        """Write neighbours, those of the mask where there is one."""
        value = self.bits(cast(value, self.nominal))
        index = lane_indices(place, lanes)
        if mask is None:
            T.buffer_store(self.data, value, [index])
        else:
            masked_store(self.data, index, value, mask)

    def load_bits(self, place: Expr, along: str, lanes: int, mask: Expr | None = None) -> Expr:
        """As `load`, as they are stored: bfloat16 as uint16."""
        if not self.runs_along(along) or lanes == 1:
            return broadcast(self.data[place], lanes)
        dtype = self.dtype
        if self.stride(along) == 1:
            index = lane_indices(place, lanes)
            if mask is None:
                return self.data[index]
            # Lanes left out are poison until the choice, which becomes part of the load.
            loaded = held(T.masked_load(vector_type(dtype, lanes), self.data, index, mask))
            return T.Select(mask, loaded, zeros(dtype, lanes))
        parts = []
        for lane in range(lanes):
            inside = True if mask is None else T.Shuffle([mask], [lane])
            value = self.data[place + self.stride(along) * lane]
            parts.append(value if inside is True else T.if_then_else(inside, value, tirx.const(0, dtype)))
        return T.Shuffle(parts, list(range(lanes)))


def _product(left: Expr, right: Expr) -> Expr:
    if isinstance(left, int) and left == 1:
        return right
    return left * right
