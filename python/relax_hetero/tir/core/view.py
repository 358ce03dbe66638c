"""Views of a kernel's parameters: the buffer, its elements in one dimension, and strides.

Elements are addressed by coordinates of the iteration space (`OperandView`), by a tile and a position in it
(`packed_storage`), or by heads of an attention (`tir.attention.attention_spec`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm
from tvm import sym, tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import Operand
from .builder import (
    Expr,
    Function,
    broadcast,
    flat,
    int64,
    lane_indices,
    lane_of,
    load_lanes,
    masked_store,
    materialize,
    vector_type,
)


class View:
    """A parameter. Create views in the order of parameters, then call `open` inside of the function's body."""

    def __init__(self, function: Function, name: str, physical: Sequence[Expr], dtype: str) -> None:
        self.physical = list(physical)  # extents of the buffer
        # Element types of the tensor, and of loads and stores: the same, or the type of its bits if opened raw.
        self.nominal = self.dtype = dtype
        self._buffer = function.argument(name, self.physical, dtype)
        self.data: Any = None  # after `open`: the elements in one dimension

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
        """A loaded value in the element type; bool stays bytes, because TVM's analyzer fails on vectors of bool."""
        if self.nominal in (self.dtype, "bool"):
            return value
        return T.reinterpret(vector_type(self.nominal, value.ty.dtype.lanes), value)

    def bits(self, value: Expr) -> Expr:
        """A value of the element type in the stored type."""
        if self.nominal == self.dtype:
            return value
        return T.reinterpret(vector_type(self.dtype, value.ty.dtype.lanes), value)


def raw_type(dtype: str) -> str:
    """The unsigned integer type of the same width, for moves of bits."""
    return f"uint{max(8, tvm.DataType(dtype).bits)}"


def split_position(layout: PackedLayout, position: Sequence[Expr]) -> tuple[dict[int, Expr], dict[int, Expr]]:
    """A position in a tensor as tiles and positions in them, by dimension."""
    outer, inner = {}, {}
    for d, index in enumerate(position):
        tile = layout.tile(d)
        outer[d] = index if tile == 1 else tirx.floordiv(index, tile)
        inner[d] = tirx.const(0, "int64") if tile == 1 else tirx.floormod(index, tile)
    return outer, inner


def row_major(extents: Sequence[Expr], product: Callable[[Expr, Expr], Expr]) -> list[Expr]:
    """Row-major strides of some dimensions."""
    strides: list[Expr] = []
    distance: Expr = 1
    for extent in reversed(extents):
        strides.append(distance)
        distance = product(distance, extent)
    return strides[::-1]


Coordinates = Mapping[str, Expr]  # a position in the iteration space: an int64 expression for each iteration dimension


