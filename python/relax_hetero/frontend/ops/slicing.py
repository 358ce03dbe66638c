"""Slice, by constant or dynamic numbers, and Split."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx

from ..joined_sizes import analyzer_for, simplified
from .elementwise import cast
from .node import Dim, Node, Position, const, dtype_of
from .required_sizes import as_expr, equal, require_multiple, require_shape, shown
from .run_time.numbers import dims_at_run_time, dims_of_vector, require_axes, sizes_of
from .table import converts

_UNBOUNDED = 2**31 - 1  # exporters write this for "to the end"
_MAX_STEP = 2**48  # longer than any axis; clamped to avoid overflow


@converts("Slice")
def slice_(node: Node) -> relax.Expr:
    """Python's slicing of some axes; bounds are clamped to the axis."""
    if node.opset < 10:
        attributes = [node.attributes.get(name) for name in ("starts", "ends", "axes")]
        inputs = [node.inputs[0], *(None if values is None else const(values, "int64") for values in attributes), None]
        node = node.as_op("Slice", inputs, opset=13)
    data = node.tensor(0)
    rank = node.rank(data)
    starts, ends = node.dims(1), node.dims(2)
    axes, steps = _optional_numbers(node, 3), _optional_numbers(node, 4)
    if starts is None or ends is None or axes is None or steps is None or not all(map(_has_sign, [*starts, *ends])):
        return _slice_at_run_time(node, data)
    targets = [node.axis(int(axis), rank) for axis in axes] if axes.size else list(range(len(starts)))
    strides = [max(min(int(step), _MAX_STEP), -_MAX_STEP) for step in steps] if steps.size else [1] * len(starts)
    if not len(targets) == len(strides) == len(starts) == len(ends):
        raise node.refusal(f"has {len(starts)} starts, {len(ends)} ends, {len(targets)} axes and {len(strides)} steps")
    if 0 in strides:
        raise node.refusal("a step is 0")
    if len(set(targets)) != len(targets):
        raise node.refusal(f"slices an axis twice: axes {targets}")
    dims = node.shape(data)
    ranges = [
        _range(dims[axis], start, end, step)
        for axis, start, end, step in zip(targets, starts, ends, strides, strict=True)
    ]
    return slice_axes(node, data, dict(zip(targets, ranges, strict=True)))


def _optional_numbers(node: Node, index: int) -> np.ndarray | None:
    """Value of an optional vector input: empty if absent, None if dynamic."""
    return node.constant(index) if node.has(index) else np.zeros(0, "int64")


def _has_sign(position: Dim) -> bool:
    """Return whether the sign of a position is known."""
    return isinstance(position, int) or _is_from_front(position) or analyzer_for(position).can_prove(position < 0)


def _is_from_front(position: Dim) -> bool:
    if isinstance(position, int):
        return position >= 0
    return bool(analyzer_for(position).can_prove(position >= 0))


def _range(size: Dim, start: Dim, end: Dim, step: int) -> tuple[Dim, Dim, int]:
    """First element, number of elements and step, for one axis."""
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int):
        # ONNX's clamping differs from Python's for a start before the axis and a negative step.
        ends = (0, size, 0, size) if step > 0 else (0, size - 1, -1, size - 1)
        first = min(max(start + size if start < 0 else start, ends[0]), ends[1])
        last = min(max(end + size if end < 0 else end, ends[2]), ends[3])
        return first, len(range(first, last, step)), step
    low, high = (0, size) if step > 0 else (-1, size - 1)

    def clamp(position: Dim, is_end: bool) -> Any:
        if isinstance(position, int):
            if position >= _UNBOUNDED:
                return high
            if position <= -_UNBOUNDED or (position == 0 and step > 0):
                return low if is_end or step > 0 else 0
            position = tirx.const(position, "int64")
        index = position + (0 if _is_from_front(position) else size)
        return simplified(tirx.max(tirx.min(index, high), low if is_end or step > 0 else 0))

    first, last = clamp(start, False), clamp(end, True)
    distance = last - first if step > 0 else first - last
    count = tvm.tirx.floordiv(distance + (abs(step) - 1), abs(step)) if abs(step) > 1 else distance
    is_whole = not isinstance(distance, int) and distance is size
    if step < 0:  # an empty axis lacks a first element
        count = tirx.min(count, size)
    return first, size if is_whole else _not_negative(count), step


def _not_negative(count: Any) -> Dim:
    return max(count, 0) if isinstance(count, int) else simplified(tirx.max(count, 0))


def slice_axes(node: Node, data: relax.Expr, ranges: dict[int, tuple[Dim, Dim, int]]) -> relax.Expr:
    """Slice axes: for each the first element, the count and the step."""
    dims = node.shape(data)
    sizes = [ranges[axis][1] if axis in ranges else dim for axis, dim in enumerate(dims)]
    if any(isinstance(size, int) and size == 0 for size in sizes):
        return node.filled(sizes, 0, dtype_of(data))
    is_simple = all(
        isinstance(dims[axis], int) and isinstance(first, int) and isinstance(count, int) and step > 0
        for axis, (first, count, step) in ranges.items()
    )
    if is_simple:
        axes = sorted(ranges)
        static_ranges = [(int(ranges[axis][0]), int(ranges[axis][1]), ranges[axis][2]) for axis in axes]
        first, steps = [start for start, _, _ in static_ranges], [step for _, _, step in static_ranges]
        last = [start + (count - 1) * step + 1 for start, count, step in static_ranges]
        return node.emit(relax.op.strided_slice(data, axes, first, last, steps))

    def element(i: Position, x: te.Tensor, first: list[Any]) -> tirx.Expr:
        indices = list(i)
        for axis, start in zip(ranges, first, strict=True):
            indices[axis] = start + i[axis] * ranges[axis][2]
        return x(*indices)

    # The starts are arguments, because their symbols may not occur in the shapes of operands or result.
    starts = [tirx.const(start, "int64") if isinstance(start, int) else start for start, _, _ in ranges.values()]
    return node.kernel("slice", element, data, starts, shape=sizes)


