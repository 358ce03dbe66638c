"""Parameters addressed by tile and position in the tile, and loads of their vectors: contiguous, masked or gathered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
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

EMPTY = tirx.const(False, "bool")  # the mask of no lanes


class PackedStorage(View):
    """A tensor of logical `shape` stored under `layout`; see `View`.

    All parameters of a kernel share one set `bound`, the symbols that the shapes of earlier parameters bind.
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
        self.extents: list[Any] = []  # logical extents; None if the shape gives only the number of tiles
        self.tiles: list[Expr] = []  # number of tiles along every logical dimension; the extent of an untiled one
        stored_tiles: dict[int, Expr] = {}
        for d, dim in enumerate(shape):
            tile = layout.tile(d)
            compensation_tiles = 1 if layout.compensation and d == layout.inner_dims[-1] else 0
            if isinstance(dim, int):
                self.extents.append(dim)
                self.tiles.append(ceil_div(dim, tile))
                stored_tiles[d] = self.tiles[d] + compensation_tiles
            elif tile == 1 or dim in bound:
                self.extents.append(function.symbol(dim))
                self.tiles.append(ceil_div(function.symbol(dim), tile))
                stored_tiles[d] = self.tiles[d] + compensation_tiles
            else:
                # The shape binds the number of tiles, not the extent.
                stored_tiles[d] = function.symbol(f"{name}_blocks_{d}")
                self.extents.append(None)
                self.tiles.append(stored_tiles[d] - compensation_tiles if compensation_tiles else stored_tiles[d])
        for d in layout.window_dims:
            stored_tiles[d] = positions(layout.winograd)
        bound.update(d for d, e in zip(self.shape, self.extents, strict=True) if isinstance(d, str) and e is not None)
        physical = [int64(stored_tiles[d]) for d in layout.outer_perm] + [int64(tile) for tile in layout.inner_tiles]
        super().__init__(function, name, physical, dtype)

    def offset(self, outer: Mapping[int, Expr], inner: Mapping[int, Expr]) -> Expr:
        """Offset of an element, by tile and position in the tile along every dimension (0 if missing)."""
        compensated_dim = self.layout.inner_dims[-1] if self.layout.compensation else -1
        positions = [outer.get(d, 0) + (1 if d == compensated_dim else 0) for d in self.layout.outer_perm]
        positions += [inner.get(d, 0) for d in self.layout.inner_dims]
        if self.layout.swizzle:
            row, column = map(int64, positions[-2:])
            positions[-1] = self.layout.swizzled_column(row, column, self.nominal)
        return int64(sum(position * stride for position, stride in zip(positions, self._strides(), strict=True)))

    def bytes(self) -> Expr:
        """Bytes of the parameter, an int for a static shape."""
        return prod(map(plain_extent, self.physical), start=bytes_of(self.nominal))

    def outer_stride(self, dim: int) -> Expr:
        """Distance of neighbouring tiles along a dimension."""
        return self._strides()[self.layout.outer_perm.index(dim)]

    def _strides(self) -> list[Expr]:
        return row_major(self.physical, _times_extent)


def extents_of(storages: Sequence[PackedStorage]) -> list[Expr]:
    """Logical extents of a tensor with several storages; whole tiles if no shape binds the extent."""
    extents: list[Expr] = []
    for d in range(len(storages[0].extents)):
        bound_extents = [storage.extents[d] for storage in storages if storage.extents[d] is not None]
        padded_extents = [storage.tiles[d] * storage.layout.tile(d) for storage in storages]
        extents.append(bound_extents[0] if bound_extents else reduce(T.min, padded_extents))
    return extents


def is_multiple(extent: Expr, tile: int) -> bool:
    """Return whether an extent is statically a multiple of a tile."""
    return tile == 1 or (isinstance(extent, int) and extent % tile == 0)


def split_tail(extent: Expr, tile: int, number: Expr, visit: Callable[[bool], None]) -> None:
    """Write code for a whole tile `number` and for a partial last one; `visit` takes whether the tile is whole."""
    if is_multiple(extent, tile):
        visit(True)
        return
    with T.If(number * tile + tile <= extent):
        with T.Then():
            visit(True)
        with T.Else():
            visit(False)


def _times_extent(left: Expr, right: Expr) -> Expr:
    return left * plain_extent(right)


def split_run(length: int, lanes: int) -> list[tuple[int, int]]:
    """Starts and widths (powers of two) of the vectors that cover a run."""
    vectors, start = [], 0
    while start < length:
        width = min(lanes, 1 << ((length - start).bit_length() - 1))
        vectors.append((start, width))
        start += width
    return vectors


def tail_mask(extent: Expr, tile: int, column: Expr, start: int, width: int) -> Expr | None:
    """The mask of existing lanes of a vector in the last, partial tile; `EMPTY` for statically none, None for all.

    Static cases need no mask: TVM drops a store of a masked load whose mask it can prove empty.
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
    """Elements of a storage, masked ones zero."""
    raw = str(storage.data.dtype)
    if mask is None:
        return storage.data[index]
    if mask is EMPTY:
        return zeros(raw, width)
    if width == 1:
        return T.if_then_else(mask, storage.data[index], tirx.const(0, raw))
    # Masked lanes are poison in LLVM; the selection is merged into the load. Bound, because TVM would replace the inner
    # mask by true where the outer one holds.
    vector = T.bind(T.masked_load(vector_type(raw, width), storage.data, index, mask))
    return T.Select(mask, vector, zeros(raw, width))


def load_vector(storage: PackedStorage, index: Expr, mask: Expr | None, width: int) -> tirx.Expr:
    """Elements of a storage in its own type, masked ones zero."""
    return storage.typed(masked_vector(storage, index, width, mask))


def gather_vector(storage: PackedStorage, offset: Expr, step: Expr, mask: Expr | None, width: int) -> tirx.Expr:
    """Elements with stride `step` of a storage in its own type, masked ones zero."""
    if width == 1:
        return load_vector(storage, offset, mask, 1)
    lanes = []
    for lane in range(width):
        lane_mask = mask if mask is None or mask is EMPTY else lane_of(mask, lane)
        lanes.append(load_vector(storage, offset + lane * step, lane_mask, 1))
    return T.Shuffle(lanes, list(range(width)))
