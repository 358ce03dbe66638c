"""Resize and Upsample: along each axis, every output element is a weighted sum of a few input elements.

Their indices and weights are computed at import by the definitions of ONNX's Resize (opset 19 and earlier forms), so
that all modes, coordinate transformations and the antialiasing filter use one kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax, te, tirx

from ...vm.resize_taps import (
    BELOW_OR_ABOVE,
    ResizedAxis,
    ResizeForm,
    ResizeTaps,
    check_numbers,
    fractional_size_error,
    sizes_by_policy,
    tap_count,
    taps,
)
from .elementwise import cast
from .node import Node, Position, as_constant, const, dtype_of, is_float
from .required_sizes import as_expr, require_equal, require_shape
from .run_time.numbers import dims_of_vector
from .run_time.run_time_resizing import resize_at_run_time, rounded_to
from .table import convert_by_stock, converts

_MAX_UNROLLED_TAPS = 16  # sums of up to this number of taps are unrolled: bilinear has 4, bicubic 16


def form_of(node: Node, mode: str, transformation: str, has_scales: bool = False) -> ResizeForm:
    """Form of a resize by a node's attributes."""
    return ResizeForm(
        mode,
        transformation,
        node.attribute("nearest_mode", "round_prefer_floor"),
        node.attribute("cubic_coeff_a", -0.75),
        bool(node.attribute("antialias", 0)),
        bool(node.attribute("exclude_outside", 0)),
        has_scales,
    )


def _apply(node: Node, data: relax.Expr, axis: int, table: ResizeTaps) -> relax.Expr:
    dtype = dtype_of(data)
    if table.indices.shape[1] == 1:
        result = node.emit(relax.op.take(data, const(table.indices[:, 0], "int64"), axis, "fast"))
    else:
        result = _weighted_sum(node, data, axis, table)
    if table.outside is None or not table.outside.any():
        return result
    mask = table.outside.reshape([-1 if i == axis else 1 for i in range(node.rank(data))])
    return node.emit(relax.op.where(const(mask), const(node.attribute("extrapolation_value", 0.0), dtype), result))


def _weighted_sum(node: Node, data: relax.Expr, axis: int, table: ResizeTaps) -> relax.Expr:
    tap = te.reduce_axis((0, table.indices.shape[1]), name="tap")

    def element(i: Position, x: te.Tensor, indices: te.Tensor, weights: te.Tensor) -> tirx.Expr:
        return te.sum(weights(i[axis], tap) * x(*i[:axis], indices(i[axis], tap), *i[axis + 1 :]), axis=tap)

    shape = [table.indices.shape[0] if i == axis else size for i, size in enumerate(node.shape(data))]
    indices, weights = const(table.indices, "int32"), const(table.weights, dtype_of(data))
    return node.kernel("resize", element, data, indices, weights, shape=shape)


def _weighted_sum_at_once(node: Node, data: relax.Expr, tables: dict[int, ResizeTaps]) -> relax.Expr:
    """Resize all axes by gathers and weights: ops that layout passes can permute and that fuse into one kernel."""
    total = data
    for number, combination in enumerate(itertools.product(*(range(len(t.weights[0])) for t in tables.values()))):
        part, weights = data, np.ones((), "float64")
        for (axis, table), tap in zip(tables.items(), combination, strict=True):
            part = node.emit(relax.op.take(part, const(table.indices[:, tap], "int64"), axis, "fast"))
            shape = [-1 if i == axis else 1 for i in range(node.rank(data))]
            weights = weights * table.weights[:, tap].reshape(shape)
        part = node.emit(part * const(weights, dtype_of(data)))
        total = node.emit(total + part) if number else part
    return total


