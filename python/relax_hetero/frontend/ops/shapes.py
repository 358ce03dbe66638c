"""Ops that read, create or change shapes (Shape, Reshape, Expand, ConstantOfShape); constants, ranges and windows."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import onnx
from tvm import relax, te, tirx, topi

from ...transform.ir.requirements import divisors_in
from ..joined_sizes import simplified
from ..symbolic_sizes import with_safe_divisions
from .elementwise import cast
from .node import Dim, Node, Position, as_constant, as_dim, const, dtype_of, is_float
from .required_sizes import MAX_ELEMENTS, any_of, as_expr, broadcast, equal, joined, shown
from .run_time.numbers import dims_at_run_time, dims_of_vector, sizes_of, written_numbers
from .run_time.run_time_axes import axes_input, new_axes_input, with_new_axes, without_named_axes
from .table import convert_by_body, converts

_log = logging.getLogger("relax_hetero")


@converts("Constant")
def constant(node: Node) -> relax.Expr:
    """Constant, except strings and sparse tensors."""
    forms = {"value_int": "int64", "value_ints": "int64", "value_float": "float32", "value_floats": "float32"}
    for name, dtype in forms.items():
        if name in node.attributes:
            return const(node.attributes[name], dtype)
    if "value" not in node.attributes:
        names = [name for name in node.attributes if name != "tvm_custom"]
        raise node.refusal(f"a constant given as {', '.join(names)} cannot be imported")
    array = onnx.numpy_helper.to_array(node.attributes["value"])
    if array.dtype == object:
        raise node.refusal("string tensors cannot be imported")
    return const(array)


@converts("Shape")
def shape(node: Node) -> relax.Expr:
    """Shape of a tensor, a constant if static."""
    value = node.inputs[0]
    if isinstance(value, relax.Expr) and not isinstance(value, relax.ShapeExpr):
        value = node.tensor(0)
        if value.ty.shape is None:
            return _shape_at_run_time(node, value)
    dims: list[Dim] = [len(value.values)] if isinstance(value, relax.ShapeExpr) else node.shape(value)
    dims = dims[slice(node.attribute("start", 0), node.attribute("end", None))]
    return const(dims, "int64") if all(isinstance(dim, int) for dim in dims) else relax.ShapeExpr(dims)


def _shape_at_run_time(node: Node, value: relax.Expr) -> relax.Expr:
    rank = node.rank(value)
    vector = sizes_of(node, value)
    selected = range(rank)[slice(node.attribute("start", 0), node.attribute("end", None))]
    if len(selected) == rank:
        return vector
    return relax.op.strided_slice(vector, [0], [selected.start], [selected.stop], [1])


@converts("Size")
def size(node: Node) -> relax.Expr:
    """Number of elements, a constant if static."""
    value = node.tensor(0)
    if value.ty.shape is None:
        return relax.op.size(value)
    product: Dim = 1
    for dim in node.shape(value):
        product = dim if isinstance(product, int) and product == 1 else product * dim
    return const(product, "int64") if isinstance(product, int) else relax.op.size(value)


@converts("Reshape")
def reshape(node: Node) -> relax.Expr:
    """Reshape to a constant, symbolic or dynamic target; 0 copies a size, -1 takes the remaining elements."""
    if isinstance(node.inputs[0], relax.ShapeExpr) and node.dims(1) == [-1]:
        return node.inputs[0]
    data = node.tensor(0)
    target = node.dims(1) if node.has(1) else list(node.attribute("shape", ()))
    if target is None:
        return relax.op.reshape(data, relax.ShapeExpr(_target_at_run_time(node, data)))
    allows_zero = bool(node.attribute("allowzero", 0))
    fixed = [dim for dim in target if isinstance(dim, int)]
    if any(dim < -1 for dim in fixed) or fixed.count(-1) > 1 or (allows_zero and 0 in fixed and -1 in fixed):
        raise node.refusal(f"its target is {shown(target)}, expected sizes with at most one -1")
    if 0 not in fixed:
        return _reshape_static(node, data, target)
    dims = node.shape(data)
    if allows_zero:  # there are no elements
        node.require(
            any_of([equal(dim, 0) for dim in dims]), f"reshapes elements of shape {shown(dims)} to {shown(target)}"
        )
        return node.filled(target, 0, dtype_of(data))
    if any(isinstance(dim, int) and dim == 0 for dim in target[len(dims) :]):
        raise node.refusal(f"its target {shown(target)} copies a size that shape {shown(dims)} does not have")
    copied = [dims[i] if isinstance(dim, int) and dim == 0 else dim for i, dim in enumerate(target)]
    return _reshape_static(node, data, copied)


def _reshape_static(node: Node, data: relax.Expr, target: list[Dim]) -> relax.Expr:
    """Reshape to a target without copied sizes; CheckSizes checks the number of elements."""
    open_axes = [axis for axis, dim in enumerate(target) if isinstance(dim, int) and dim == -1]
    if data.ty.shape is None:
        return relax.op.reshape(data, target)
    dims = node.shape(data)
    if not open_axes:
        _warn_of_fixed_sizes(node, dims, target)
        return node.emit(relax.op.reshape(data, target))
    if any(isinstance(dim, int) and dim == 0 for dim in dims):  # TVM ignores sizes of 0 in the product
        rest = 0
        for dim in target:
            node.require(tirx.NE(as_expr(dim), as_expr(0)), f"reshapes {shown(dims)} to {shown(target)}")
        return node.filled([rest if axis in open_axes else dim for axis, dim in enumerate(target)], 0, dtype_of(data))
    rest = node.shape(node.builder.normalize(relax.op.reshape(data, target)))[open_axes[0]]
    for divisor in divisors_in(rest):  # TVM divides by the other sizes, and cancels what it can
        text = f"reshapes {shown(dims)} to {shown(target)}, which leaves the size of -1 open"
        node.require(tirx.NE(divisor, as_expr(0)), text)
    rest = with_safe_divisions(rest)
    return node.emit(relax.op.reshape(data, [rest if axis in open_axes else dim for axis, dim in enumerate(target)]))


def _warn_of_fixed_sizes(node: Node, dims: list[Dim], target: list[Dim]) -> None:
    """Warn that a constant target allows only one value of a symbolic size, such as a traced batch."""
    symbolic = [dim for dim in dims if not isinstance(dim, int)]
    if not symbolic or not all(isinstance(dim, int) for dim in target):
        return
    static_elements, elements = math.prod(dim for dim in dims if isinstance(dim, int)), math.prod(map(int, target))
    if static_elements == 0 or elements % static_elements:
        return
    product = " * ".join(str(dim) for dim in symbolic)
    _log.warning(
        "%s writes its target %s as a constant: calls are refused unless %s is %d", node.title, shown(target), product,
        elements // static_elements,
    )  # fmt: skip


def _target_at_run_time(node: Node, data: relax.Expr) -> list[tirx.Expr]:
    """Dimensions of the result for a dynamic target: 0 copies a dimension, -1 takes the remaining elements."""
    target = node.tensor(1)
    (length,) = node.static_shape(target)
    rank = node.rank(data)
    allows_zero = bool(node.attribute("allowzero", 0))
    target_dims = dims_at_run_time(node, target, "target")
    for dim in target_dims:
        node.require(tirx.GE(dim, as_expr(-1)), "its target has a size below -1")
    for axis, dim in enumerate(target_dims):
        for other in target_dims[:axis]:
            node.require(any_of([tirx.NE(dim, as_expr(-1)), tirx.NE(other, as_expr(-1))]), "its target has -1 twice")
    if not allows_zero:
        for dim in target_dims[rank:]:
            node.require(tirx.NE(dim, as_expr(0)), f"its target copies a size that its input, of rank {rank}, lacks")
    zero, one = relax.const(0, "int64"), relax.const(1, "int64")
    target = target if dtype_of(target) == "int64" else node.emit(relax.op.astype(target, "int64"))
    sizes = sizes_of(node, data)
    if not allows_zero:
        if rank < length:
            sizes = node.emit(relax.op.concat([sizes, const(np.ones(length - rank), "int64")], axis=0))
        elif rank > length:
            sizes = node.emit(relax.op.strided_slice(sizes, [0], [0], [length], [1]))
        target = node.emit(relax.op.where(relax.op.equal(target, zero), sizes, target))
    is_open = node.emit(relax.op.equal(target, relax.const(-1, "int64")))
    static_product = node.emit(relax.op.prod(relax.op.where(is_open, one, target), keepdims=True))
    elements = node.emit(relax.op.prod(sizes_of(node, data), keepdims=True))
    open_size = node.emit(elements // relax.op.maximum(static_product, one))
    result_dims = dims_at_run_time(node, node.emit(relax.op.where(is_open, open_size, target)), "reshape_dim")
    for axis, dim in enumerate(target_dims):
        are_nonzero = [tirx.NE(size, as_expr(0)) for size in result_dims[:axis] + result_dims[axis + 1 :]]
        if are_nonzero:
            message = "its target leaves the size of -1 open: another size is 0"
            node.require(any_of([tirx.NE(dim, as_expr(-1)), tirx.all(*are_nonzero)]), message)
    if data.ty.shape is not None:
        _require_product(node, result_dims, node.shape(data))
    return [_static_or_computed(number, size) for number, size in zip(target_dims, result_dims, strict=True)]


def _static_or_computed(number: tirx.Expr, size: tirx.Expr) -> tirx.Expr:
    """The target's size if it is a positive constant, else the computed size."""
    return number if isinstance(number, tirx.IntImm) and number.value > 0 else size


