"""Pooling over windows, and over whole images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx

from ..joined_sizes import simplified
from .convolution import pads_of, spatial
from .elementwise import cast, widened
from .node import Dim, Node, Position, const, dtype_of
from .reductions import lowest
from .required_sizes import as_expr
from .table import converts


@dataclass(frozen=True)
class Windows:
    """The windows of a pooling node, per spatial axis.

    Attributes
    ----------
    image : list of Dim
        Sizes of the image.
    before, after : list of Dim
        padding; windows may also reach beyond it where sizes are rounded up (`ceil_mode`).
    output : list of Dim
        How many windows there are.
    """

    image: list[Dim]
    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[Dim]
    after: list[Dim]
    output: list[Dim]
    exceeds_input: bool

    def steps(self) -> list[tirx.IterVar]:
        """The axes of a reduction over the elements of a window."""
        return [te.reduce_axis((0, size), name=f"k{a}") for a, size in enumerate(self.kernel)]

    def indices(self, windows: Sequence[Any], steps: Sequence[Any]) -> list[tirx.Expr]:
        """The element of the image (or of its padding) that step `steps` of window `windows` is at."""
        return [
            window * self.strides[a] + step * self.dilations[a] - self.before[a]
            for a, (window, step) in enumerate(zip(windows, steps, strict=True))
        ]

    def pads(self) -> list[int] | None:
        """Padding before and after the image that contains every window, also those that reach beyond the node's.

        None where only a call knows it, or where it is negative.
        """
        after = []
        for a, (size, count) in enumerate(zip(self.image, self.output, strict=True)):
            extent = (self.kernel[a] - 1) * self.dilations[a] + 1
            if self.exceeds_input and not isinstance(size, int):
                return None
            if self.exceeds_input and isinstance(count, int):
                whole = (size + self.before[a] + self.after[a] - extent) // self.strides[a] + 1
                needed = (count - 1) * self.strides[a] + extent - size - self.before[a]
                after.append(self.after[a] if whole == count else needed)
            else:
                after.append(self.after[a])
        pads = [pad for pad in (*self.before, *after) if isinstance(pad, int)]
        return pads if len(pads) == 2 * len(after) and min(pads[len(after) :]) >= 0 else None

    def inside(self, indices: Sequence[tirx.Expr]) -> tirx.Expr:
        """Return whether a place is in the image."""
        checks = [tirx.all(place >= 0, place < self.image[a]) for a, place in enumerate(indices)]
        return tirx.all(*checks)


def windows_of(node: Node, data: relax.Expr) -> Windows:
    """Work out the windows from the node's attributes."""
    image = node.shape(data)[2:]
    kernel = [int(size) for size in node.attribute("kernel_shape")]
    count = len(kernel)
    if count != len(image):
        raise node.refusal(f"kernel_shape is {kernel}, but the image has {len(image)} axes")
    strides, dilations = spatial(node, "strides", count, 1), spatial(node, "dilations", count, 1)
    pads = pads_of(node, list(image), kernel, strides, dilations)
    before, after = pads[:count], pads[count:]
    # With auto_pad the number of windows is given by the padding; only explicit padding is rounded up.
    rounds_up = bool(node.attribute("ceil_mode", 0)) and node.attribute("auto_pad", "NOTSET") in ("NOTSET", "", "VALID")
    for a, size in enumerate(image):
        node.require(as_expr(size) >= 1, f"axis {a + 2} of its input has {size} elements")
        extent = (kernel[a] - 1) * dilations[a] + 1
        text = f"its windows span {extent} elements of axis {a + 2}, which has {size} and padding"
        node.require(as_expr(size) + before[a] + after[a] >= extent - (strides[a] if rounds_up else 0), text)
    output: list[Dim] = []
    for a, size in enumerate(image):
        span = size + before[a] + after[a] - (kernel[a] - 1) * dilations[a] - 1
        if not rounds_up:
            is_same = not isinstance(before[a], int)  # as many windows as strides: what the padding is made for
            output.append(tirx.ceildiv(size, strides[a]) if is_same else span // strides[a] + 1)
            continue
        # A window that would start in the padding after the image is dropped.
        if isinstance(size, int):
            windows = -(-span // strides[a]) + 1
            output.append(windows - 1 if (windows - 1) * strides[a] >= size + before[a] else windows)
            continue
        count_up, starts = tirx.ceildiv(span, strides[a]) + 1, tirx.ceildiv(size + before[a], strides[a])
        starts_inside = after[a] + strides[a] <= (kernel[a] - 1) * dilations[a] + 1
        output.append(simplified(count_up if starts_inside else tirx.min(count_up, starts)))
    return Windows(image, kernel, strides, dilations, before, after, output, rounds_up)


@converts("MaxPool")
def max_pool(node: Node) -> relax.Expr:
    """Largest element of every window, with its flat index where that is asked for."""
    data = node.tensor(0)
    windows = windows_of(node, data)
    count = len(windows.kernel)
    if node.num_outputs > 1:
        return _max_pool_with_indices(node, data, windows)
    pads = windows.pads()
    if pads is None or count > 3 or dtype_of(data) == "bfloat16":
        return _max_pool(node, data, windows)
    operation = (relax.op.nn.max_pool1d, relax.op.nn.max_pool2d, relax.op.nn.max_pool3d)[count - 1]
    return node.emit(operation(data, windows.kernel, windows.strides, pads, windows.dilations))


def _max_pool(node: Node, data: relax.Expr, windows: Windows) -> relax.Expr:
    steps = windows.steps()
    reducer = te.comm_reducer(lambda one, other: tirx.max(one, other), lambda dtype: lowest(str(dtype)))

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        places = windows.indices(i[2:], steps)
        value = tirx.if_then_else(windows.inside(places), x(*i[:2], *places), lowest(str(x.dtype)))
        return reducer(value, axis=steps)

    dtype = dtype_of(data)
    wide = cast(node, data, "float32") if dtype == "bfloat16" else data
    shape = [*node.shape(data)[:2], *windows.output]
    return cast(node, node.kernel("max_pool", element, wide, shape=shape), dtype)


def _max_pool_with_indices(node: Node, data: relax.Expr, windows: Windows) -> relax.Expr:
    dtype, count = dtype_of(data), len(windows.kernel)
    column_major = bool(node.attribute("storage_order", 0))

    def better(one: Sequence[tirx.Expr], other: Sequence[tirx.Expr]) -> tuple[tirx.Expr, tirx.Expr]:
        wins = tirx.any(one[1] > other[1], tirx.all(one[1] == other[1], one[0] < other[0]))
        return tirx.Select(wins, one[0], other[0]), tirx.Select(wins, one[1], other[1])

    def worst(index_type: str, value_type: str) -> tuple[tirx.Expr, tirx.Expr]:
        return tvm.tirx.max_value(index_type), lowest(value_type)

    def compute(x: te.Tensor) -> list[te.Tensor]:
        steps = windows.steps()
        reducer = te.comm_reducer(better, worst, name="largest_at")

        def pair(n: tirx.Expr, c: tirx.Expr, *window: tirx.Expr) -> Any:
            places = windows.indices(window, steps)
            index = tirx.Cast("int64", n * x.shape[1] + c)
            for a in range(count):
                index = index * windows.image[a]
            offset = tirx.const(0, "int64")
            for a in reversed(range(count)) if column_major else range(count):
                offset = offset * windows.image[a] + places[a]
            inside = windows.inside(places)
            where = tirx.if_then_else(inside, index + offset, tvm.tirx.max_value("int64"))
            return reducer((where, tirx.if_then_else(inside, x(n, c, *places), lowest(dtype))), axis=steps)

        found = te.compute([*x.shape[:2], *windows.output], pair, name="max_pool_at")
        return [found[1], found[0]]

    return node.builder.emit_te(compute, data, primfunc_name_hint="max_pool_with_indices")


def _window_sum(node: Node, data: relax.Expr, windows: Windows, term: Any) -> relax.Expr:
    """Sum of `term(element)` over the elements of every window that are in the image."""
    steps = windows.steps()

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        places = windows.indices(i[2:], steps)
        value = tirx.if_then_else(windows.inside(places), term(x(*i[:2], *places)), tirx.const(0, str(x.dtype)))
        return te.sum(value, axis=steps)

    return node.kernel("window_sum", element, data, shape=[*node.shape(data)[:2], *windows.output])


def _window_sizes(node: Node, windows: Windows, counts_padding: bool, dtype: str) -> relax.Expr:
    """How many elements of every window count, shaped to broadcast with the sums."""
    output = [size for size in windows.output if isinstance(size, int)]
    if len(output) != len(windows.output):
        return _window_sizes_at_run_time(node, windows, counts_padding, dtype)
    counts: Any = 1
    for a, size in enumerate(output):
        bound = windows.image[a] + (windows.after[a] if counts_padding else 0)
        first = -windows.before[a] if counts_padding else 0
        node.check_table(*output[: a + 1])
        starts = np.arange(size) * windows.strides[a] - windows.before[a]
        # Steps up to the first place that counts, and up to the first that no longer does.
        skipped, reached = (
            np.clip(-((starts - end) // windows.dilations[a]), 0, windows.kernel[a]) for end in (first, bound)
        )
        shape = [1] * (2 + len(output))
        shape[2 + a] = size
        counts = counts * (reached - skipped).reshape(shape)
    return const(counts, dtype)


def _window_sizes_at_run_time(node: Node, windows: Windows, counts_padding: bool, dtype: str) -> relax.Expr:
    """The same for images whose sizes only a call knows."""

    def element(i: Position, image: list[tirx.Expr]) -> tirx.Expr:
        counts = as_expr(1)
        for a, size in enumerate(image):
            start, step, max_taps = (
                i[2 + a] * windows.strides[a] - windows.before[a],
                windows.dilations[a],
                windows.kernel[a],
            )
            first = -windows.before[a] if counts_padding else 0
            bound = size + (windows.after[a] if counts_padding else 0)
            skipped, reached = (
                tirx.max(tirx.min(tirx.ceildiv(end - start, step), max_taps), 0) for end in (first, bound)
            )
            counts = counts * (reached - skipped)
        return counts.astype(dtype)

    image = [as_expr(size) for size in windows.image]
    return node.kernel("window_sizes", element, image, shape=[1, 1, *windows.output])


@converts("AveragePool")
def average_pool(node: Node) -> relax.Expr:
    """Mean of every window, over its elements in the image or (`count_include_pad`) in the padding too."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    wide = widened(node, data)
    windows = windows_of(node, data)
    counts_padding = bool(node.attribute("count_include_pad", 0))
    count = len(windows.kernel)
    pads = windows.pads()
    counts_beyond = counts_padding and pads is not None and pads[count:] != windows.after
    if pads is None or counts_beyond or count > 3 or any(dilation != 1 for dilation in windows.dilations):
        total = _window_sum(node, wide, windows, lambda value: value)
        sizes = _window_sizes(node, windows, counts_padding, dtype_of(wide))
        return cast(node, node.emit(relax.op.divide(total, sizes)), dtype)
    operation = (relax.op.nn.avg_pool1d, relax.op.nn.avg_pool2d, relax.op.nn.avg_pool3d)[count - 1]
    result = operation(wide, windows.kernel, windows.strides, pads, windows.dilations, False, counts_padding)
    return cast(node, node.emit(result), dtype)


def _powers(node: Node) -> int:
    order = node.attribute("p", 2)
    if order < 1:
        raise node.refusal(f"p is {order}, expected 1 or more")
    return int(order)


def _root(node: Node, total: relax.Expr, order: int) -> relax.Expr:
    if order == 1:
        return total
    if order == 2:
        return node.emit(relax.op.sqrt(total))
    return node.emit(relax.op.power(total, const(1.0 / order, dtype_of(total))))


@converts("LpPool")
def lp_pool(node: Node) -> relax.Expr:
    """The p-norm of every window."""
    data = node.tensor(0)
    order, dtype = _powers(node), dtype_of(data)
    wide = widened(node, data)

    def term(value: tirx.Expr) -> tirx.Expr:
        size = tirx.abs(value)
        return math.prod([size] * (order - 1), start=size)

    return cast(node, _root(node, _window_sum(node, wide, windows_of(node, data), term), order), dtype)


@converts("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(node: Node) -> relax.Expr:
    """Over all spatial axes, which become 1."""
    data = node.tensor(0)
    dtype, axes = dtype_of(data), list(range(2, node.rank(data)))
    for axis, size in enumerate(node.shape(data)[2:]):
        node.require(as_expr(size) >= 1, f"axis {axis + 2} of its input has {size} elements")
    if node.op_type == "GlobalMaxPool":
        return node.emit(relax.op.max(data, axes, keepdims=True))
    wide = widened(node, data)
    if node.op_type == "GlobalAveragePool":
        return cast(node, node.emit(relax.op.mean(wide, axes, keepdims=True)), dtype)
    order = _powers(node)
    size = node.emit(relax.op.abs(wide))
    power = size
    for _ in range(order - 1):
        power = node.emit(relax.op.multiply(power, size))
    total = node.emit(relax.op.sum(power, axes, keepdims=True))
    return cast(node, _root(node, total, order), dtype)
