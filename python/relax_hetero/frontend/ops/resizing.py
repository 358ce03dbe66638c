"""Resize and Upsample: per axis, every output element is a fixed sum over a few input elements.

Which ones and with which weights is worked out here at import, after the definitions of ONNX's Resize (opset 19 and
its earlier forms), so that all modes, coordinate transformations and the antialiasing filter are one kernel.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax, te, tirx

from .elementwise import cast
from .node import Node, Position, const, dtype_of, is_float
from .required_sizes import as_expr, require_equal, require_shape
from .run_time.numbers import numbers_of
from .table import convert_by_stock, converts

_FEW_TAPS = 16
"""Elements up to which an output element is their sum written out: bilinear takes 4, bicubic 16."""


@dataclass(frozen=True)
class ResizedAxis:
    """How one axis is resized.

    Attributes
    ----------
    axis: which one.
    before, after: its size in the input and in the output.
    scale: as given, or after / before; the two need not agree, as sizes are rounded.
    region: the part of the axis, from 0 to 1, that `tf_crop_and_resize` enlarges.
    """

    axis: int
    before: int
    after: int
    scale: float
    region: tuple[float, float]


@dataclass(frozen=True)
class ResizeTaps:
    """Input elements and their weights, a row per output element; `outside` marks outputs that are extrapolated."""

    places: np.ndarray
    weights: np.ndarray
    outside: np.ndarray | None


def source_coordinates(axis: ResizedAxis, transformation: str) -> np.ndarray:
    """Where in the input, in elements, every output element lies.

    In single precision, as implementations compute it: which of two neighbours is nearest can hang on the last bit.
    """
    position = np.arange(axis.after, dtype=np.float32)
    scale, half = np.float32(axis.scale), np.float32(0.5)
    width = scale * np.float32(axis.before)
    low, high = (np.float32(end) for end in axis.region)
    if transformation == "align_corners":
        return np.zeros_like(position) if width == 1 else position * (axis.before - 1) / (width - 1)
    if transformation == "asymmetric":
        return position / scale
    if transformation == "half_pixel":
        return (position + half) / scale - half
    if transformation == "pytorch_half_pixel":
        return np.zeros_like(position) if axis.after == 1 else (position + half) / scale - half
    if transformation == "half_pixel_symmetric":
        offset = np.float32(axis.before / 2) * (1 - np.float32(axis.after) / width)
        return offset + (position + half) / scale - half
    if transformation == "tf_half_pixel_for_nn":
        return (position + half) / scale
    if transformation == "tf_crop_and_resize":
        start = low * (axis.before - 1)
        if width == 1:
            return start + np.full_like(position, (high - low) * (axis.before - 1) / 2)
        return start + position * (high - low) * (axis.before - 1) / (width - 1)
    raise ValueError(transformation)


def _nearest(distance: np.ndarray, mode: str) -> np.ndarray:
    """Whether the right neighbour is taken; `distance` from the left one is in (0, 1], whole coordinates having 1."""
    is_whole = distance == 1.0
    right = {
        "round_prefer_floor": distance > 0.5,
        "round_prefer_ceil": distance >= 0.5,
        "floor": np.zeros_like(is_whole),
        "ceil": np.ones_like(is_whole),
    }[mode]
    return right | is_whole


def _linear_kernel(distance: np.ndarray) -> np.ndarray:
    return np.clip(1 - np.abs(distance), 0, 1)


def _cubic_kernel(distance: np.ndarray, a: float) -> np.ndarray:
    x = np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def taps(axis: ResizedAxis, mode: str, transformation: str, node: Node) -> ResizeTaps:
    """The input elements of every output element along one axis, and their weights."""
    # The antialiasing filter widens the kernel where the axis shrinks.
    shrink = min(axis.scale, 1.0) if node.attribute("antialias", 0) else 1.0
    reach = 1 if mode == "linear" else 2
    node.check_table(axis.after, 1 if mode == "nearest" else math.ceil(2 * reach / shrink) + 2, itemsize=32)
    source = source_coordinates(axis, transformation).astype(np.float64)
    left = np.ceil(source).astype(np.int64) - 1  # the element before, also for a whole coordinate
    distance = source - left
    outside = (source < 0) | (source > axis.before - 1) if transformation == "tf_crop_and_resize" else None
    if mode == "nearest":
        nearest = left + _nearest(distance, node.attribute("nearest_mode", "round_prefer_floor"))
        places = np.clip(nearest, 0, axis.before - 1)[:, None]
        return ResizeTaps(places, np.ones(places.shape), outside)
    first = math.floor(-reach / shrink) + 1
    offsets = np.arange(first, 2 - first)
    away = (offsets[None, :] - distance[:, None]) * shrink
    weights = _linear_kernel(away) if mode == "linear" else _cubic_kernel(away, node.attribute("cubic_coeff_a", -0.75))
    if shrink != 1.0 or node.attribute("antialias", 0):
        weights = weights / weights.sum(axis=1, keepdims=True)
    places = left[:, None] + offsets[None, :]
    if node.attribute("exclude_outside", 0):
        weights = np.where((places >= 0) & (places < axis.before), weights, 0.0)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total)
    return ResizeTaps(np.clip(places, 0, axis.before - 1), weights, outside)


def _apply(node: Node, data: relax.Expr, axis: int, table: ResizeTaps) -> relax.Expr:
    dtype = dtype_of(data)
    if table.places.shape[1] == 1:
        result = node.emit(relax.op.take(data, const(table.places[:, 0], "int64"), axis, "fast"))
    else:
        result = _weighted_sum(node, data, axis, table)
    if table.outside is None or not table.outside.any():
        return result
    mask = table.outside.reshape([-1 if i == axis else 1 for i in range(node.rank(data))])
    return node.emit(relax.op.where(const(mask), const(node.attribute("extrapolation_value", 0.0), dtype), result))


def _weighted_sum(node: Node, data: relax.Expr, axis: int, table: ResizeTaps) -> relax.Expr:
    tap = te.reduce_axis((0, table.places.shape[1]), name="tap")

    def element(i: Position, x: te.Tensor, places: te.Tensor, weights: te.Tensor) -> tirx.Expr:
        return te.sum(weights(i[axis], tap) * x(*i[:axis], places(i[axis], tap), *i[axis + 1 :]), axis=tap)

    shape = [table.places.shape[0] if i == axis else size for i, size in enumerate(node.shape(data))]
    places, weights = const(table.places, "int32"), const(table.weights, dtype_of(data))
    return node.kernel("resize", element, data, places, weights, shape=shape)


def _weighted_sum_at_once(node: Node, data: relax.Expr, tables: dict[int, ResizeTaps]) -> relax.Expr:
    """All axes together, as elements taken and weighed: ops whose axes can move, and which fuse into one kernel."""
    total = data
    for number, combination in enumerate(itertools.product(*(range(len(t.weights[0])) for t in tables.values()))):
        part, weights = data, np.ones((), "float64")
        for (axis, table), tap in zip(tables.items(), combination, strict=True):
            part = node.emit(relax.op.take(part, const(table.places[:, tap], "int64"), axis, "fast"))
            shape = [-1 if i == axis else 1 for i in range(node.rank(data))]
            weights = weights * table.weights[:, tap].reshape(shape)
        part = node.emit(relax.op.multiply(part, const(weights, dtype_of(data))))
        total = node.emit(relax.op.add(total, part)) if number else part
    return total


def _resized(node: Node, data: relax.Expr, axes: list[ResizedAxis], mode: str, transformation: str) -> relax.Expr:
    dtype = dtype_of(data)
    is_kept = mode == "nearest" or dtype in ("float32", "float64")
    value = data if is_kept else cast(node, data, "float32")
    tables = {}
    for axis in axes:
        is_whole = axis.region == (0.0, 1.0) or transformation != "tf_crop_and_resize"
        if axis.before != axis.after or not math.isclose(axis.scale, 1.0) or not is_whole:
            tables[axis.axis] = taps(axis, mode, transformation, node)
    is_inside = all(table.outside is None for table in tables.values())
    if mode != "nearest" and is_inside and math.prod(len(table.weights[0]) for table in tables.values()) <= _FEW_TAPS:
        value = _weighted_sum_at_once(node, value, tables)
    else:
        for number, table in tables.items():
            value = _apply(node, value, number, table)
    if is_kept or is_float(dtype):
        return cast(node, value, dtype)
    limits = np.iinfo(dtype)
    rounded = relax.op.clip(relax.op.round(value), int(limits.min), int(limits.max))
    return cast(node, node.emit(rounded), dtype)


def _mode(node: Node) -> str:
    mode = str(node.attribute("mode", "nearest"))
    mode = {"bilinear": "linear"}.get(mode, mode)
    if mode not in ("nearest", "linear", "cubic"):
        raise node.refusal(f"mode is {mode!r}")
    return mode


def _axes_by_scale(node: Node, data: relax.Expr, which: list[int], scales: list[float]) -> list[ResizedAxis] | None:
    """None if an axis to be resized is symbolic."""
    dims, axes = node.shape(data), []
    for axis, scale in zip(which, scales, strict=True):
        size = dims[axis]
        if scale == 1.0 and not isinstance(size, int):
            continue
        if not isinstance(size, int):
            return None
        axes.append(ResizedAxis(axis, size, int(size * scale), scale, (0.0, 1.0)))
    return axes


def _axes_by_size(node: Node, data: relax.Expr, which: list[int], sizes: list[int]) -> list[ResizedAxis] | None:
    dims = node.shape(data)
    known = {axis: dims[axis] for axis in which}
    if any(not isinstance(size, int) for size in known.values()):
        return None
    scales = [size / int(dims[axis]) for axis, size in zip(which, sizes, strict=True)]
    policy = node.attribute("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        common = min(scales) if policy == "not_larger" else max(scales)
        scales = [common] * len(which)
        sizes = [int(common * int(dims[axis]) + 0.5) for axis in which]
    resized = zip(which, sizes, scales, strict=True)
    return [ResizedAxis(axis, int(dims[axis]), size, scale, (0.0, 1.0)) for axis, size, scale in resized]


def _with_regions(node: Node, axes: list[ResizedAxis], which: list[int]) -> list[ResizedAxis]:
    region = node.constant(1)
    if region is None or region.size != 2 * len(which):
        raise node.refusal("tf_crop_and_resize needs a roi that is known at import")
    low, high = region[: len(which)], region[len(which) :]
    by_axis = {axis: (float(low[i]), float(high[i])) for i, axis in enumerate(which)}
    return [ResizedAxis(a.axis, a.before, a.after, a.scale, by_axis[a.axis]) for a in axes]


@converts("Resize")
def resize(node: Node) -> relax.Expr:
    """All modes of all opsets, with scales or sizes that are known at import."""
    data = node.tensor(0)
    rank, mode = node.rank(data), _mode(node)
    if node.opset < 11:
        return _upsampled(node, data, node.constant(1), mode)
    which = [node.axis(axis, rank) for axis in node.attribute("axes", tuple(range(rank)))]
    transformation = node.attribute("coordinate_transformation_mode", "half_pixel")
    has_scales = node.has(2) and (node.constant(2) is None or node.constant(2).size > 0)  # type: ignore[union-attr]
    given = node.constant(2) if has_scales else node.constant(3)
    if given is None:
        raise node.unknown("its scales or sizes are")
    if given.size != len(which):
        raise node.refusal(f"has {given.size} scales or sizes for {len(which)} axes")
    if has_scales:
        axes = _axes_by_scale(node, data, which, [float(scale) for scale in given])
    else:
        axes = _axes_by_size(node, data, which, [int(size) for size in given])
    if axes is None and has_scales:
        return _enlarged(node, data, dict(zip(which, map(float, given), strict=True)), mode, transformation)
    if axes is None:
        raise node.refusal("resizes a symbolic dimension to a size; give its size with shapes=")
    if transformation == "tf_crop_and_resize":
        axes = _with_regions(node, axes, which)
    if has_scales and transformation in ("align_corners", "pytorch_half_pixel", "tf_crop_and_resize"):
        _check_whole(node, axes, transformation)
    return _resized(node, data, axes, mode, transformation)


def _check_whole(node: Node, axes: list[ResizedAxis], transformation: str) -> None:
    """Refuse scales by which a size does not become a whole number: ONNX's reference and onnxruntime then differ."""
    for axis in axes:
        if axis.scale * axis.before != axis.after:
            raise node.refusal(
                f"{transformation} with scale {axis.scale:g} of {axis.before} elements makes no whole number of them, "
                "and implementations differ on what that means; give sizes instead of scales"
            )


