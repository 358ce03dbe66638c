"""A parameter of a kernel: its buffer, its elements in one dimension, and how far apart neighbours lie.

What finds an element differs: coordinates of the iteration space (`operand_view`), a tile and a position in it
(`packed_storage`), heads of an attention (`tir.attention.attention_spec`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.packed_layout import PackedLayout
from .builder import Expr, Function, flat, vector_type


class View:
    """A parameter; make one for each in order, then call `open` inside the function's body.

    Attributes
    ----------
    physical : list of PrimExpr
        Extents of the buffer.
    nominal : str
        The tensor's element type.
    dtype : str
        Of what is loaded and stored: `nominal`, or the type of its bits if opened raw.
    data : Buffer
        After `open`: the elements in one dimension.
    """

    def __init__(self, function: Function, name: str, physical: Sequence[Expr], dtype: str) -> None:
        self.physical = list(physical)
        self.nominal = self.dtype = dtype
        self._buffer = function.argument(name, self.physical, dtype)
        self.data: Any = None

    def open(self, raw: bool = False) -> None:
        """Declare the elements, as unsigned integers if `raw`."""
        self.open_as(raw_type(self.nominal) if raw else self.nominal)

    def open_as(self, dtype: str) -> None:
        """Declare the elements as those of another type of the same width."""
        self.dtype = dtype
        self.data = self.elements(dtype)

    def elements(self, dtype: str) -> Any:
        """The parameter's bytes as elements of another type, in one dimension."""
        return flat(self._buffer, self.physical, dtype)

    def typed(self, value: Expr) -> Expr:
        """What was loaded, as what it is; conditions stay bytes, because TVM's analyzer fails on vectors of bool."""
        if self.nominal in (self.dtype, "bool"):
            return value
        return T.reinterpret(vector_type(self.nominal, value.ty.dtype.lanes), value)

    def bits(self, value: Expr) -> Expr:
        """A value of the element type, as what is stored."""
        if self.nominal == self.dtype:
            return value
        return T.reinterpret(vector_type(self.dtype, value.ty.dtype.lanes), value)


def raw_type(dtype: str) -> str:
    """The unsigned integer of as many bits: what moves bytes without looking at them."""
    return f"uint{max(8, tvm.DataType(dtype).bits)}"


def split_position(layout: PackedLayout, position: Sequence[Expr]) -> tuple[dict[int, Expr], dict[int, Expr]]:
    """A position in a tensor as tiles and positions in them, by dimension."""
    outer, inner = {}, {}
    for d, at in enumerate(position):
        tile = layout.tile(d)
        outer[d] = at if tile == 1 else tirx.floordiv(at, tile)
        inner[d] = tirx.const(0, "int64") if tile == 1 else tirx.floormod(at, tile)
    return outer, inner


def row_major(extents: Sequence[Expr], product: Callable[[Expr, Expr], Expr]) -> list[Expr]:
    """How far apart neighbours along each of some dimensions lie, the last of which is contiguous."""
    strides: list[Expr] = []
    distance: Expr = 1
    for extent in reversed(extents):
        strides.append(distance)
        distance = product(distance, extent)
    return strides[::-1]