def _require_product(node: Node, sizes: list[tirx.Expr], dims: list[Dim]) -> None:
    """Require that sizes have as many elements as a tensor; their product may overflow."""
    elements = math.prod(map(as_expr, dims), start=as_expr(1))
    message = f"its target has another number of elements than its input, of shape {shown(dims)}"
    # Without elements, the other sizes are arbitrary.
    max_elements = tirx.Select(tirx.EQ(elements, as_expr(0)), as_expr(MAX_ELEMENTS), elements)
    product = largest = as_expr(1)
    for dim in sizes:
        node.require(tirx.LE(dim, tirx.floordiv(max_elements, largest)), message)
        product, largest = product * dim, largest * tirx.max(dim, as_expr(1))
    is_empty = any_of([equal(dim, 0) for dim in sizes])
    node.require(any_of([tirx.NE(elements, as_expr(0)), is_empty]), message)
    node.require(any_of([equal(elements, 0), equal(product, elements)]), message)


@converts("Expand")
def expand(node: Node) -> relax.Expr:
    """Broadcast in both directions: a 1 in the target keeps the input's dimension."""
    data = node.tensor(0)
    target = node.dims(1)
    if target is None:
        return _expand_at_run_time(node, data)
    if any(isinstance(size, int) and size < 0 for size in target):
        raise node.refusal(f"its target is {shown(target)}, expected sizes of 0 and more")
    dims = node.shape(data)
    rank = max(len(dims), len(target))
    aligned: list[Dim] = [1] * (rank - len(dims)) + dims
    aligned_target: list[Dim] = [1] * (rank - len(target)) + target
    return broadcast(node, data, [joined(node, dim, size) for dim, size in zip(aligned, aligned_target, strict=True)])