def _resize_static(node: Node, data: relax.Expr, axes: dict[int, ResizedAxis], form: ResizeForm) -> relax.Expr:
    mode = form.mode
    dtype = dtype_of(data)
    if any(axis.before == 0 for axis in axes.values()):
        dims = [axes[number].after if number in axes else dim for number, dim in enumerate(node.shape(data))]
        return node.filled(dims, 0, dtype)
    is_exact = mode == "nearest" or dtype in ("float32", "float64")
    value = data if is_exact else cast(node, data, "float32")
    tables = {}
    for number, axis in axes.items():
        is_full = axis.region == (0.0, 1.0) or form.transformation != "tf_crop_and_resize"
        if axis.before != axis.after or not math.isclose(axis.scale, 1.0) or not is_full:
            node.check_constant_size(axis.after, tap_count(axis, form), itemsize=32)
            tables[number] = taps(axis, form)
    is_inside = all(table.outside is None for table in tables.values())
    num_taps = math.prod(len(table.weights[0]) for table in tables.values())
    if mode != "nearest" and is_inside and num_taps <= _MAX_UNROLLED_TAPS:
        value = _weighted_sum_at_once(node, value, tables)
    else:
        for number, table in tables.items():
            value = _apply(node, value, number, table)
    return rounded_to(node, value, dtype)


def _mode(node: Node) -> str:
    mode = str(node.attribute("mode", "nearest"))
    mode = {"bilinear": "linear"}.get(mode, mode)
    if mode not in ("nearest", "linear", "cubic"):
        raise node.refusal(f"mode is {mode!r}")
    return mode


def _static_dims(node: Node, data: relax.Expr, axes: list[int]) -> list[int] | None:
    """The sizes of axes; None if one is symbolic."""
    dims = [node.shape(data)[axis] for axis in axes]
    sizes = [dim for dim in dims if isinstance(dim, int)]
    return sizes if len(sizes) == len(dims) else None


def _axes_by_scale(node: Node, data: relax.Expr, axes: list[int], scales: list[float]) -> dict[int, ResizedAxis] | None:
    """Axes by scales; None if a resized axis is symbolic."""
    resized = {axis: scale for axis, scale in zip(axes, scales, strict=True) if scale != 1.0}
    ones = {axis: 1.0 for axis in axes if axis not in resized and isinstance(node.shape(data)[axis], int)}
    scales_by_axis = {**resized, **ones}
    dims = _static_dims(node, data, list(scales_by_axis))
    if dims is None:
        return None
    _check_numbers(node, dims, list(scales_by_axis.values()), "scale")
    sized = zip(scales_by_axis.items(), dims, strict=True)
    return {axis: ResizedAxis(dim, int(dim * scale), scale) for (axis, scale), dim in sized}


def _axes_by_size(node: Node, data: relax.Expr, axes: list[int], sizes: list[int]) -> dict[int, ResizedAxis] | None:
    dims = _static_dims(node, data, axes)
    if dims is None:
        return None
    _check_numbers(node, dims, sizes, "size")
    if 0 in dims:
        raise node.refusal("resizes an axis of 0 elements")
    sizes, scales = sizes_by_policy(dims, sizes, node.attribute("keep_aspect_ratio_policy", "stretch"))
    resized = zip(axes, dims, sizes, scales, strict=True)
    return {axis: ResizedAxis(dim, size, scale) for axis, dim, size, scale in resized}


def _check_numbers(node: Node, dims: Sequence[int], numbers: Sequence[float], name: str) -> None:
    problem = check_numbers(dims, numbers, name)
    if problem is not None:
        raise node.refusal(problem)


def _with_regions(
    node: Node, axes: dict[int, ResizedAxis], region_axes: list[int], region: np.ndarray
) -> dict[int, ResizedAxis]:
    if region.size != 2 * len(region_axes):
        raise node.refusal(f"has a roi of {region.size} numbers for {len(region_axes)} axes")
    starts, stops = region.reshape(2, -1).tolist()
    ends = dict(zip(region_axes, zip(starts, stops, strict=True), strict=True))
    return {number: replace(axis, region=ends[number]) for number, axis in axes.items()}


