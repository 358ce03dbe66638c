"""A parameter whose elements are found by tile and position in the tile, and its vectors: masked or gathered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import Dim
from ...encoding.winograd import positions
from ...target.element_types import bytes_of
from .builder import Expr, Function, ceil_div, int64, lane_of, plain_extent, vector_type, zeros
from .view import View, row_major

EMPTY = tirx.const(False, "bool")
"""The mask of no lanes."""


class PackedStorage(View):
    """A tensor of logical `shape` stored under `layout`; see `View`.

    All parameters of a kernel are made with one set `bound`, of the symbols that parameters so far show.

    Attributes
    ----------
    extents : list of (int or PrimExpr or None)
        Logical extents; None where the parameter shows how many tiles there are, but not where the last one ends.
    tiles : list of (int or PrimExpr)
        Tiles along every logical dimension: its extent where it is not tiled.
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
        self.shape, self.layout = tuple(shape), layout
        self.extents: list[Any] = []
        self.tiles: list[Expr] = []
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
        for d in layout.window_dims:
            blocks[d] = positions(layout.winograd)
        bound.update(d for d, e in zip(self.shape, self.extents, strict=True) if isinstance(d, str) and e is not None)
        physical = [int64(blocks[d]) for d in layout.outer_perm] + [int64(tile) for tile in layout.inner_tiles]
        super().__init__(function, name, physical, dtype)

    def offset(self, outer: Mapping[int, Expr], inner: Mapping[int, Expr]) -> Expr:
        """Where an element lies, by tile and position in the tile along every dimension (0 where not given)."""
        shift = self.layout.inner_dims[-1] if self.layout.compensation else -1
        positions = [outer.get(d, 0) + (1 if d == shift else 0) for d in self.layout.outer_perm]
        positions += [inner.get(d, 0) for d in self.layout.inner_dims]
        if self.layout.swizzle:
            row, column = map(int64, positions[-2:])
            positions[-1] = self.layout.swizzled_column(row, column, self.nominal)
        offset: Expr = 0
        for position, stride in zip(positions, self._strides(), strict=True):
            offset = offset + position * stride
        return int64(offset)

    def bytes(self) -> Expr:
        """Bytes of the parameter: an int if its shape is static."""
        return prod(map(plain_extent, self.physical), start=bytes_of(self.nominal))

    def outer_stride(self, dim: int) -> Expr:
        """Distance of neighbouring tiles along a dimension."""
        return self._strides()[self.layout.outer_perm.index(dim)]

    def _strides(self) -> list[Expr]:
        return row_major(self.physical, _times)


def extents_of(storages: Sequence[PackedStorage]) -> list[Expr]:
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


def whole(extent: Expr, tile: int) -> bool:
    """Return whether an extent is known to be a multiple of a tile."""
    return tile == 1 or (isinstance(extent, int) and extent % tile == 0)


def by_wholeness(extent: Expr, tile: int, number: Expr, visit: Callable[[bool], None]) -> None:
    """Write what is done for tile `number` along a dimension; `visit` hears whether the tile is whole."""
    if whole(extent, tile):
        visit(True)
        return
    with T.If(number * tile + tile <= extent):
        with T.Then():
            visit(True)
        with T.Else():
            visit(False)


def _times(left: Expr, right: Expr) -> Expr:
    return left * plain_extent(right)


def split_run(length: int, lanes: int) -> list[tuple[int, int]]:
    """Starts and widths (powers of two) of the vectors that cover a run."""
    found, start = [], 0
    while start < length:
        width = min(lanes, 1 << ((length - start).bit_length() - 1))
        found.append((start, width))
        start += width
    return found


def tail_mask(extent: Expr, tile: int, column: Expr, start: int, width: int) -> Expr | None:
    """Which lanes of a vector in the last, partial tile exist; `EMPTY` and None where it is known that none, all do.

    Known cases are told apart here: TVM drops a store of a masked load whose mask it can prove empty.
    """
    if not isinstance(extent, int):
        return T.ramp(column + start, 1, width) < T.broadcast(extent, width) if width > 1 else column + start < extent
    valid = extent % tile - start
    if valid <= 0:
        return EMPTY
    if valid >= width:
        return None
    return T.ramp(int64(0), 1, width) < T.broadcast(int64(valid), width)


def masked_vector(storage: PackedStorage, index: Expr, width: int, mask: Expr | None) -> Expr:
    """Elements of a storage, zeros where the mask does not hold."""
    raw = str(storage.data.dtype)
    if mask is None:
        return storage.data[index]
    if mask is EMPTY:
        return zeros(raw, width)
    if width == 1:
        return T.if_then_else(mask, storage.data[index], tirx.const(0, raw))
    # LLVM is told that the lanes left out are poison; the selection becomes part of the load. Bound, because TVM takes
    # the inner mask for true where the outer one is.
    vector = T.bind(T.masked_load(vector_type(raw, width), storage.data, index, mask))
    return T.Select(mask, vector, zeros(raw, width))


def loaded(storage: PackedStorage, where: Expr, mask: Expr | None, width: int) -> tirx.Expr:
    """Elements of a storage as its own type, zeros where the mask does not hold."""
    return storage.typed(masked_vector(storage, where, width, mask))


def gathered(storage: PackedStorage, offset: Expr, step: Expr, mask: Expr | None, width: int) -> tirx.Expr:
    """As `loaded`, of elements that are `step` apart."""
    if width == 1:
        return loaded(storage, offset, mask, 1)
    lanes = []
    for lane in range(width):
        inside = mask if mask is None or mask is EMPTY else lane_of(mask, lane)
        lanes.append(loaded(storage, offset + lane * step, inside, 1))
    return T.Shuffle(lanes, list(range(width)))
