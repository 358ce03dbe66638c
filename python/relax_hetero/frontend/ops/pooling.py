"""Pooling over windows and over whole images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
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
    """The windows of a pooling node, per spatial axis."""

    image: list[Dim]  # sizes of the image
    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    # Padding; with `ceil_mode`, windows may extend beyond it.
    before: list[Dim]
    after: list[Dim]
    output: list[Dim]  # number of windows
    exceeds_input: bool

    def steps(self) -> list[tirx.IterVar]:
        """Reduction axes over the elements of a window."""
        return [te.reduce_axis((0, size), name=f"k{a}") for a, size in enumerate(self.kernel)]

    def indices(self, windows: Sequence[Any], steps: Sequence[Any]) -> list[tirx.Expr]:
        """Index in the image (or its padding) of element `steps` of window `windows`."""
        return [
            window * self.strides[a] + step * self.dilations[a] - self.before[a]
            for a, (window, step) in enumerate(zip(windows, steps, strict=True))
        ]

    def pads(self) -> list[int] | None:
        """Padding before and after the image that contains every window.

        None if it is dynamic or negative.
        """
        after = []
        for a, (size, count) in enumerate(zip(self.image, self.output, strict=True)):
            extent = (self.kernel[a] - 1) * self.dilations[a] + 1
            if self.exceeds_input and not isinstance(size, int):
                return None
            if self.exceeds_input and isinstance(count, int):
                floor_count = (size + self.before[a] + self.after[a] - extent) // self.strides[a] + 1
                required_pad = (count - 1) * self.strides[a] + extent - size - self.before[a]
                after.append(self.after[a] if floor_count == count else required_pad)
            else:
                after.append(self.after[a])
        pads = [pad for pad in (*self.before, *after) if isinstance(pad, int)]
        return pads if len(pads) == 2 * len(after) and min(pads[len(after) :]) >= 0 else None

    def inside(self, indices: Sequence[tirx.Expr]) -> tirx.Expr:
        """Condition that an index is in the image."""
        checks = [tirx.all(index >= 0, index < self.image[a]) for a, index in enumerate(indices)]
        return tirx.all(*checks)


def windows_of(node: Node, data: relax.Expr) -> Windows:
    """Compute the windows from the node's attributes."""
    image = node.shape(data)[2:]
    kernel = [int(size) for size in node.attribute("kernel_shape")]
    count = len(kernel)
    if count != len(image):
        raise node.refusal(f"kernel_shape is {kernel}, but the image has {len(image)} axes")
    strides, dilations = spatial(node, "strides", count, 1), spatial(node, "dilations", count, 1)
    pads = pads_of(node, list(image), kernel, strides, dilations)
    before, after = pads[:count], pads[count:]
    # With auto_pad the padding determines the number of windows; ceil_mode applies to explicit padding only.
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
            is_auto_padded = not isinstance(before[a], int)  # SAME padding yields ceil(size / stride) windows
            output.append(tirx.ceildiv(size, strides[a]) if is_auto_padded else span // strides[a] + 1)
            continue
        # A window that starts in the padding after the image is dropped.
        if isinstance(size, int):
            windows = -(-span // strides[a]) + 1
            output.append(windows - 1 if (windows - 1) * strides[a] >= size + before[a] else windows)
            continue
        count_up, num_starts = tirx.ceildiv(span, strides[a]) + 1, tirx.ceildiv(size + before[a], strides[a])
        starts_inside = after[a] + strides[a] <= (kernel[a] - 1) * dilations[a] + 1
        output.append(simplified(count_up if starts_inside else tirx.min(count_up, num_starts)))
    return Windows(image, kernel, strides, dilations, before, after, output, rounds_up)


@converts("MaxPool")
def max_pool(node: Node) -> relax.Expr:
    """Largest element of every window, and optionally its flat index."""
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
    reducer = te.comm_reducer(lambda a, b: tirx.max(a, b), lambda dtype: lowest(str(dtype)))

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        indices = windows.indices(i[2:], steps)
        value = tirx.if_then_else(windows.inside(indices), x(*i[:2], *indices), lowest(str(x.dtype)))
        return reducer(value, axis=steps)

    dtype = dtype_of(data)
    wide = cast(node, data, "float32") if dtype == "bfloat16" else data
    shape = [*node.shape(data)[:2], *windows.output]
    return cast(node, node.kernel("max_pool", element, wide, shape=shape), dtype)


def _max_pool_with_indices(node: Node, data: relax.Expr, windows: Windows) -> relax.Expr:
    dtype, count = dtype_of(data), len(windows.kernel)
    column_major = bool(node.attribute("storage_order", 0))

    def better(first: Sequence[tirx.Expr], b: Sequence[tirx.Expr]) -> tuple[tirx.Expr, tirx.Expr]:
        is_better = tirx.any(first[1] > b[1], tirx.all(first[1] == b[1], first[0] < b[0]))
        return tirx.Select(is_better, first[0], b[0]), tirx.Select(is_better, first[1], b[1])

    def worst(index_type: str, value_type: str) -> tuple[tirx.Expr, tirx.Expr]:
        return tvm.tirx.max_value(index_type), lowest(value_type)

    def compute(x: te.Tensor) -> list[te.Tensor]:
        steps = windows.steps()
        reducer = te.comm_reducer(better, worst, name="largest_at")

        def pair(n: tirx.Expr, c: tirx.Expr, *window: tirx.Expr) -> Any:
            indices = windows.indices(window, steps)
            index = prod(windows.image[:count], start=tirx.Cast("int64", n * x.shape[1] + c))
            offset = tirx.const(0, "int64")
            for a in reversed(range(count)) if column_major else range(count):
                offset = offset * windows.image[a] + indices[a]
            inside = windows.inside(indices)
            flat_index = tirx.if_then_else(inside, index + offset, tvm.tirx.max_value("int64"))
            return reducer((flat_index, tirx.if_then_else(inside, x(n, c, *indices), lowest(dtype))), axis=steps)

        results = te.compute([*x.shape[:2], *windows.output], pair, name="max_pool_at")
        return [results[1], results[0]]

    return node.builder.emit_te(compute, data, primfunc_name_hint="max_pool_with_indices")


def _window_sum(node: Node, data: relax.Expr, windows: Windows, term: Any) -> relax.Expr:
    """Sum of `term(element)` over the elements of every window in the image."""
    steps = windows.steps()

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        indices = windows.indices(i[2:], steps)
        value = tirx.if_then_else(windows.inside(indices), term(x(*i[:2], *indices)), tirx.const(0, str(x.dtype)))
        return te.sum(value, axis=steps)

    return node.kernel("window_sum", element, data, shape=[*node.shape(data)[:2], *windows.output])


def _window_sizes(node: Node, windows: Windows, counts_padding: bool, dtype: str) -> relax.Expr:
    """Number of counted elements of every window, broadcastable with the sums."""
    output = [size for size in windows.output if isinstance(size, int)]
    if len(output) != len(windows.output):
        return _window_sizes_at_run_time(node, windows, counts_padding, dtype)
    counts: Any = 1
    for a, size in enumerate(output):
        bound = windows.image[a] + (windows.after[a] if counts_padding else 0)
        first = -windows.before[a] if counts_padding else 0
        node.check_constant_size(*output[: a + 1])
        starts = np.arange(size) * windows.strides[a] - windows.before[a]
        # Steps before the first counted index, and before the first index after them.
        skipped, reached = (
            np.clip(-((starts - end) // windows.dilations[a]), 0, windows.kernel[a]) for end in (first, bound)
        )
        shape = [1] * (2 + len(output))
        shape[2 + a] = size
        counts = counts * (reached - skipped).reshape(shape)
    return const(counts, dtype)


def _window_sizes_at_run_time(node: Node, windows: Windows, counts_padding: bool, dtype: str) -> relax.Expr:
    """`_window_sizes` for images of dynamic size."""

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
    """Mean of every window over its elements in the image, or with `count_include_pad` also in the padding."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    wide = widened(node, data)
    windows = windows_of(node, data)
    counts_padding = bool(node.attribute("count_include_pad", 0))
    count = len(windows.kernel)
    pads = windows.pads()
    exceeds_padding = counts_padding and pads is not None and pads[count:] != windows.after
    if pads is None or exceeds_padding or count > 3 or any(dilation != 1 for dilation in windows.dilations):
        total = _window_sum(node, wide, windows, lambda value: value)
        sizes = _window_sizes(node, windows, counts_padding, dtype_of(wide))
        return cast(node, node.emit(total / sizes), dtype)
    operation = (relax.op.nn.avg_pool1d, relax.op.nn.avg_pool2d, relax.op.nn.avg_pool3d)[count - 1]
    result = operation(wide, windows.kernel, windows.strides, pads, windows.dilations, False, counts_padding)
    return cast(node, node.emit(result), dtype)


def _norm_order(node: Node) -> int:
    order = node.attribute("p", 2)
    if order < 1:
        raise node.refusal(f"p is {order}, expected 1 or more")
    return int(order)


def _root(node: Node, total: relax.Expr, order: int) -> relax.Expr:
    if order == 1:
        return total
    if order == 2:
        return node.emit(relax.op.sqrt(total))
    return node.emit(total ** const(1.0 / order, dtype_of(total)))


@converts("LpPool")
def lp_pool(node: Node) -> relax.Expr:
    """The p-norm of every window."""
    data = node.tensor(0)
    order, dtype = _norm_order(node), dtype_of(data)
    wide = widened(node, data)

    def term(value: tirx.Expr) -> tirx.Expr:
        size = tirx.abs(value)
        return math.prod([size] * (order - 1), start=size)

    return cast(node, _root(node, _window_sum(node, wide, windows_of(node, data), term), order), dtype)


@converts("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(node: Node) -> relax.Expr:
    """Pool over all spatial axes, which become 1."""
    data = node.tensor(0)
    dtype, axes = dtype_of(data), list(range(2, node.rank(data)))
    for axis, size in enumerate(node.shape(data)[2:]):
        node.require(as_expr(size) >= 1, f"axis {axis + 2} of its input has {size} elements")
    if node.op_type == "GlobalMaxPool":
        return node.emit(relax.op.max(data, axes, keepdims=True))
    wide = widened(node, data)
    if node.op_type == "GlobalAveragePool":
        return cast(node, node.emit(relax.op.mean(wide, axes, keepdims=True)), dtype)
    order = _norm_order(node)
    size = node.emit(relax.op.abs(wide))
    power = size
    for _ in range(order - 1):
        power = node.emit(power * size)
    total = node.emit(relax.op.sum(power, axes, keepdims=True))
    return cast(node, _root(node, total, order), dtype)
