"""A kernel's parameter under a layout, addressed by tile and position in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import Dim
from ...target.element_types import bytes_of
from .builder import Expr, Function, ceil_div, flat, int64


class Storage:
    """A parameter: a tensor of logical `shape` stored under `layout`.

    Make one for each parameter in order, all with one set `bound` (of the symbols that parameters so far show), then
    call `open` inside the function's body.

    Attributes
    ----------
    shape : tuple of int or str
    dtype : str
    layout : PackedLayout
    extents : list of (int or PrimExpr or None)
        Logical extents; None where the parameter shows how many tiles there are, but not where the last one ends.
    tiles : list of (int or PrimExpr)
        Tiles along every logical dimension: its extent where it is not tiled.
    data : Buffer
        After `open`: the elements in one dimension, as unsigned integers if `raw`.
    """

    def __init__(
        self,
        function: Function,
        name: str,
        shape: Sequence[Dim],
        dtype: str,
        layout: PackedLayout,
        bound: set[str],
    ) -> None:
        self.shape, self.dtype, self.layout = tuple(shape), dtype, layout
        self.extents: list[Any] = []
        self.tiles: list[Expr] = []
        self.physical: list[Expr] = []
        blocks: dict[int, Expr] = {}
        for d, dim in enumerate(shape):
            tile = layout.tile(d)
            extra = 1 if layout.compensation and d == layout.inner_dims[-1] else 0
            if isinstance(dim, int):
                self.extents.append(dim)
                self.tiles.append(ceil_div(dim, tile))
                blocks[d] = self.tiles[d] + extra
            elif tile == 1 or dim in bound:
                self.extents.append(function.symbol(dim))
                self.tiles.append(ceil_div(function.symbol(dim), tile))
                blocks[d] = self.tiles[d] + extra
            else:
                # The shape shows this variable, the extent itself it cannot.
                blocks[d] = function.symbol(f"{name}_blocks_{d}")
                self.extents.append(None)
                self.tiles.append(blocks[d] - extra if extra else blocks[d])
        bound.update(d for d, e in zip(self.shape, self.extents, strict=True) if isinstance(d, str) and e is not None)
        for d in layout.outer_perm:
            self.physical.append(int64(blocks[d]))
        self.physical += [int64(tile) for tile in layout.inner_tiles]
        self.buffer = function.argument(name, self.physical, dtype)
        self.data: Any = None

    def open(self, raw: bool = False) -> None:
        """Declare the flat view; inside the function's body."""
        self.data = self.view(raw_type(self.dtype) if raw else self.dtype)

    def view(self, dtype: str) -> Any:
        """The parameter's bytes as elements of another type, in one dimension."""
        return flat(self.buffer, self.physical, dtype)

    def offset(self, outer: Mapping[int, Expr], inner: Mapping[int, Expr]) -> Expr:
        """Where an element lies, by tile and position in the tile along every dimension (0 where not given)."""
        shift = self.layout.inner_dims[-1] if self.layout.compensation else -1
        positions = [outer.get(d, 0) + (1 if d == shift else 0) for d in self.layout.outer_perm]
        positions += [inner.get(d, 0) for d in self.layout.inner_dims]
        offset: Expr = 0
        for position, stride in zip(positions, self._strides(), strict=True):
            offset = offset + position * stride
        return int64(offset)

    def bytes(self) -> Expr:
        """Bytes of the parameter: an int if its shape is static."""
        total: Expr = bytes_of(self.dtype)
        for extent in self.physical:
            total = _times(total, extent)
        return total

    def outer_stride(self, dim: int) -> Expr:
        """Distance of neighbouring tiles along a dimension."""
        return self._strides()[self.layout.outer_perm.index(dim)]

    def _strides(self) -> list[Expr]:
        strides: list[Expr] = []
        stride: Expr = 1
        for extent in reversed(self.physical):
            strides.append(stride)
            stride = _times(stride, extent)
        return strides[::-1]


def extents_of(storages: Sequence[Storage]) -> list[Expr]:
    """Logical extents that storages of one tensor show together; whole tiles where none knows better."""
    found: list[Expr] = []
    for d in range(len(storages[0].extents)):
        known = [storage.extents[d] for storage in storages if storage.extents[d] is not None]
        if known:
            found.append(known[0])
            continue
        stored = [storage.tiles[d] * storage.layout.tile(d) for storage in storages]
        smallest = stored[0]
        for other in stored[1:]:
            smallest = T.min(smallest, other)
        found.append(smallest)
    return found


def raw_type(dtype: str) -> str:
    """The unsigned integer of as many bits: what moves bytes without looking at them."""
    return f"uint{max(8, tvm.DataType(dtype).bits)}"


def whole(extent: Expr, tile: int) -> bool:
    """Whether an extent is known to be a multiple of a tile."""
    return tile == 1 or (isinstance(extent, int) and extent % tile == 0)


def _times(left: Expr, right: Expr) -> Expr:
    return left * (int(right) if isinstance(right, tirx.IntImm) else right)