@converts("Resize")
def resize(node: Node) -> relax.Expr:
    """Resize in all modes and opsets."""
    data = node.tensor(0)
    rank, mode = node.rank(data), _mode(node)
    if node.opset < 11:
        return _upsample_legacy(node, data, mode)
    resized_axes = [node.axis(axis, rank) for axis in node.attribute("axes", tuple(range(rank)))]
    transformation = node.attribute("coordinate_transformation_mode", "half_pixel")
    has_scales = node.has(2) and node.shape(node.tensor(2)) != [0]
    if not has_scales and not node.has(3):
        raise node.refusal("has neither scales nor sizes")
    form = form_of(node, mode, transformation, has_scales)
    scales_or_sizes = node.constant(2) if has_scales else node.constant(3)
    region = node.constant(1)
    is_cropped = transformation == "tf_crop_and_resize"
    if scales_or_sizes is None or (is_cropped and region is None):
        return resize_at_run_time(node, data, resized_axes, node.inputs[2 if has_scales else 3], form)
    if scales_or_sizes.size != len(resized_axes):
        raise node.refusal(f"has {scales_or_sizes.size} scales or sizes for {len(resized_axes)} axes")
    make_axes = _axes_by_scale if has_scales else _axes_by_size
    axes = make_axes(node, data, resized_axes, scales_or_sizes.tolist())
    if axes is None and has_scales:
        return _enlarge(node, data, dict(zip(resized_axes, map(float, scales_or_sizes), strict=True)), form)
    if axes is None:
        return resize_at_run_time(node, data, resized_axes, node.inputs[3], form)
    if is_cropped and region is not None:
        axes = _with_regions(node, axes, resized_axes, region)
    for axis in axes.values():
        problem = fractional_size_error(axis, form)
        if problem is not None:
            raise node.refusal(problem)
    return _resize_static(node, data, axes, form)


@converts("Upsample")
def upsample(node: Node) -> relax.Expr:
    """Resize before opset 10, with scales as an input, an attribute, or height_scale and width_scale."""
    return _upsample_legacy(node, node.tensor(0), _mode(node))


def _upsample_legacy(node: Node, data: relax.Expr, mode: str) -> relax.Expr:
    """Resize before opset 11: coordinates are divided by the scale, and nearest rounds down."""
    if node.op_type == "Resize" or node.opset >= 9:
        node.tensor(1)
        numbers = node.inputs[1]
    elif "scales" in node.attributes:
        numbers = const(node.attribute("scales"), "float64")
    else:
        numbers = const([1.0, 1.0, node.attribute("height_scale"), node.attribute("width_scale")], "float64")
    all_axes, scales = list(range(node.rank(data))), as_constant(numbers)
    legacy_node = node.as_op(node.op_type, node.inputs, **{**node.attributes, "nearest_mode": BELOW_OR_ABOVE})
    form = form_of(legacy_node, mode, "asymmetric", has_scales=True)
    if scales is None:
        return resize_at_run_time(legacy_node, data, all_axes, numbers, form)
    if scales.size != len(all_axes):
        raise node.refusal(f"has {scales.size} scales for {len(all_axes)} axes")
    axes = _axes_by_scale(node, data, all_axes, scales.tolist())
    if axes is None:
        return _enlarge(legacy_node, data, dict(enumerate(map(float, scales))), form)
    return _resize_static(legacy_node, data, axes, form)


def _enlarge(node: Node, data: relax.Expr, scales: dict[int, float], form: ResizeForm) -> relax.Expr:
    """Resize images of symbolic size; for integer scales the kernel computes coordinates."""
    mode, transformation = form.mode, form.transformation
    is_plain = mode != "cubic" and transformation in ("asymmetric", "half_pixel", "pytorch_half_pixel")
    is_plain = is_plain and (mode == "nearest" or dtype_of(data) in ("float32", "float64")) and not form.exclude_outside
    if not is_plain or any(not 1 <= scale < math.inf or scale != int(scale) for scale in scales.values()):
        return resize_at_run_time(node, data, list(scales), const(list(scales.values()), "float64"), form)
    for axis, scale in scales.items():
        if scale != 1:
            data = _enlarge_axis(node, data, axis, int(scale), mode, 0.0 if transformation == "asymmetric" else 0.5)
    return data


