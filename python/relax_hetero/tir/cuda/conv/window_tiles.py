"""Tiles of the left operand of an implicit product: pixels of a map under one place of a window, for tensor cores.

A step of the product is a place of the window ("tap") and 128 bytes of channels. A line of the tile is one pixel of the
result: what lies there in the map, of the pixel that the tap sees, is copied as it is, or zeros where that is in the
padding. Which pixel a line is, and which taps see the map from there, is found once for a tile: a step adds the same
number to the address of every line, and tests a bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES
from ....encoding.problem import ConvProblem, Window
from ....target.element_types import bytes_of
from ...core.builder import Expr, int64
from ...core.view import Coordinates
from ...core.work_split import unravel
from ..core import ptx
from ..core.global_view import GlobalView
from ..core.launch import SharedMemory, local, unrolled
from ..matmul.operand_tiles import PRODUCERS, Source

_CHUNKS = SWIZZLED_BYTES // CHUNK_BYTES
_LINES = PRODUCERS // _CHUNKS
_BITS = 32


def misfit(problem: ConvProblem) -> str:
    """Why tiles of a problem's map cannot be copied; empty where they can."""
    element = bytes_of(problem.data.dtype)
    channels = problem.weight.shape[1]
    if not isinstance(channels, int) or channels * element % 4:
        return f"pixels of {channels} channels of {problem.data.dtype} do not begin at multiples of 4 bytes"
    spatial = len(problem.windows)
    if problem.data.layout.outer_perm != (0, *range(2, spatial + 2), 1) or problem.data.layout.inner_dims:
        return f"the map is stored as {problem.data.layout}, expected channels last"
    if any(not isinstance(extent, int) for extent in problem.data.shape[1:]):
        return f"the map has symbolic extents: {problem.data.shape}"
    padded = [window for window, extent in _axes(problem) if _is_padded(window, extent)]
    if sum(window.size for window in padded) > _BITS:
        return f"the places of a padded window are more than {_BITS}: {[window.size for window in padded]}"
    return ""