@converts("Upsample")
def upsample(node: Node) -> relax.Expr:
    """Resize before opset 10: scales as an input, as an attribute, or as height_scale and width_scale."""
    data = node.tensor(0)
    if node.opset >= 9:
        scales = node.constant(1)
    elif "scales" in node.attributes:
        scales = np.array(node.attribute("scales"), np.float64)
    else:
        scales = np.array([1.0, 1.0, node.attribute("height_scale"), node.attribute("width_scale")])
    return _upsampled(node, data, scales, _mode(node))


def _upsampled(node: Node, data: relax.Expr, scales: np.ndarray | None, mode: str) -> relax.Expr:
    """The form of Resize before opset 11: coordinates are divided by the scale, the nearest is the one below."""
    if scales is None:
        raise node.unknown("its scales are")
    axes = _axes_by_scale(node, data, list(range(node.rank(data))), [float(scale) for scale in scales])
    floored = node.as_op(node.op_type, node.inputs, **{**node.attributes, "nearest_mode": "floor"})
    if axes is None:
        return _enlarged(floored, data, dict(enumerate(map(float, scales))), mode, "asymmetric")
    return _resized(floored, data, axes, mode, "asymmetric")


def _enlarged(node: Node, data: relax.Expr, scales: dict[int, float], mode: str, transformation: str) -> relax.Expr:
    """Images of symbolic size, enlarged by whole numbers: coordinates are computed in the kernel, not at import.

    Raises
    ------
    FrontendError: for other scales and for the modes that need the sizes in advance.
    """
    is_plain = mode != "cubic" and transformation in ("asymmetric", "half_pixel", "pytorch_half_pixel")
    if not is_plain or any(scale < 1 or scale != int(scale) for scale in scales.values()):
        raise node.refusal("resizes a symbolic dimension in a way that needs its size; give it with shapes=")
    for axis, scale in scales.items():
        if scale != 1:
            data = _enlarged_axis(node, data, axis, int(scale), mode, 0.0 if transformation == "asymmetric" else 0.5)
    return data