def _enlarge_axis(node: Node, data: relax.Expr, axis: int, scale: int, mode: str, center: float) -> relax.Expr:
    dtype = dtype_of(data)
    nearest_mode = node.attribute("nearest_mode", "round_prefer_floor")

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        source = (i[axis].astype("float32") + center) / float(scale) - center

        def element_at(index: tirx.Expr) -> tirx.Expr:
            clamped = tirx.max(tirx.min(index.astype("int64"), x.shape[axis] - 1), 0)
            return x(*i[:axis], clamped, *i[axis + 1 :])

        left = tirx.floor(source)
        if mode == "linear":
            fraction = (source - left).astype(dtype)
            return element_at(left) * (tirx.const(1, dtype) - fraction) + element_at(left + 1.0) * fraction
        rounded = {
            "floor": left,
            BELOW_OR_ABOVE: left,
            "ceil": tirx.ceil(source),
            "round_prefer_floor": tirx.ceil(source - 0.5),
            "round_prefer_ceil": tirx.floor(source + 0.5),
        }
        return element_at(rounded[nearest_mode])

    shape = [size * scale if a == axis else size for a, size in enumerate(node.shape(data))]
    return node.kernel("enlarge", element, data, shape=shape)


@converts("GridSample")
def grid_sample(node: Node) -> relax.Expr:
    """Check the grid's shape and convert by stock TVM."""
    data, grid = node.tensor(0), node.tensor(1)
    dims, grid_dims = node.shape(data), node.shape(grid)
    require_equal(node, grid_dims[0], dims[0], "axis 0 of its grid, the batches, has")
    require_equal(node, grid_dims[-1], len(dims) - 2, "the last axis of its grid, the coordinates, has")
    for axis, size in enumerate(dims[2:]):
        node.require(as_expr(size) >= 1, f"axis {axis + 2} of its input has {size} elements")
    dtype, kind = dtype_of(data), dtype_of(grid)
    if dtype == kind or not is_float(dtype):
        return convert_by_stock(node)
    # Computed in the wider type of both operands; the result has the data's type.
    wide = max(dtype, kind, key=lambda name: tvm.DataType(name).bits)
    operands = [cast(node, data, wide), cast(node, grid, wide)]
    return cast(node, node.emit(convert_by_stock(replace(node, inputs=operands))), dtype)


@converts("AffineGrid")
def affine_grid(node: Node) -> relax.Expr:
    """Check the matrices' shape and convert by stock TVM; dynamic sizes get a kernel."""
    size = node.dims(1)
    if size is None or not all(isinstance(dim, int) for dim in size):
        return _affine_grid_at_run_time(node)
    matrices = require_shape(node, node.tensor(0), [size[0], len(size) - 2, len(size) - 1], "its matrices")
    return convert_by_stock(replace(node, inputs=[matrices, *node.inputs[1:]]))


def _affine_grid_at_run_time(node: Node) -> relax.Expr:
    """Product of each matrix with the coordinates, from -1 to 1, of an image of dynamic size."""
    size = dims_of_vector(node, node.tensor(1), "size")
    count, dtype = len(size) - 2, dtype_of(node.tensor(0))
    if count not in (2, 3):
        raise node.refusal(f"has {len(size)} sizes, expected 4 or 5")
    is_aligned = bool(node.attribute("align_corners", 0))
    for dim in size[2:]:
        min_size = 2 if is_aligned else 1
        node.require(as_expr(dim) >= min_size, f"has a size of {dim}, expected at least {min_size}")
    node.require(as_expr(size[0]) >= 0, f"has a size of {size[0]}")
    matrices = require_shape(node, node.tensor(0), [size[0], count, count + 1], "its matrices")

    def element(i: Position, theta: te.Tensor, sizes: list[tirx.Expr]) -> tirx.Expr:
        batch, *pixel, row = i
        total = theta(batch, row, count).astype("float64")
        for column, (coordinate, dim) in enumerate(zip(reversed(pixel), reversed(sizes), strict=True)):
            steps = tirx.Cast("float64", 2 * coordinate + (0 if is_aligned else 1))
            position = steps / tirx.Cast("float64", dim - 1 if is_aligned else dim) - tirx.const(1, "float64")
            total = total + theta(batch, row, column).astype("float64") * position
        return total.astype(dtype)

    sizes = [as_expr(dim) for dim in size[2:]]
    return node.kernel("affine_grid", element, matrices, sizes, shape=[size[0], *size[2:], count])
