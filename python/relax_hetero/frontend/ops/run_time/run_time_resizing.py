"""Resize with dynamic sizes, scales or region: the host computes a table per axis, which kernels read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx

from ....vm.resize_taps import (
    AMBIGUOUS_TRANSFORMATIONS,
    INDICES,
    SCALES,
    SIZES,
    WEIGHTS,
    ResizedAxis,
    ResizeForm,
    tap_count,
)
from ...joined_sizes import simplified
from ..elementwise import cast
from ..node import Dim, Node, Position, as_constant, as_dim, const, dtype_of, is_float
from ..required_sizes import as_expr, equal, require_shape
from .numbers import dims_at_run_time

_MAX_DENOMINATOR = 2**10  # sizes times scales are symbolic expressions if the scales' denominators are at most this


def resize_at_run_time(
    node: Node, data: relax.Expr, axes: list[int], scales_or_sizes: Any, form: ResizeForm
) -> relax.Expr:
    """Resize axes of a tensor by scales or sizes, a tensor or a shape."""
    count = len(axes)
    before = [node.shape(data)[axis] for axis in axes]
    sizes, scales = _sizes_and_scales(node, before, scales_or_sizes, form)
    is_cropped = form.transformation == "tf_crop_and_resize"
    region = const([0.0] * count + [1.0] * count, "float64")
    if is_cropped:
        region = require_shape(node, node.tensor(1), [2 * count], "its roi")
    settings = _concat_float64(node, scales, region)
    dtype, value = dtype_of(data), data
    if form.mode != "nearest" and dtype not in ("float32", "float64"):
        value = cast(node, data, "float32")
    constant_scales = as_constant(scales)
    for number, axis in enumerate(axes):
        scale = None if constant_scales is None else float(constant_scales[number])
        is_identity = scale is not None and (scale == 1.0 or np.isnan(scale))
        if is_identity and not is_cropped and tvm.sym.Analyzer().can_prove(equal(before[number], sizes[number])):
            continue
        node.require(as_expr(sizes[number]) >= 0, f"resizes axis {axis} to {sizes[number]} elements")
        is_possible = tirx.any(as_expr(before[number]) >= 1, as_expr(sizes[number]) <= 0)
        node.require(is_possible, f"resizes axis {axis} of {before[number]} elements to {sizes[number]}")
        value = _resize_axis(node, value, axis, sizes[number], settings, number, form)
    return rounded_to(node, value, dtype)


def rounded_to(node: Node, value: relax.Expr, dtype: str) -> relax.Expr:
    """Round and clamp sums to an element type."""
    if dtype_of(value) == dtype or is_float(dtype):
        return cast(node, value, dtype)
    limits = np.iinfo(dtype)
    rounded = relax.op.clip(relax.op.round(value), int(limits.min), int(limits.max))
    return cast(node, node.emit(rounded), dtype)


def _sizes_and_scales(
    node: Node, before: list[Dim], scales_or_sizes: Any, form: ResizeForm
) -> tuple[list[Dim], relax.Expr]:
    """New sizes, and scales, NaN for those that are quotients of sizes."""
    policy = "scales" if form.has_scales else str(node.attribute("keep_aspect_ratio_policy", "stretch"))
    is_shape = isinstance(scales_or_sizes, relax.ShapeExpr)
    quotients = const([np.nan] * len(before), "float64")
    if is_shape and policy == "stretch" and len(scales_or_sizes.values) == len(before):
        return [as_dim(dim) for dim in scales_or_sizes.values], quotients
    numbers = replace(node, inputs=[scales_or_sizes]).tensor(0)
    numbers = require_shape(node, numbers, [len(before)], "its scales" if form.has_scales else "its sizes")
    constant = as_constant(numbers)
    if constant is not None and policy == "stretch":
        return [int(size) for size in constant], quotients
    if constant is not None and form.has_scales:
        if not all(np.isfinite(constant) & (constant > 0)):
            raise node.refusal(f"has scales {constant.tolist()}, expected positive numbers")
        sizes = [_scale_size(node, dim, float(scale), form) for dim, scale in zip(before, constant, strict=True)]
        if None not in sizes:
            return [size for size in sizes if size is not None], const(constant, "float64")
    elif policy == "stretch":
        return list(dims_at_run_time(node, numbers, "resized")), quotients
    arguments = [
        relax.ShapeExpr([as_expr(dim) for dim in before]),
        cast(node, numbers, "float64"),
        _text(policy),
        _text(node.title),
    ]
    after = _call_packed(node, SIZES, arguments, [len(before)], "int64")
    scales = arguments[1] if form.has_scales else _call_packed(node, SCALES, arguments, [len(before)], "float64")
    return list(dims_at_run_time(node, after, "resized")), scales


def _scale_size(node: Node, size: Dim, scale: float, form: ResizeForm) -> Dim | None:
    """A size times a scale, rounded down; None if it is not a symbolic expression."""
    exact = Fraction(scale)
    if isinstance(size, int):
        return int(size * scale)
    if exact.denominator > _MAX_DENOMINATOR:
        return None
    if form.transformation in AMBIGUOUS_TRANSFORMATIONS:
        is_whole = equal(as_dim(tirx.floormod(size * exact.numerator, as_expr(exact.denominator))), 0)
        node.require(is_whole, f"{form.transformation} with scale {scale:g} makes no whole number of elements")
    return as_dim(simplified(tirx.floordiv(size * exact.numerator, as_expr(exact.denominator))))


def _concat_float64(node: Node, *vectors: relax.Expr) -> relax.Expr:
    constants = [array for array in map(as_constant, vectors) if array is not None]
    if len(constants) == len(vectors):
        return const(np.concatenate(constants), "float64")
    return node.emit(relax.op.concat([cast(node, vector, "float64") for vector in vectors], 0))


def _text(value: str) -> relax.Expr:
    return tvm.ir.StringImm(value)


def _call_packed(node: Node, name: str, arguments: Sequence[Any], shape: Sequence[Dim], dtype: str) -> relax.Var:
    kind = relax.TensorType(list(shape), dtype)
    return node.emit(relax.op.call_pure_packed(name, *arguments, ty_args=[kind]))


def _resize_axis(
    node: Node, data: relax.Expr, axis: int, after: Dim, settings: relax.Expr, number: int, form: ResizeForm
) -> relax.Expr:
    dtype, before = dtype_of(data), node.shape(data)[axis]
    sizes = relax.ShapeExpr([as_expr(before), as_expr(after)])
    arguments = [sizes, settings, relax.prim_value(number), _text(form.text()), _text(node.title)]
    if form.antialias and form.mode != "nearest":
        raise node.refusal("has an antialiasing filter, whose width follows from sizes; give them with shapes=")
    count = tap_count(ResizedAxis(1, 1, 1.0), form)
    indices = _call_packed(node, INDICES, arguments, [after, count], "int64")
    tables = [indices]
    if form.mode != "nearest":
        tables.append(_call_packed(node, WEIGHTS, [*arguments, _text(dtype)], [after, count], dtype))
    is_cropped = form.transformation == "tf_crop_and_resize"
    extrapolated = node.attribute("extrapolation_value", 0.0) if is_cropped else 0.0

    def element(i: Position, x: te.Tensor, indices: te.Tensor, *weights: te.Tensor) -> tirx.Expr:
        def tap_value(tap: int) -> tirx.Expr:
            index = indices(i[axis], tap)
            taken = x(*i[:axis], tirx.max(index, as_expr(0)) if is_cropped else index, *i[axis + 1 :])
            return weights[0](i[axis], tap) * taken if weights else taken

        total = functools.reduce(lambda one, b: one + b, map(tap_value, range(count)))
        if not is_cropped:
            return total
        return tirx.Select(indices(i[axis], 0) < 0, tirx.const(extrapolated, dtype), total)

    shape = [after if a == axis else size for a, size in enumerate(node.shape(data))]
    return node.kernel("resize", element, data, *tables, shape=shape)
