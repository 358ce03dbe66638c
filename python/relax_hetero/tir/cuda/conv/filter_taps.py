"""Addresses of the pixels that the filter taps of a convolution read (im2col without a copy).

The offset between the elements that a tap and the first tap read is the same for all output pixels. So an address is
the sum of an offset of the output pixel, computed once, and one of the tap. Whether a tap is in bounds is a bit of a
mask of the output pixel, also computed once, with a bit for each tap along each padded dimension.
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

MAX_BITS = 32  # maximum taps along padded dimensions: bits of the mask


def unsupported_reason(problem: ConvProblem, max_bits: int | None = MAX_BITS) -> str:
    """Reason why taps cannot be addressed like this, with masks of `max_bits`; empty if they can."""
    if any(not isinstance(extent, int) for extent in problem.data.shape[1:]):
        return f"the map has symbolic extents: {problem.data.shape}"
    padded = [window.size for window, extent in axes_of(problem) if is_padded(window, extent)]
    if max_bits is not None and sum(padded) > max_bits:
        return f"padded windows have {padded} taps, expected at most {max_bits} in all"
    return ""


def axes_of(problem: ConvProblem) -> list[tuple[Window, int]]:
    """The windows, each with the extent of the feature map."""
    return [(window, int(extent)) for window, extent in zip(problem.windows, problem.data.shape[2:], strict=True)]


def is_padded(window: Window, extent: int) -> bool:
    """Return whether a tap reads padding for some output pixel."""
    last = (window.output_extent(extent) - 1) * window.stride + window.dilated_extent - 1 - window.before
    return window.before > 0 or last >= extent


@dataclass(frozen=True)
class FilterTaps:
    """Addresses of output pixels and taps in the feature map."""

    view: GlobalView  # the feature map, opened: dimensions "b", "c", "x0", ..
    problem: ConvProblem
    extents: dict[str, Expr]  # extents of the result's "b", "y0", "y1", ..., outermost first
    # Number of outermost dimensions that are batch dimensions "b0", "b1", ... of the product; the others are its rows.
    batches: int

    @property
    def kind(self) -> str:
        """Integer type of offsets in the map: int32 if it suffices."""
        shape = self.problem.data.shape
        is_small = all(isinstance(size, int) for size in shape) and prod(map(int, shape)) < 1 << 30
        return "int32" if is_small else "int64"

    @property
    def channels(self) -> int:
        """Number of input channels of a group."""
        channels = self.problem.weight.shape[1]
        assert isinstance(channels, int)
        return channels

    @property
    def has_padding(self) -> bool:
        """True if taps may read padding."""
        return any(is_padded(window, extent) for window, extent in axes_of(self.problem))

    def pixel(self, at: Coordinates, row: Expr) -> tuple[Expr, Expr]:
        """Offset of the element that the first tap reads for a row of the product, and the mask of taps in bounds.

        `at`: coordinates of the batch, and of the group "g" where there are several. `row`: row, less than the
        product's extent.
        """
        row = T.bind(T.Cast(self.kind, row))
        names = list(self.extents)
        coordinates = {name: T.Cast(self.kind, at[f"b{i}"]) for i, name in enumerate(names[: self.batches])}
        inner = names[self.batches :]
        sizes = [self.extents[name] for name in inner]
        coordinates |= zip(inner, unravel(row, sizes, place=T.bind), strict=True)
        begin = coordinates["b"] * self.stride("b")
        if self.problem.groups > 1:
            begin = begin + T.Cast(self.kind, at["g"]) * (self.channels * self.stride("c"))
        mask: Expr = T.uint32(0)
        shift = 0
        for d, (window, extent) in enumerate(axes_of(self.problem)):
            position = T.bind(coordinates[f"y{d}"] * window.stride - window.before)
            begin = begin + position * self.stride(f"x{d}")
            if not is_padded(window, extent):
                continue
            for tap in range(window.size):
                position_of_tap = position + tap * window.dilation
                is_inside = tirx.all(position_of_tap >= 0, position_of_tap < extent)
                mask = T.bitwise_or(mask, T.Select(is_inside, T.uint32(1 << shift + tap), T.uint32(0)))
            shift += window.size
        return begin, mask

    def tap(self, number: Expr) -> tuple[Expr, Expr]:
        """Offset of a tap from the first tap, and its bits of the mask (None without padding)."""
        return self.tap_at(unravel(number, [window.size for window in self.problem.windows], place=T.bind))

    def tap_at(self, taps: Sequence[Expr]) -> tuple[Expr, Expr]:
        """Like `tap`, for a tap given by its coordinates in the window."""
        offset: Expr = tirx.const(0, self.kind)
        bits: Expr = None
        shift = 0
        for d, (window, extent) in enumerate(axes_of(self.problem)):
            offset = offset + T.Cast(self.kind, taps[d]) * (window.dilation * self.stride(f"x{d}"))
            if is_padded(window, extent):
                bit = T.shift_left(T.uint32(1), T.Cast("uint32", taps[d] + shift))
                bits = bit if bits is None else T.bitwise_or(bits, bit)
                shift += window.size
        return T.bind(offset), bits if bits is None else T.bind(bits)

    @property
    def vector(self) -> int:
        """Contiguous aligned channels of a pixel: a power of two up to 16."""
        if self.view.index_map[self.view.layout.outer_perm[-1]] != "c":
            return 1
        return next(lanes for lanes in (16, 8, 4, 2, 1) if self.channels % lanes == 0)

    def element(self, k: Expr, inner: Expr = 0, depth: int = 0) -> tuple[Expr, Expr]:
        """Like `tap`, for element ``k + inner`` of the reduction dimension, in which channels are innermost.

        If `depth` neighbours always belong to one tap, it is computed from `k` alone, which threads share.
        """
        is_shared = depth > 0 and self.channels % depth == 0
        k = T.bind(T.Cast("int32", k if is_shared else k + inner))
        offset, bits = self.tap(T.bind(T.truncdiv(k, self.channels)))
        channel = T.truncmod(k, self.channels)
        if is_shared:
            channel = channel + T.Cast("int32", inner)
        return T.bind(offset + T.Cast(self.kind, channel) * self.stride("c")), bits

    def stride(self, name: str) -> int:
        """Stride of a dimension of the map, in elements."""
        stride = self.view.stride(name)
        assert isinstance(stride, int), "only the batch is symbolic, which is outermost"
        return stride