@dataclass
class WindowTile:
    """The left operand of an implicit product, and the tile that a stage holds of it; stands for an `OperandTile`.

    Attributes
    ----------
    view : GlobalView
        The map, opened raw: dimensions "b", "c", "x0", ...
    problem : ConvProblem
    rows : int
        Pixels of a tile.
    places : dict of str to (PrimExpr or int)
        Extents of the result's batch and spatial dimensions by name, outermost first.
    batches : tuple of str
        Which of them, from the outermost on, are no part of the rows: "b0", "b1", ... of the product.
    extent : PrimExpr or int
        Rows of all tiles.
    """

    view: GlobalView
    problem: ConvProblem
    rows: int
    places: dict[str, Expr]
    batches: tuple[str, ...]
    extent: Expr
    source: Source = Source.LINES
    is_transposed: bool = False
    leading: int = 1
    advance: int = ptx.CONTRACTION_BYTES // 16
    _begins: Any = field(default=None, init=False)
    _seen: Any = field(default=None, init=False)

    @property
    def element(self) -> int:
        """Bytes of an element."""
        return bytes_of(self.view.nominal)

    @property
    def step(self) -> int:
        """Channels of a step."""
        return SWIZZLED_BYTES // self.element

    @property
    def size(self) -> int:
        """Bytes of a tile."""
        return self.rows * SWIZZLED_BYTES

    @property
    def channels(self) -> int:
        """Of a group of the map."""
        channels = self.problem.weight.shape[1]
        assert isinstance(channels, int)
        return channels

    @property
    def width(self) -> int:
        """Bytes of a copy: pixels begin at multiples of it."""
        width = CHUNK_BYTES
        while self.channels * self.element % width:
            width //= 2
        return width

    def begin(self, at: Coordinates, first: Expr, thread: Expr) -> None:
        """Find the pixels of the thread's lines, and which taps see the map from each."""
        count = self.rows // _LINES
        is_small = self._is_small()
        self._begins = local(count, "int32" if is_small else "int64")
        self._seen = local(count, "uint32") if self._padded() else None
        own = T.bind(first + T.Cast("int64", thread // _CHUNKS))
        chunk = thread % _CHUNKS * (CHUNK_BYTES // self.element)
        with unrolled(count) as i:
            row = T.min(own + T.Cast("int64", i * _LINES), int64(self.extent - 1))
            if is_small:
                row = T.Cast("int32", row)
            names = [name for name in self.places if name not in self.batches]
            places = dict(zip(names, unravel(T.bind(row), [self.places[n] for n in names], place=T.bind), strict=True))
            kind = "int32" if is_small else "int64"
            for i_batch, name in enumerate(self.batches):
                places[name] = T.Cast(kind, at[f"b{i_batch}"])
            begin = places["b"] * self._stride("b") + T.Cast(kind, chunk)
            if "g" in at:
                begin = begin + T.Cast(kind, at["g"]) * self.channels
            seen: Expr = T.uint32(0)
            shift = 0
            for d, (window, extent) in enumerate(_axes(self.problem)):
                position = T.bind(places[f"y{d}"] * window.stride - window.before)
                begin = begin + position * self._stride(f"x{d}")
                if not _is_padded(window, extent):
                    continue
                for tap in range(window.size):
                    there = position + tap * window.dilation
                    inside = tirx.all(there >= 0, there < extent)
                    seen = T.bitwise_or(seen, T.Select(inside, T.uint32(1 << shift + tap), T.uint32(0)))
                shift += window.size
            T.buffer_store(self._begins, begin, [i])
            if self._seen is not None:
                T.buffer_store(self._seen, seen, [i])

    def load(self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, thread: Expr) -> None:
        """Begin to copy the tile of a step; parameters as of `OperandTile.load`."""
        parts = -(-self.channels // self.step)
        tap, part = (step, 0) if parts == 1 else (T.bind(T.truncdiv(step, parts)), T.truncmod(step, parts))
        kind = "int32" if self._is_small() else "int64"
        taps = unravel(tap, [window.size for window in self.problem.windows], place=T.bind)
        moved: Expr = tirx.const(0, "int32") if isinstance(part, int) else part * self.step
        moved = T.Cast(kind, moved)
        bits: Expr = None
        shift = 0
        for d, (window, extent) in enumerate(_axes(self.problem)):
            moved = moved + T.Cast(kind, taps[d]) * (window.dilation * self._stride(f"x{d}"))
            if _is_padded(window, extent):
                bit = T.shift_left(T.uint32(1), T.Cast("uint32", taps[d] + shift))
                bits = bit if bits is None else T.bitwise_or(bits, bit)
                shift += window.size
        moved = T.bind(moved)
        bits = bits if bits is None else T.bind(bits)
        chunk, line = thread % _CHUNKS, thread // _CHUNKS
        target = offset + line * SWIZZLED_BYTES + T.bitwise_xor(chunk, line % 8) * CHUNK_BYTES
        elements = self.width // self.element
        for copy in range(CHUNK_BYTES // self.width):
            channel = (chunk * (CHUNK_BYTES // self.element) + copy * elements) + (0 if isinstance(part, int) else part * self.step)
            exists = None if self.channels % self.step == 0 else T.bind(channel < self.channels)
            with unrolled(self.rows // _LINES) as i:
                begin, valid = self._begins[i] + moved + copy * elements, exists
                if bits is not None:
                    sees = T.bitwise_and(self._seen[i], bits) == bits
                    valid = sees if valid is None else tirx.all(sees, valid)
                size: Expr = None
                if valid is not None:
                    # Where nothing is read, the address is that of the map.
                    begin = T.Select(valid, begin, tirx.const(0, kind))
                    size = T.Select(valid, self.width, 0)
                place = shared.at(target + i * (_LINES * SWIZZLED_BYTES) + copy * self.width)
                ptx.copy_async(place, T.address_of(self.view.data[begin]), self.width, size)

    def _padded(self) -> bool:
        return any(_is_padded(window, extent) for window, extent in _axes(self.problem))

    def _is_small(self) -> bool:
        """Whether places in the map are numbers of 32 bits."""
        shape = self.problem.data.shape
        return all(isinstance(size, int) for size in shape) and prod(map(int, shape)) < 1 << 30

    def _stride(self, name: str) -> int:
        stride = self.view.stride(name)
        assert isinstance(stride, int), "only the batch is symbolic, which is outermost"
        return stride


def _axes(problem: ConvProblem) -> list[tuple[Window, int]]:
    """The windows, each with the extent of the map."""
    return [(window, int(extent)) for window, extent in zip(problem.windows, problem.data.shape[2:], strict=True)]


def _is_padded(window: Window, extent: int) -> bool:
    """Whether some place of the window is outside of the map for some place of the result."""
    last = (window.places(extent) - 1) * window.stride + window.reach - 1 - window.before
    return window.before > 0 or last >= extent