def _expand_at_run_time(node: Node, data: relax.Expr) -> relax.Expr:
    target = node.tensor(1)
    (length,) = node.static_shape(target)
    rank = node.rank(data)
    sizes = sizes_of(node, data)
    if rank < length:
        sizes = node.emit(relax.op.concat([const(np.ones(length - rank), "int64"), sizes], axis=0))
    elif rank > length:
        target = node.emit(relax.op.concat([const(np.ones(rank - length), dtype_of(target)), target], axis=0))
    # Only a 1 takes the other's size: a broadcast of an empty tensor stays empty.
    target = target if dtype_of(target) == "int64" else node.emit(relax.op.astype(target, "int64"))
    is_one = relax.op.equal(target, relax.const(1, "int64"))
    dims = dims_at_run_time(node, node.emit(relax.op.where(is_one, sizes, target)), "expand_dim")
    for dim, size in zip(reversed(node.shape(data)), reversed(dims), strict=False):
        node.require(any_of([equal(dim, 1), equal(dim, size)]), f"size {dim} does not broadcast to {size}")
    for size in dims:
        node.require(tirx.GE(size, as_expr(0)), "its target has a negative size")
    target_numbers = written_numbers(node, target)
    aligned: list[Dim] = [1] * (len(dims) - rank) + node.shape(data)
    return broadcast(
        node,
        data,
        [_broadcast_size(dim, number, size) for dim, number, size in zip(aligned, target_numbers, dims, strict=True)],
    )


