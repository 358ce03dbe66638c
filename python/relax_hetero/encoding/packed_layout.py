"""Storage layout of a tensor: the tiles of its dimensions, and the order of tiles and outer dimensions.

It is described as by MLIR's ``tensor.pack``: ``outer_perm``, ``inner_dims`` and ``inner_tiles``. A ``(k, n)`` weight
as ``[n/32, k/4, 32, 4]`` has ``outer_perm=(1, 0)``, ``inner_dims=(1, 0)``, ``inner_tiles=(32, 4)``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from ..errors import EncodingError
from ..target.element_types import bytes_of
from .encoding import RHS, Encoding, IndexMap
from .winograd import POINTS, WINDOW, positions, restore_windows, transform_windows

SWIZZLED_BYTES = 128  # bytes of a row of a swizzled tile: as wide as all banks of a GPU's shared memory
CHUNK_BYTES = 16  # unit of a swizzle, in bytes
_MAX_RANK = 64  # far above any tensor's: text does not decide how much memory a layout takes
_TEXT = re.compile(
    r"pack<outer=\[([0-9]{1,9}(?:, [0-9]{1,9})*)\] "
    r"inner=\[((?:[0-9]{1,9}:[0-9]{1,9}(?:, [0-9]{1,9}:[0-9]{1,9})*)?)\]"
    r"( \+compensation)?( \+swizzle)?( \+winograd[0-9])?>"
)


@dataclass(frozen=True)
class PackedLayout:
    """Storage order of a tensor of `len(outer_perm)` dimensions; incomplete tiles are padded with zeros.

    Attributes
    ----------
    outer_perm : tuple of int
        Logical dimension of each outer axis, in storage order.
    inner_dims : tuple of int
        Logical dimension of each tile axis, in storage order, after the outer axes.
    inner_tiles : tuple of int
        Elements of each tile axis.
    compensation : bool
        Whether the right operand of an s8*s8 product that is computed as u8*s8 (with 128 added to the left one) begins
        with one more block along the outer axis of the last inner dimension (k, in tiles of 4 bytes). The block holds
        -128 times the sum over k of every column, as int32.
    swizzle : bool
        Whether the tile is the image that a tensor core's instruction reads from shared memory without bank conflicts:
        rows of 128 bytes along the last tile axis, a multiple of 8 rows along the axis before it; 16-byte chunk c of
        row r lies at ``c ^ (r % 8)``. (Source: PTX ISA, "128-byte swizzle mode" of matrix descriptors.)
    winograd : int
        Tile size m for the weight of a 3 x 3 convolution: its windows are stored transformed, for m x m elements of
        the result at a time (see `encoding.winograd`), and take (m + 2) x (m + 2) elements; 0: not transformed. The
        window's dimensions are the second and the third outer axis; for a volume, the two inner ones.
    """

    outer_perm: tuple[int, ...]
    inner_dims: tuple[int, ...] = ()
    inner_tiles: tuple[int, ...] = ()
    compensation: bool = False
    swizzle: bool = False
    winograd: int = 0

    def __post_init__(self) -> None:
        if sorted(self.outer_perm) != list(range(len(self.outer_perm))):
            raise EncodingError(f"layout {self}: outer is not a permutation")
        if len(self.inner_dims) != len(self.inner_tiles) or len(set(self.inner_dims)) != len(self.inner_dims):
            raise EncodingError(f"layout {self}: every tiled dimension has one tile")
        if any(d not in self.outer_perm for d in self.inner_dims) or any(t < 1 for t in self.inner_tiles):
            raise EncodingError(f"layout {self}: a tiled dimension is out of range, or a tile is empty")
        if self.compensation and (not self.inner_tiles or self.inner_tiles[-1] != 4):
            raise EncodingError(f"layout {self}: compensation needs k in tiles of 4 bytes, innermost")
        if self.swizzle and (len(self.inner_tiles) != 2 or self.inner_tiles[0] % 8 or self.compensation):
            raise EncodingError(f"layout {self}: a swizzle needs two tile axes, the first a multiple of 8")
        if self.winograd:
            self._check_winograd()

    def _check_winograd(self) -> None:
        if self.winograd not in POINTS or len(self.outer_perm) not in (4, 5) or self.compensation or self.swizzle:
            raise EncodingError(
                f"layout {self}: windows are transformed for tile sizes {tuple(POINTS)}, in 4 or 5 dimensions"
            )
        if any(d in self.inner_dims for d in self.window_dims):
            raise EncodingError(f"layout {self}: the dimensions of a transformed window have no tiles")

    @staticmethod
    def identity(rank: int) -> PackedLayout:
        """The row-major layout, which plain tensors have.

        Parameters
        ----------
        rank : int
            Number of dimensions.
        """
        return PackedLayout(tuple(range(rank)))

    @property
    def is_identity(self) -> bool:
        """True if this is plain row-major storage."""
        return self.outer_perm == tuple(range(len(self.outer_perm))) and not self.inner_dims

    def __str__(self) -> str:
        if self.is_identity:
            return f"identity<{len(self.outer_perm)}>"
        outer = ", ".join(map(str, self.outer_perm))
        inner = ", ".join(f"{d}:{t}" for d, t in zip(self.inner_dims, self.inner_tiles, strict=False))
        extras = " +compensation" * self.compensation + " +swizzle" * self.swizzle
        extras += f" +winograd{self.winograd}" if self.winograd else ""
        return f"pack<outer=[{outer}] inner=[{inner}]{extras}>"

    @staticmethod
    def parse(text: str) -> PackedLayout:
        """The layout that `str` wrote; EncodingError for other text.

        Parameters
        ----------
        text : str
            Layout in the form that `str` gives.
        """
        return _parse(text)

    def tile(self, dim: int) -> int:
        """The tile of a logical dimension, 1 where it is not tiled.

        Parameters
        ----------
        dim : int
            Logical dimension.
        """
        return self.inner_tiles[self.inner_dims.index(dim)] if dim in self.inner_dims else 1

    @property
    def window_dims(self) -> tuple[int, ...]:
        """The logical dimensions of windows that are stored transformed; empty where they are not."""
        return self.outer_perm[1:3] if self.winograd else ()

    def swizzled_column(self, row: Any, column: Any, dtype: str) -> Any:
        """The stored position of a column in its row of a swizzled tile; ints or expressions of the same type.

        Parameters
        ----------
        row, column : object
            Position of an element in its tile.
        dtype : str
            Element type.
        """
        chunk = CHUNK_BYTES // bytes_of(dtype)
        return column ^ (row % 8 * chunk)

    def packed_shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Shape of the stored tensor; extents may be symbolic (anything with + and //).

        Parameters
        ----------
        shape : sequence of object
            Logical extents.
        """
        if len(shape) != len(self.outer_perm):
            raise EncodingError(f"layout {self} is for {len(self.outer_perm)} dimensions, found shape {tuple(shape)}")
        windows, size = self.window_dims, positions(self.winograd)
        outer = [size if d in windows else _ceil_div(shape[d], self.tile(d)) for d in self.outer_perm]
        if self.compensation:
            outer[self.outer_perm.index(self.inner_dims[-1])] += 1
        return (*outer, *self.inner_tiles)

    def storage_bytes(self, shape: Sequence[Any], dtype: str) -> Any:
        """Bytes of the stored tensor, an expression where an extent is symbolic.

        Parameters
        ----------
        shape : sequence of object
            Logical extents.
        dtype : str
            Element type.
        """
        return prod(self.packed_shape(shape), start=bytes_of(dtype))

    def transposed(self, perm: Sequence[int]) -> PackedLayout:
        """The layout under which ``permute_dims(x, perm)`` has the same bytes as `x` under this one.

        Parameters
        ----------
        perm : sequence of int
            Axes, as ``permute_dims`` takes them.
        """
        position = {old: new for new, old in enumerate(perm)}
        return PackedLayout(
            tuple(position[d] for d in self.outer_perm),
            tuple(position[d] for d in self.inner_dims),
            self.inner_tiles,
            self.compensation,
            self.swizzle,
            self.winograd,
        )

    def permutation_to(self, other: PackedLayout) -> tuple[int, ...] | None:
        """Axes that permute a tensor stored under this layout into one stored under another; None if either tiles.

        Parameters
        ----------
        other : PackedLayout
            Layout of the permuted tensor.
        """
        if self.inner_dims or other.inner_dims:
            return None
        return tuple(self.outer_perm.index(d) for d in other.outer_perm)

    def pack(self, array: np.ndarray) -> np.ndarray:
        """The stored form of `array`, as the pack kernel computes it, for constants at compile time.

        Parameters
        ----------
        array : np.ndarray
            Tensor of the logical shape.
        """
        if self.winograd:
            windows = np.moveaxis(array, self.window_dims, (-2, -1))
            array = np.moveaxis(transform_windows(windows, self.winograd), (-2, -1), self.window_dims)
        missing = [-extent % self.tile(d) for d, extent in enumerate(array.shape)]
        padded = np.pad(array, [(0, count) for count in missing]) if any(missing) else array
        split: list[int] = []
        outer_axis, inner_axis = {}, {}
        for d, extent in enumerate(padded.shape):
            outer_axis[d] = len(split)
            split.append(extent // self.tile(d))
            if d in self.inner_dims:
                inner_axis[d] = len(split)
                split.append(self.tile(d))
        order = [outer_axis[d] for d in self.outer_perm] + [inner_axis[d] for d in self.inner_dims]
        packed = padded.reshape(split).transpose(order)
        if self.compensation:
            return self._with_compensation(packed)
        if self.swizzle:
            return _swizzled(packed)
        return np.ascontiguousarray(packed)

    def _with_compensation(self, packed: np.ndarray) -> np.ndarray:
        axis = self.outer_perm.index(self.inner_dims[-1])
        sums = packed.sum(axis=(axis, -1), dtype="int32") * np.int32(-128)
        block = np.ascontiguousarray(sums)[..., np.newaxis].view(packed.dtype)
        return np.concatenate([np.expand_dims(block, axis), packed], axis=axis)

    def unpack(self, stored: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The tensor of `shape` that is stored as `stored`.

        Parameters
        ----------
        stored : np.ndarray
            Array of the packed shape.
        shape : sequence of int
            Logical extents.
        """
        if self.compensation:
            stored = np.delete(stored, 0, axis=self.outer_perm.index(self.inner_dims[-1]))
        if self.swizzle:
            stored = _swizzled(stored)
        rank = len(self.outer_perm)
        order: list[int] = []
        for d in range(rank):
            order.append(self.outer_perm.index(d))
            if d in self.inner_dims:
                order.append(rank + self.inner_dims.index(d))
        extents = [positions(self.winograd) if d in self.window_dims else shape[d] for d in range(rank)]
        padded = stored.transpose(order).reshape(
            [_ceil_div(extents[d], self.tile(d)) * self.tile(d) for d in range(rank)]
        )
        array = padded[tuple(slice(0, extent) for extent in extents)]
        if self.winograd:
            values = np.moveaxis(array, self.window_dims, (-2, -1))
            array = np.moveaxis(restore_windows(values, self.winograd), (-2, -1), self.window_dims)
        return np.ascontiguousarray(array)


def tiled(
    index_map: IndexMap,  # index map of the operand in the order of its shape, so that transposes are composed here
    outer: Sequence[str],  # order of the other dimensions: ("n", "k")
    tiles: Mapping[str, int],  # tile of each dimension, in storage order; tiles of size one are left out
    # compensation, swizzle: see `PackedLayout`.
    compensation: bool = False,
    swizzle: bool = False,
) -> PackedLayout:
    """The layout with batch dimensions outermost, then the dimensions `outer`, then the tiles."""
    batch = [dim for dim, name in enumerate(index_map) if name not in outer]
    inner = [(index_map.index(name), tile) for name, tile in tiles.items() if tile > 1]
    return PackedLayout(
        (*batch, *(index_map.index(name) for name in outer)),
        tuple(dim for dim, _ in inner),
        tuple(tile for _, tile in inner),
        compensation,
        swizzle,
    )


def _swizzled(tiles: np.ndarray) -> np.ndarray:
    """Tiles with the chunks of each row permuted; the permutation is its own inverse."""
    per_row = SWIZZLED_BYTES // CHUNK_BYTES
    rows, chunks = np.indices((per_row, per_row))
    # The rows of a tile are a multiple of those that the permutation repeats after. numpy has numbers of 16 bytes.
    groups = np.ascontiguousarray(tiles).view(np.uint8).reshape(-1, per_row * SWIZZLED_BYTES).view(np.complex128)
    return groups.take((rows * per_row + (chunks ^ rows)).ravel(), axis=1).view(tiles.dtype).reshape(tiles.shape)


def unsupported_reason(layout: PackedLayout, encoding: Encoding) -> str:
    """The reason why a layout cannot store the operand of an encoding; empty where it can."""
    rank = len(encoding.index_map)
    if len(layout.outer_perm) != rank:
        return f"{layout} is for {len(layout.outer_perm)} dimensions, the operand has {rank}"
    if layout.compensation and not (
        encoding.operand_index == RHS
        and encoding.element_type in ("int8", "uint8")
        and encoding.index_map[layout.inner_dims[-1]] == "k"
    ):
        return f"{layout} has compensation, which is for right operands of 8 bits with k in the innermost tiles"
    if layout.swizzle and layout.inner_tiles[-1] * bytes_of(encoding.element_type) != SWIZZLED_BYTES:
        return f"{layout} has rows of {layout.inner_tiles[-1]} {encoding.element_type}, a swizzle needs 128 bytes"
    if layout.winograd:
        return _winograd_unsupported_reason(layout, encoding)
    return ""


def _winograd_unsupported_reason(layout: PackedLayout, encoding: Encoding) -> str:
    names = tuple(encoding.index_map[d] for d in layout.window_dims)
    if encoding.operand_index != RHS or names != encoding.index_map[-2:] or len(encoding.index_map) < len(names) + 2:
        return f"{layout} has transformed windows, which weights of convolutions have in their two inner dimensions"
    conv = encoding.conv
    assert conv is not None
    if {*conv.strides[-2:], *conv.dilation[-2:]} != {1} or any(encoding.sizes[name] != WINDOW for name in names):
        return f"{layout} has transformed windows, which have 3 x 3 elements, stride 1 and no dilation"
    if "float" not in encoding.element_type:
        return f"{layout} has transformed windows, which are floats, not {encoding.element_type}"
    return ""


def _ceil_div(extent: Any, tile: int) -> Any:
    return extent if tile == 1 else (extent + (tile - 1)) // tile


@cache
def _parse(text: str) -> PackedLayout:
    plain = re.fullmatch(r"identity<([0-9]{1,2})>", text)
    if plain is not None and int(plain[1]) <= _MAX_RANK:
        return PackedLayout.identity(int(plain[1]))
    match = _TEXT.fullmatch(text)
    if match is None:
        raise EncodingError(
            f"{text!r} is not a layout; expected identity<rank> or pack<outer=[..] inner=[dim:tile, ..]>"
        )
    outer, inner, compensation, swizzle, winograd = match.groups()
    pairs = [pair.split(":") for pair in inner.split(", ") if pair]
    return PackedLayout(
        tuple(int(d) for d in outer.split(", ")),
        tuple(int(d) for d, _ in pairs),
        tuple(int(t) for _, t in pairs),
        compensation is not None,
        swizzle is not None,
        int(winograd[-1]) if winograd else 0,
    )