def _enlarged_axis(node: Node, data: relax.Expr, axis: int, scale: int, mode: str, center: float) -> relax.Expr:
    dtype = dtype_of(data)
    if mode == "linear" and dtype not in ("float32", "float64"):
        raise node.refusal(f"resizes {dtype} of a symbolic size linearly; give its size with shapes=")
    nearest_mode = node.attribute("nearest_mode", "round_prefer_floor")

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        source = (i[axis].astype("float32") + center) / float(scale) - center

        def at(place: tirx.Expr) -> tirx.Expr:
            held = tirx.max(tirx.min(place.astype("int64"), x.shape[axis] - 1), 0)
            return x(*i[:axis], held, *i[axis + 1 :])

        left = tirx.floor(source)
        if mode == "linear":
            share = (source - left).astype(dtype)
            return at(left) * (tirx.const(1, dtype) - share) + at(left + 1.0) * share
        rounded = {
            "floor": left,
            "ceil": tirx.ceil(source),
            "round_prefer_floor": tirx.ceil(source - 0.5),
            "round_prefer_ceil": tirx.floor(source + 0.5),
        }
        return at(rounded[nearest_mode])

    shape = [size * scale if a == axis else size for a, size in enumerate(node.shape(data))]
    return node.kernel("enlarge", element, data, shape=shape)