def _broadcast_size(dim: Dim, number: Dim | None, computed: tirx.Expr) -> Dim:
    """A size of a broadcast: a constant target other than 1, the tensor's size for a target of 1, else computed."""
    if not isinstance(number, int):
        return computed
    return number if number != 1 else dim


@converts("Tile")
def tile(node: Node) -> relax.Expr:
    """Repeat the input along each axis."""
    data = node.tensor(0)
    dims, repeats = node.shape(data), node.dims(1)
    if node.opset < 6:
        repeats = _repeats_of_axis(node, len(dims))
    if repeats is None:
        repeats = dims_of_vector(node, node.tensor(1), "repeat")
    if len(repeats) != len(dims):
        raise node.refusal(f"has {len(repeats)} numbers of repeats for {len(dims)} axes")
    for size, count in zip(dims, repeats, strict=True):
        node.require(as_expr(count) >= 0, f"repeats {count} times")
        max_count = tirx.floordiv(as_expr(MAX_ELEMENTS), tirx.max(as_expr(size), as_expr(1)))
        node.require(as_expr(count) <= max_count, f"repeats an axis of {size} elements {count} times")
    if all(isinstance(count, int) and count == 1 for count in repeats):
        return data

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        sizes = (tirx.max(size, as_expr(1)) for size in x.shape)  # an empty axis is not read
        return x(*(topi.floor_mod(index, size) for index, size in zip(i, sizes, strict=True)))

    shape = [as_dim(size * count) for size, count in zip(dims, repeats, strict=True)]
    return node.kernel("tile", element, data, shape=shape)


def _repeats_of_axis(node: Node, rank: int) -> list[Dim]:
    """Repeats of each axis from opset 1's number of tiles and axis."""
    count, axis = node.known_dims(1, "its number of tiles is"), node.known_dims(2, "its axis is")
    if len(count) != 1 or len(axis) != 1 or not isinstance(axis[0], int):
        raise node.refusal(f"has {len(count)} numbers of tiles for {len(axis)} axes, expected one for one")
    repeats: list[Dim] = [1] * rank
    repeats[node.axis(axis[0], rank)] = count[0]
    return repeats


@converts("ConstantOfShape")
def constant_of_shape(node: Node) -> relax.Expr:
    """A tensor filled with one value, of a constant, symbolic or dynamic shape."""
    attribute = node.attribute("value")
    value = np.zeros(1, "float32") if attribute is None else onnx.numpy_helper.to_array(attribute)
    dims: list[Any] | None = node.dims(0)
    if dims is None:
        dims = list(dims_at_run_time(node, node.tensor(0), "filled_dim"))
        for dim in dims:
            node.require(as_expr(dim) >= 0, f"has a size of {dim}")
    return relax.op.broadcast_to(const(value.reshape(())), relax.ShapeExpr(dims))


@converts("Squeeze")
def squeeze(node: Node) -> relax.Expr:
    """Remove the given axes of size 1, or all of them; symbolic sizes are required to be 1."""
    data = node.tensor(0)
    dims = node.shape(data)
    axes = list(node.attribute("axes", ())) if node.opset < 13 else []
    if node.opset >= 13 and node.has(1):
        constant_axes = node.constant(1)
        if constant_axes is None:
            return without_named_axes(node, data, *axes_input(node, 1, len(dims)))
        axes = [int(axis) for axis in constant_axes.reshape(-1)]
    elif not axes:
        for axis, dim in enumerate(dims):
            node.require(
                isinstance(dim, int) or tirx.NE(dim, as_expr(1)),
                f"drops axis {axis} where its size is 1, which would leave another rank",
            )
        axes = [axis for axis, dim in enumerate(dims) if isinstance(dim, int) and dim == 1]
    dropped = {node.axis(axis, len(dims)) for axis in axes}
    for axis in sorted(dropped):
        node.require(equal(dims[axis], 1), f"drops axis {axis} of size {dims[axis]}, expected 1")
    if all(isinstance(dims[axis], int) for axis in dropped):
        return node.emit(relax.op.squeeze(data, sorted(dropped))) if dropped else data
    return node.emit(relax.op.reshape(data, [dim for axis, dim in enumerate(dims) if axis not in dropped]))


