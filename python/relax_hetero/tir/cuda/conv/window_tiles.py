"""Tiles of the left operand of an implicit product: pixels of a map under one place of a window, for tensor cores.

A step of the product is a place of the window ("tap") and 128 bytes of channels. A line of the tile is one pixel of the
result: what lies there in the map, of the pixel that the tap sees, is copied as it is, or zeros where that is padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES
from ....encoding.problem import ConvProblem
from ....target.element_types import bytes_of
from ...core.builder import Expr, int64
from ...core.view import Coordinates
from ..core import ptx
from ..core.global_view import GlobalView
from ..core.launch import SharedMemory, local, unrolled
from ..matmul.operand_tiles import PRODUCERS, Source
from . import window_places
from .window_places import WindowPlaces

_CHUNKS = SWIZZLED_BYTES // CHUNK_BYTES
_LINES = PRODUCERS // _CHUNKS


def misfit(problem: ConvProblem) -> str:
    """Why tiles of a problem's map cannot be copied; empty where they can."""
    channels = problem.weight.shape[1]
    if not isinstance(channels, int) or channels * bytes_of(problem.data.dtype) % 4:
        return f"pixels of {channels} channels of {problem.data.dtype} do not begin at multiples of 4 bytes"
    if problem.data.layout.outer_perm != (0, *range(2, len(problem.windows) + 2), 1):
        return f"the map is stored as {problem.data.layout}, expected channels last"
    return window_places.misfit(problem)


@dataclass
class WindowTile:
    """The left operand of an implicit product, and the tile that a stage holds of it; stands for an `OperandTile`.

    Attributes
    ----------
    places : WindowPlaces
        Of the map, opened raw.
    rows : int
        Pixels of a tile.
    extent : PrimExpr or int
        Rows of all tiles.
    """

    places: WindowPlaces
    rows: int
    extent: Expr
    source: Source = Source.LINES
    is_transposed: bool = False
    leading: int = 1
    advance: int = ptx.CONTRACTION_BYTES // 16
    _begins: Any = field(default=None, init=False)
    _seen: Any = field(default=None, init=False)

    @property
    def view(self) -> GlobalView:
        """The map."""
        return self.places.view

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
    def width(self) -> int:
        """Bytes of a copy: pixels begin at multiples of it."""
        width = CHUNK_BYTES
        while self.places.channels * self.element % width:
            width //= 2
        return width

    def begin(self, at: Coordinates, first: Expr, thread: Expr) -> None:
        """Find the pixels of the thread's lines, and which taps see the map from each."""
        count, kind = self.rows // _LINES, self.places.kind
        self._begins = local(count, kind)
        self._seen = local(count, "uint32") if self.places.has_padding else None
        own = T.bind(first + T.Cast("int64", thread // _CHUNKS))
        chunk = T.Cast(kind, thread % _CHUNKS * (CHUNK_BYTES // self.element))
        with unrolled(count) as i:
            # Rows beyond the last are copies of it, which are not stored.
            row = T.min(own + T.Cast("int64", i * _LINES), int64(self.extent - 1))
            begin, seen = self.places.pixel(at, row)
            T.buffer_store(self._begins, begin + chunk, [i])
            if self._seen is not None:
                T.buffer_store(self._seen, seen, [i])

    def load(self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, thread: Expr) -> None:
        """Begin to copy the tile of a step; parameters as of `OperandTile.load`."""
        channels, kind = self.places.channels, self.places.kind
        parts = -(-channels // self.step)
        tap, skipped = (step, 0) if parts == 1 else (T.truncdiv(step, parts), T.truncmod(step, parts) * self.step)
        moved, bits = self.places.tap(T.bind(tap) if parts > 1 else tap)
        moved = T.bind(moved + T.Cast(kind, skipped)) if parts > 1 else moved
        chunk, line = thread % _CHUNKS, thread // _CHUNKS
        target = offset + line * SWIZZLED_BYTES + T.bitwise_xor(chunk, line % 8) * CHUNK_BYTES
        elements = self.width // self.element
        for copy in range(CHUNK_BYTES // self.width):
            channel = chunk * (CHUNK_BYTES // self.element) + copy * elements + skipped
            exists = None if channels % self.step == 0 else T.bind(channel < channels)
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