@converts("GridSample")
def grid_sample(node: Node) -> relax.Expr:
    """As stock, where the grid has a place for each axis of the image, and as many batches."""
    data, grid = node.tensor(0), node.tensor(1)
    dims, places = node.shape(data), node.shape(grid)
    require_equal(node, places[0], dims[0], "axis 0 of its grid, the batches, has")
    require_equal(node, places[-1], len(dims) - 2, "the last axis of its grid, the coordinates, has")
    for axis, size in enumerate(dims[2:]):
        node.require(as_expr(size) >= 1, f"axis {axis + 2} of its input has {size} elements")
    return convert_by_stock(node)


@converts("AffineGrid")
def affine_grid(node: Node) -> relax.Expr:
    """As stock, for a size that is known and one matrix for each of its batches."""
    size = node.dims(1)
    if size is None or not all(isinstance(dim, int) for dim in size):
        return _affine_grid_at_run_time(node)
    matrices = require_shape(node, node.tensor(0), [size[0], len(size) - 2, len(size) - 1], "its matrices")
    return convert_by_stock(replace(node, inputs=[matrices, *node.inputs[1:]]))


def _affine_grid_at_run_time(node: Node) -> relax.Expr:
    """The product of each matrix with the places of an image, from -1 to 1, whose sizes only a call knows."""
    size = numbers_of(node, node.tensor(1), "size")
    count, dtype = len(size) - 2, dtype_of(node.tensor(0))
    if count not in (2, 3):
        raise node.refusal(f"has {len(size)} sizes, expected 4 or 5")
    is_aligned = bool(node.attribute("align_corners", 0))
    for dim in size[2:]:
        least = 2 if is_aligned else 1
        node.require(as_expr(dim) >= least, f"has a size of {dim}, expected at least {least}")
    node.require(as_expr(size[0]) >= 0, f"has a size of {size[0]}")
    matrices = require_shape(node, node.tensor(0), [size[0], count, count + 1], "its matrices")

    def element(i: Position, theta: te.Tensor, sizes: list[tirx.Expr]) -> tirx.Expr:
        batch, *places, row = i
        total = theta(batch, row, count).astype("float64")
        for column, (place, dim) in enumerate(zip(reversed(places), reversed(sizes), strict=True)):
            steps = tirx.Cast("float64", 2 * place + (0 if is_aligned else 1))
            position = steps / tirx.Cast("float64", dim - 1 if is_aligned else dim) - tirx.const(1, "float64")
            total = total + theta(batch, row, column).astype("float64") * position
        return total.astype(dtype)

    sizes = [as_expr(dim) for dim in size[2:]]
    return node.kernel("affine_grid", element, matrices, sizes, shape=[size[0], *size[2:], count])