def _slice_at_run_time(node: Node, data: relax.Expr) -> relax.Expr:
    """Scatter all bounds to vectors over all axes; the sizes of the result are read from a vector at run time."""
    rank = node.rank(data)
    starts, ends = (cast(node, node.tensor(i), "int64") for i in (1, 2))
    (count,) = node.static_shape(starts)
    axes = cast(node, node.tensor(3), "int64") if node.has(3) else const(np.arange(count), "int64")
    steps = cast(node, node.tensor(4), "int64") if node.has(4) else const(np.ones(count), "int64")
    for values, subject in ((ends, "its ends"), (axes, "its axes"), (steps, "its steps")):
        require_shape(node, values, [count], subject)
    require_axes(node, axes, rank)
    for step in dims_of_vector(node, steps, "step"):
        node.require(step != 0 if isinstance(step, int) else tirx.NE(step, as_expr(0)), "a step is 0")
    zero, one, max_step = const(0, "int64"), const(1, "int64"), const(_MAX_STEP, "int64")
    steps = node.emit(relax.op.maximum(relax.op.minimum(steps, max_step), const(-_MAX_STEP, "int64")))

    emit = node.emit

    def scatter(default: relax.Expr, values: relax.Expr) -> relax.Expr:
        return emit(relax.op.scatter_elements(default, axes, values, 0))

    axes = emit(relax.op.where(axes < zero, axes + const(rank, "int64"), axes))
    axes = emit(relax.op.clip(axes, 0, rank - 1))
    size = sizes_of(node, data)
    step = scatter(const(np.ones(rank), "int64"), steps)
    forward = emit(step > zero)
    last = emit(size - one)
    high = emit(relax.op.where(forward, size, last))
    begin = scatter(emit(relax.op.where(forward, const(np.zeros(rank), "int64"), last)), starts)
    end = scatter(emit(relax.op.where(forward, size, const(np.full(rank, -(2**62)), "int64"))), ends)

    def clamp(position: relax.Expr, low: relax.Expr) -> relax.Expr:
        from_back = relax.op.where(position < zero, position + size, position)
        return emit(relax.op.maximum(relax.op.minimum(from_back, high), low))

    begin = clamp(begin, zero)
    end = clamp(end, emit(relax.op.where(forward, zero, const(-1, "int64"))))
    distance = emit(end - begin)
    distance = emit(relax.op.where(forward, distance, -distance))
    width = emit(relax.op.maximum(relax.op.abs(step), one))
    padded_distance = distance + width - one
    counts = emit(relax.op.minimum(relax.op.maximum(padded_distance // width, zero), size))
    dims: list[Dim] = list(dims_at_run_time(node, counts, "slice_dim"))
    sliced = node.constant(3) if node.has(3) else np.arange(count)
    if sliced is not None:  # other axes keep their size
        changed = {node.axis(int(axis), rank) for axis in sliced}
        dims = [dims[axis] if axis in changed else dim for axis, dim in enumerate(node.shape(data))]

    # Other axes start at 0 with step 1.
    def element(i: Position, x: te.Tensor, first: te.Tensor, stride: te.Tensor) -> tirx.Expr:
        return x(*(first(a) + index * stride(a) for a, index in enumerate(i)))

    return node.kernel("slice", element, data, begin, step, shape=dims)


@converts("Split")
def split(node: Node) -> relax.Expr:
    """Split an axis by given sizes, which may be 0, or into equal parts with a possibly smaller last one."""
    data = node.tensor(0)
    axis = node.axis(node.attribute("axis", 0), node.rank(data))
    size = node.shape(data)[axis]
    sizes = dims_of_vector(node, node.tensor(1), "part") if node.has(1) else node.attribute("split")
    if sizes is None:
        parts = int(node.attribute("num_outputs", node.num_outputs))
        if node.opset < 18:
            require_multiple(node, size, parts, "splits an axis of")
            if not isinstance(size, int):
                return node.emit(relax.op.split(data, parts, axis))
        node.check_ops(parts)
        part = tirx.ceildiv(size, parts) if not isinstance(size, int) else -(-size // parts)
        sizes = [part] * (parts - 1) + [size - part * (parts - 1)]
    text = f"splits an axis of {size} into parts of {shown(sizes)}"
    if len(sizes) != node.num_outputs:
        raise node.refusal(f"{text}, but has {node.num_outputs} outputs")
    total: Dim = 0
    for part in sizes:
        node.require(tirx.all(as_expr(part) >= 0, as_expr(part) <= as_expr(size)), text)
        total = total + part
    node.require(equal(total, size), text)
    fields, start = [], 0
    for part in sizes:
        fields.append(slice_axes(node, data, {axis: (start, part, 1)}))
        start = start + part
    return relax.Tuple(fields) if len(fields) > 1 else fields[0]