@converts("Unsqueeze")
def unsqueeze(node: Node) -> relax.Expr:
    """Insert axes of size 1 at constant or dynamic positions."""
    data = node.tensor(0)
    if node.opset < 13:
        axes = list(node.attribute("axes", ()))
    elif (constant_axes := node.constant(1)) is None:
        return with_new_axes(node, data, *new_axes_input(node, 1, node.rank(data)))
    else:
        axes = [int(axis) for axis in constant_axes.reshape(-1)]
    rank = node.rank(data) + len(axes)
    positions = sorted(node.axis(axis, rank) for axis in axes)
    if len(set(positions)) < len(positions):
        raise node.refusal(f"names an axis twice: {axes}")
    return node.emit(relax.op.expand_dims(data, positions)) if positions else data


_NO_STEP, _NOT_FINITE = -1, -2
"""Error codes in place of the length of a range: the step is 0, or the length is not finite."""


@converts("Range")
def range_(node: Node) -> relax.Expr:
    """Range from start to limit (exclusive) by delta."""
    numbers = [_scalar(node, i) for i in range(3)]
    start, _, delta = numbers
    dtype = dtype_of(start)
    length = _length_at_import(node, numbers)
    if length is None:
        length = _length_at_run_time(node, numbers, dtype)

    def element(i: Position, first: te.Tensor, step: te.Tensor) -> tirx.Expr:
        return first() + i[0].astype(dtype) * step()

    return node.kernel("range", element, start, delta, shape=[length])


def _scalar(node: Node, index: int) -> relax.Expr:
    """Convert an input of one element to a scalar tensor."""
    value = node.tensor(index)
    constant_value = as_constant(value)
    if constant_value is not None and constant_value.size == 1:
        return const(constant_value.reshape(()))
    return value if node.rank(value) == 0 else node.emit(relax.op.reshape(value, ()))


def _length_at_import(node: Node, numbers: list[relax.Expr]) -> Dim | None:
    """The length if it follows from constants and symbolic sizes, else None."""
    constants = [as_constant(number) for number in numbers]
    delta = constants[2]
    if delta is not None and delta == 0:
        raise node.refusal("its delta is 0")
    if all(number is not None for number in constants):
        start, limit, step = (number.item() for number in constants if number is not None)
        if isinstance(start, int):
            return len(range(start, limit, step))
        quotient = _quotient(*(number for number in constants if number is not None))
        if not math.isfinite(quotient) or quotient > MAX_ELEMENTS:
            raise node.refusal(f"from {start} to {limit} by {step} has no length that memory can hold")
        return max(math.ceil(quotient), 0)
    sizes = [_size(node, index, value) for index, value in enumerate(constants)]
    if delta is None or None in sizes or is_float(dtype_of(numbers[0])):
        return None
    first, last, step = (as_expr(size) for size in sizes)
    distance = last - first if delta > 0 else first - last
    count = simplified(tirx.max(tirx.ceildiv(distance, abs(int(delta))), as_expr(0)))
    return as_dim(count)


def _quotient(start: Any, limit: Any, step: Any) -> float:
    """Number of steps computed as in onnxruntime: a difference in the operands' type, then a double."""
    with np.errstate(all="ignore"):
        return float(np.float64(limit - start) / np.float64(step))


def _size(node: Node, index: int, constant_value: np.ndarray | None) -> Dim | None:
    """An input as a size if it is constant or symbolic, else None."""
    if constant_value is not None:
        number = int(constant_value)
        return number if abs(number) <= MAX_ELEMENTS else None
    value = node.inputs[index]
    if isinstance(value, relax.ShapeExpr) and len(value.values) == 1:
        return as_dim(value.values[0])
    is_size = not isinstance(getattr(value, "ty", None), (relax.TensorType, relax.ShapeType))
    return as_dim(value) if is_size else None