class OperandView(View):
    """A parameter whose elements are addressed by iteration coordinates; see `View`."""

    def __init__(self, function: Function, name: str, operand: Operand) -> None:
        self.layout = operand.layout
        self.index_map = list(operand.index_map)  # the iteration dimension of each logical dimension, "1" for none
        self.extents: list[Expr] = []  # logical extents: ints where static
        physical = []
        for d, dim in enumerate(operand.shape):
            tile = operand.layout.tile(d)
            if isinstance(dim, int):
                self.extents.append(dim)
            elif tile == 1:
                self.extents.append(function.symbol(dim))
            else:
                # The shape binds the number of tiles, not the extent.
                tiles = function.symbol(f"{name}_tiles_{d}")
                compensated = operand.layout.compensation and d == operand.layout.inner_dims[-1]
                self.extents.append((tiles - 1 if compensated else tiles) * tile)
        for extent in operand.layout.packed_shape(self.extents):
            physical.append(int64(extent) if isinstance(extent, int) else _simplify(extent))
        super().__init__(function, name, physical, operand.dtype)

    def open_as(self, dtype: str) -> None:
        """Declare the elements as those of another type of the same width; called after all merges."""
        super().open_as(dtype)
        self._strides = row_major(self.layout.packed_shape(self.extents), lambda a, b: materialize(a * b))

    def runs_along(self, name: str) -> bool:
        """Return whether the operand has the iteration dimension (else it is broadcast along it)."""
        return name in self.index_map

    def exact_extent(self, name: str) -> Expr | None:
        """The extent of an iteration dimension, None if only the number of its tiles is known."""
        d = self.index_map.index(name)
        is_exact = isinstance(self.extents[d], (int, tirx.Var)) or self.layout.tile(d) == 1
        return self.extents[d] if is_exact else None

    def is_padded(self, name: str, unit: int) -> bool:
        """Return whether storage is padded to a multiple of `unit` along an iteration dimension."""
        return self.runs_along(name) and self.layout.tile(self.index_map.index(name)) % unit == 0

    def merge(self, first: str, second: str) -> None:
        """Merge dimensions `first` and `second`, neighbours in row-major storage, into one named `second`."""
        if not self.runs_along(second):
            return
        d = self.index_map.index(first)
        self.extents[d : d + 2] = [self.extents[d] * self.extents[d + 1]]
        self.index_map[d : d + 2] = [second]
        self.layout = PackedLayout.identity(len(self.extents))

    def split(self, name: str, outer: str, count: int) -> None:
        """Split a dimension of row-major storage, if the operand has it, into `outer`, `count` long, and the rest."""
        if not self.runs_along(name):
            return
        d = self.index_map.index(name)
        self.extents[d : d + 1] = [count, self.extents[d] // count]
        self.index_map[d : d + 1] = [outer, name]
        self.layout = PackedLayout.identity(len(self.extents))

    def restate(self, extents: Sequence[Expr], index_map: Sequence[str], layout: PackedLayout) -> None:
        """Replace coordinates and layout by others that store the same bytes; called before `open`."""
        self.extents, self.index_map, self.layout = list(extents), list(index_map), layout

    def address(self, at: Coordinates, skip_compensation: bool = True) -> Expr:
        """Position of an element in the flat view; coordinates of dimensions it lacks are ignored."""
        zero = tirx.const(0, "int64")
        outer, inner = split_position(self.layout, [zero if name == "1" else at[name] for name in self.index_map])
        if self.layout.compensation and skip_compensation:
            outer[self.layout.inner_dims[-1]] = outer[self.layout.inner_dims[-1]] + 1
        offset: Expr = tirx.const(0, "int64")
        positions = [outer[d] for d in self.layout.outer_perm] + [inner[d] for d in self.layout.inner_dims]
        for stride, position in zip(self._strides, positions, strict=True):
            offset = offset + position * stride
        return _simplify(offset)

    def stride(self, name: str) -> Expr:
        """Stride along an iteration dimension, within a tile if it is tiled."""
        d = self.index_map.index(name)
        if d in self.layout.inner_dims:
            return self._strides[len(self.extents) + self.layout.inner_dims.index(d)]
        return self._strides[self.layout.outer_perm.index(d)]

    def load(self, at: Coordinates, along: str, lanes: int, mask: Expr | None = None) -> Expr:
        """`lanes` elements from a position along an iteration dimension, broadcast if the operand lacks it.

        `at`: coordinates of the first element. The lanes must not leave a tile. `mask`: vector of bool: lanes to read;
        the others are zero.
        """
        if not self.runs_along(along):
            return broadcast(self.data[self.address(at)], lanes)
        stride = self.stride(along)
        if lanes == 1:
            scalar = self.data[self.address(at)]
            return scalar if mask is None else _load_or_zero(scalar, mask, self.dtype)
        if mask is None:
            return self.data[lane_indices(self.address(at), lanes, stride)]
        if isinstance(stride, int) and stride == 1:
            return load_lanes(self.data, self.address(at), lanes, mask)
        return T.Shuffle(
            [self.load(_shifted(at, along, lane), along, 1, lane_of(mask, lane)) for lane in range(lanes)],
            list(range(lanes)),
        )

    def load_run(self, at: Coordinates, count: int) -> Expr:
        """`count` contiguous elements from a position on."""
        return self.data[lane_indices(self.address(at), count)]

    def load_compensation(self, at: Coordinates, lanes: int) -> Expr:
        """The layout's compensation of `lanes` columns from a position with k = 0 on, as int32."""
        start = self.address(at, skip_compensation=False)
        return tirx.reinterpret(vector_type("int32", lanes), self.data[lane_indices(start, 4 * lanes)])

    def store(self, at: Coordinates, along: str, value: Expr, lanes: int, mask: Expr | None = None) -> None:
        """Write `lanes` elements from a position along an iteration dimension, masked if `mask` is given."""
        stride = self.stride(along)
        index = lane_indices(self.address(at), lanes, stride)
        if mask is None:
            T.buffer_store(self.data, value, [index])
        elif lanes == 1:
            with T.If(mask), T.Then():
                T.buffer_store(self.data, value, [index])
        elif isinstance(stride, int) and stride == 1:
            masked_store(self.data, index, value, mask)
        else:
            vector = T.bind(value)
            for lane in range(lanes):
                with T.If(lane_of(mask, lane)), T.Then():
                    T.buffer_store(self.data, lane_of(vector, lane), [self.address(_shifted(at, along, lane))])


def _load_or_zero(scalar: Expr, mask: Expr, dtype: str) -> Expr:
    """The loaded scalar if `mask` is true, else zero."""
    if dtype != "bfloat16":
        return T.if_then_else(mask, scalar, tirx.const(0, dtype))
    # Selected as bits: TVM's legalization would select between float32 values.
    bits = T.if_then_else(mask, tirx.reinterpret("uint16", scalar), tirx.const(0, "uint16"))
    return tirx.reinterpret("bfloat16", bits)


def _shifted(at: Coordinates, along: str, by: int) -> Coordinates:
    return {**at, along: at[along] + by}


def _simplify(expression: Expr) -> Expr:
    return sym.Analyzer().simplify(expression)


def extent_of(views: Sequence[OperandView], name: str) -> Expr:
    """The extent of an iteration dimension: exact if a view's shape gives it, else rounded up to whole tiles."""
    along = [view for view in views if view.runs_along(name)]
    for view in along:
        exact = view.exact_extent(name)
        if exact is not None:
            return exact
    return along[0].extents[along[0].index_map.index(name)]
