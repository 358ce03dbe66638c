"""Where the pixels of a map lie that the windows of a convolution see.

The element that a place of the window ("tap") sees for a pixel of the result is as far from the element that the first
tap sees as for any other pixel. So an address is a sum: one part of the pixel, found once, one of the tap. Whether the
tap sees the map at all, and not its padding, is bits of the pixel, found once too: one for each place of the window
along each padded dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.problem import ConvProblem, Window
from ...core.builder import Expr
from ...core.view import Coordinates
from ...core.work_split import unravel
from ..core.operand import GlobalView

MAX_BITS = 32
"""Places along all padded dimensions of a window: bits of a register."""


def unsupported_reason(problem: ConvProblem, max_bits: int | None = MAX_BITS) -> str:
    """Why pixels cannot be found so, with so many bits of padded windows; empty where they can."""
    if any(not isinstance(extent, int) for extent in problem.data.shape[1:]):
        return f"the map has symbolic extents: {problem.data.shape}"
    padded = [window.size for window, extent in axes_of(problem) if is_padded(window, extent)]
    if max_bits is not None and sum(padded) > max_bits:
        return f"the places of a padded window, {padded}, are more than {max_bits}"
    return ""


def axes_of(problem: ConvProblem) -> list[tuple[Window, int]]:
    """The windows, each with the extent of the map."""
    return [(window, int(extent)) for window, extent in zip(problem.windows, problem.data.shape[2:], strict=True)]


def is_padded(window: Window, extent: int) -> bool:
    """Return whether some place of the window is outside of the map for some place of the result."""
    last = (window.output_extent(extent) - 1) * window.stride + window.dilated_extent - 1 - window.before
    return window.before > 0 or last >= extent


@dataclass(frozen=True)
class WindowPlaces:
    """Pixels and taps of a convolution as parts of addresses.

    Attributes
    ----------
    view : GlobalView
        The map, opened: dimensions "b", "c", "x0", ...
    problem : ConvProblem
    extents : dict of str to (PrimExpr or int)
        Extents of the result's "b", "y0", "y1", ..., outermost first.
    batches : int
        How many of them, from the outermost on, are batch dimensions "b0", "b1", ... of the product; the others are
        its rows.
    """

    view: GlobalView
    problem: ConvProblem
    extents: dict[str, Expr]
    batches: int

    @property
    def kind(self) -> str:
        """Type of places in the map: int32 where that is enough."""
        shape = self.problem.data.shape
        is_small = all(isinstance(size, int) for size in shape) and prod(map(int, shape)) < 1 << 30
        return "int32" if is_small else "int64"

    @property
    def channels(self) -> int:
        """Number of channels of the map in a group."""
        channels = self.problem.weight.shape[1]
        assert isinstance(channels, int)
        return channels

    @property
    def has_padding(self) -> bool:
        """True if taps may see no map."""
        return any(is_padded(window, extent) for window, extent in axes_of(self.problem))

    def pixel(self, at: Coordinates, row: Expr) -> tuple[Expr, Expr]:
        """Offset of the element that the first tap of a row of the product sees, and bits of the taps that see the map.

        Parameters
        ----------
        at : Coordinates
            Coordinates of the batch, and of the group "g" where there are several.
        row : PrimExpr
            One that exists.
        """
        row = T.bind(T.Cast(self.kind, row))
        names = list(self.extents)
        places = {name: T.Cast(self.kind, at[f"b{i}"]) for i, name in enumerate(names[: self.batches])}
        inner = names[self.batches :]
        sizes = [self.extents[name] for name in inner]
        places |= zip(inner, unravel(row, sizes, place=T.bind), strict=True)
        begin = places["b"] * self.stride("b")
        if self.problem.groups > 1:
            begin = begin + T.Cast(self.kind, at["g"]) * (self.channels * self.stride("c"))
        seen: Expr = T.uint32(0)
        shift = 0
        for d, (window, extent) in enumerate(axes_of(self.problem)):
            position = T.bind(places[f"y{d}"] * window.stride - window.before)
            begin = begin + position * self.stride(f"x{d}")
            if not is_padded(window, extent):
                continue
            for tap in range(window.size):
                there = position + tap * window.dilation
                inside = tirx.all(there >= 0, there < extent)
                seen = T.bitwise_or(seen, T.Select(inside, T.uint32(1 << shift + tap), T.uint32(0)))
            shift += window.size
        return begin, seen

    def tap(self, number: Expr) -> tuple[Expr, Expr]:
        """Distance of a tap's element from that of the first tap, and the bits that say so; None for none."""
        return self.tap_at(unravel(number, [window.size for window in self.problem.windows], place=T.bind))

    def tap_at(self, taps: Sequence[Expr]) -> tuple[Expr, Expr]:
        """As `tap`, by its place along each dimension of the window."""
        moved: Expr = tirx.const(0, self.kind)
        bits: Expr = None
        shift = 0
        for d, (window, extent) in enumerate(axes_of(self.problem)):
            moved = moved + T.Cast(self.kind, taps[d]) * (window.dilation * self.stride(f"x{d}"))
            if is_padded(window, extent):
                bit = T.shift_left(T.uint32(1), T.Cast("uint32", taps[d] + shift))
                bits = bit if bits is None else T.bitwise_or(bits, bit)
                shift += window.size
        return T.bind(moved), bits if bits is None else T.bind(bits)

    @property
    def vector(self) -> int:
        """Channels of a pixel that lie side by side, at multiples of so many elements: a power of two up to 16."""
        if self.view.index_map[self.view.layout.outer_perm[-1]] != "c":
            return 1
        return next(lanes for lanes in (16, 8, 4, 2, 1) if self.channels % lanes == 0)

    def element(self, k: Expr, inner: Expr = 0, depth: int = 0) -> tuple[Expr, Expr]:
        """As `tap`, of a tap and a channel: of element ``k + inner`` of k, in which channels are innermost.

        Where all of `depth` neighbours are of one tap, which one does not depend on `inner`: threads find out together.
        """
        is_shared = depth > 0 and self.channels % depth == 0
        k = T.bind(T.Cast("int32", k if is_shared else k + inner))
        moved, bits = self.tap(T.bind(T.truncdiv(k, self.channels)))
        channel = T.truncmod(k, self.channels)
        if is_shared:
            channel = channel + T.Cast("int32", inner)
        return T.bind(moved + T.Cast(self.kind, channel) * self.stride("c")), bits

    def stride(self, name: str) -> int:
        """Elements from one to the next along a dimension of the map."""
        stride = self.view.stride(name)
        assert isinstance(stride, int), "only the batch is symbolic, which is outermost"
        return stride