def _length_at_run_time(node: Node, numbers: list[relax.Expr], dtype: str) -> Dim:
    is_real = is_float(dtype)

    # Returns the length and an error code, which is checked before the length is used.
    def element(i: Position, start: te.Tensor, limit: te.Tensor, delta: te.Tensor) -> tirx.Expr:
        length = (_real_length if is_real else _integer_length)(start(), limit(), delta())
        return tirx.Select(i[0] == 0, tirx.max(length, as_expr(0)), tirx.min(length, as_expr(0)))

    wide = numbers if is_real else [cast(node, number, "int64") for number in numbers]
    count, fault = dims_at_run_time(node, node.kernel("range_length", element, *wide, shape=[2]), "length")
    node.require(tirx.NE(fault, as_expr(_NO_STEP)), "its delta is 0")
    node.require(tirx.NE(fault, as_expr(_NOT_FINITE)), "its start, limit and delta leave its length open, or too large")
    return count


def _real_length(start: tirx.Expr, limit: tirx.Expr, delta: tirx.Expr) -> tirx.Expr:
    zero, max_length = tirx.const(0, "float64"), tirx.const(float(MAX_ELEMENTS), "float64")
    quotient = (limit - start).astype("float64") / delta.astype("float64")
    is_finite = tirx.all(quotient >= -tirx.const(1e300, "float64"), quotient <= tirx.const(1e300, "float64"))
    clamped = tirx.Select(is_finite, tirx.max(tirx.min(quotient, max_length), zero), zero)
    length = tirx.Select(is_finite, tirx.Cast("int64", tirx.ceil(clamped)), as_expr(_NOT_FINITE))
    return tirx.Select(delta == tirx.const(0, str(delta.ty)), as_expr(_NO_STEP), length)


def _integer_length(start: tirx.Expr, limit: tirx.Expr, delta: tirx.Expr) -> tirx.Expr:
    """Length in unsigned arithmetic, which represents the distance of any two integers."""
    zero, one, max_length = as_expr(0), tirx.const(1, "uint64"), tirx.const(MAX_ELEMENTS, "uint64")

    def unsigned(value: tirx.Expr) -> tirx.Expr:
        return tirx.Cast("uint64", value)

    def size_of_negative(value: tirx.Expr) -> tirx.Expr:
        return unsigned(as_expr(-1) - value) + one

    def distance(low: tirx.Expr, high: tirx.Expr) -> tirx.Expr:
        signed_span = unsigned(high) + size_of_negative(low)
        return tirx.Select(tirx.all(low < zero, high >= zero), signed_span, unsigned(high - low))

    is_up = delta > zero
    span = tirx.Select(is_up, distance(start, limit), distance(limit, start))
    width = tirx.Select(is_up, unsigned(delta), size_of_negative(tirx.Select(is_up, as_expr(-1), delta)))
    count = tirx.div(tirx.Select(span > tirx.const(0, "uint64"), span - one, span), width) + one
    has_any = tirx.any(tirx.all(is_up, start < limit), tirx.all(delta < zero, start > limit))
    length = tirx.Select(has_any, tirx.Cast("int64", tirx.Select(count > max_length, max_length, count)), zero)
    return tirx.Select(delta == zero, as_expr(_NO_STEP), length)


@converts("HannWindow", "HammingWindow", "BlackmanWindow")
def window(node: Node) -> relax.Expr:
    """Window function by its function body, with a non-negative length."""
    length = node.constant(0)
    if length is not None:
        node.require(int(length.reshape(())) >= 0, f"its size is {length.reshape(())}")
    elif isinstance(node.inputs[0], relax.Expr) and isinstance(node.inputs[0].ty, relax.TensorType):
        (size,) = dims_at_run_time(node, node.emit(relax.op.reshape(node.tensor(0), (1,))), "size")
        node.require(size >= 0, f"its size is {size}")
    return convert_by_body(node)
