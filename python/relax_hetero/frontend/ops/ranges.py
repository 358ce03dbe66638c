"""Range, whose length its numbers tell, and windows of a length that is an input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from ..symbolic_sizes import simplified
from .elementwise import cast
from .node import Dim, Node, Position, as_constant, as_dim, const, dtype_of, is_float
from .required_sizes import MOST_ELEMENTS, as_expr
from .shapes import dims_at_run_time
from .table import convert_by_body, converts

_NO_STEP, _NOT_FINITE = -1, -2
"""Stand for the length of a range whose step is 0, or whose numbers leave its length open."""


@converts("Range")
def range_(node: Node) -> relax.Expr:
    """start + i * delta, up to the limit, which it leaves out."""
    numbers = [_scalar(node, i) for i in range(3)]
    start, _, delta = numbers
    dtype = dtype_of(start)
    length = _known_length(node, numbers)
    if length is None:
        length = _length_at_run_time(node, numbers, dtype)

    def element(i: Position, first: te.Tensor, step: te.Tensor) -> tirx.Expr:
        return first() + i[0].astype(dtype) * step()

    return node.kernel("range", element, start, delta, shape=[length])


def _scalar(node: Node, index: int) -> relax.Expr:
    """An input of one element as a scalar tensor."""
    value = node.tensor(index)
    known = as_constant(value)
    if known is not None and known.size == 1:
        return const(known.reshape(()))
    return value if node.rank(value) == 0 else node.emit(relax.op.reshape(value, ()))


def _known_length(node: Node, numbers: list[relax.Expr]) -> Dim | None:
    """The length where it follows from numbers and from sizes of inputs, else None."""
    known = [as_constant(number) for number in numbers]
    delta = known[2]
    if delta is not None and delta == 0:
        raise node.refusal("its delta is 0")
    if all(number is not None for number in known):
        start, limit, step = (number.item() for number in known if number is not None)
        if isinstance(start, int):
            return len(range(start, limit, step))
        quotient = _quotient(*(number for number in known if number is not None))
        if not math.isfinite(quotient) or quotient > MOST_ELEMENTS:
            raise node.refusal(f"from {start} to {limit} by {step} has no length that memory can hold")
        return max(math.ceil(quotient), 0)
    sizes = [_size(node, index, value) for index, value in enumerate(known)]
    if delta is None or None in sizes or is_float(dtype_of(numbers[0])):
        return None
    first, last, step = (as_expr(size) for size in sizes)
    distance = last - first if delta > 0 else first - last
    count = simplified(tirx.max(tirx.ceildiv(distance, abs(int(delta))), as_expr(0)))
    return as_dim(count)


def _quotient(start: Any, limit: Any, step: Any) -> float:
    """The number of steps, taken as onnxruntime takes it: a difference in the numbers' type, then a double."""
    with np.errstate(all="ignore"):
        return float(np.float64(limit - start) / np.float64(step))


def _size(node: Node, index: int, known: np.ndarray | None) -> Dim | None:
    """An input as a size, where it is a known number or an expression of the sizes of the model's inputs."""
    if known is not None:
        number = int(known)
        return number if abs(number) <= MOST_ELEMENTS else None
    value = node.inputs[index]
    if isinstance(value, relax.ShapeExpr) and len(value.values) == 1:
        return as_dim(value.values[0])
    is_size = not isinstance(getattr(value, "ty", None), (relax.TensorType, relax.ShapeType))
    return as_dim(value) if is_size else None


def _length_at_run_time(node: Node, numbers: list[relax.Expr], dtype: str) -> Dim:
    is_real = is_float(dtype)

    # Two numbers: the length, and whether there is none, which is told before the length is looked at.
    def element(i: Position, start: te.Tensor, limit: te.Tensor, delta: te.Tensor) -> tirx.Expr:
        found = (_real_length if is_real else _whole_length)(start(), limit(), delta())
        return tirx.Select(i[0] == 0, tirx.max(found, as_expr(0)), tirx.min(found, as_expr(0)))

    wide = numbers if is_real else [cast(node, number, "int64") for number in numbers]
    count, fault = dims_at_run_time(node, node.kernel("range_length", element, *wide, shape=[2]), "length")
    node.require(tirx.NE(fault, as_expr(_NO_STEP)), "its delta is 0")
    node.require(tirx.NE(fault, as_expr(_NOT_FINITE)), "its start, limit and delta leave its length open, or too large")
    return count


def _real_length(start: tirx.Expr, limit: tirx.Expr, delta: tirx.Expr) -> tirx.Expr:
    zero, most = tirx.const(0, "float64"), tirx.const(float(MOST_ELEMENTS), "float64")
    quotient = (limit - start).astype("float64") / delta.astype("float64")
    is_finite = tirx.all(quotient >= -tirx.const(1e300, "float64"), quotient <= tirx.const(1e300, "float64"))
    held = tirx.Select(is_finite, tirx.max(tirx.min(quotient, most), zero), zero)
    count = tirx.Cast("int64", tirx.ceil(held))
    found = tirx.Select(is_finite, count, as_expr(_NOT_FINITE))
    return tirx.Select(delta == tirx.const(0, str(delta.ty)), as_expr(_NO_STEP), found)


def _whole_length(start: tirx.Expr, limit: tirx.Expr, delta: tirx.Expr) -> tirx.Expr:
    """In unsigned numbers, in which the distance of two integers always fits; none of them may wrap around."""
    zero, one, most = as_expr(0), tirx.const(1, "uint64"), tirx.const(MOST_ELEMENTS, "uint64")

    def unsigned(value: tirx.Expr) -> tirx.Expr:
        return tirx.Cast("uint64", value)

    def size_of_negative(value: tirx.Expr) -> tirx.Expr:
        return unsigned(as_expr(-1) - value) + one

    def distance(low: tirx.Expr, high: tirx.Expr) -> tirx.Expr:
        across = unsigned(high) + size_of_negative(low)
        return tirx.Select(tirx.all(low < zero, high >= zero), across, unsigned(high - low))

    is_up = delta > zero
    whole = tirx.Select(is_up, distance(start, limit), distance(limit, start))
    width = tirx.Select(is_up, unsigned(delta), size_of_negative(tirx.Select(is_up, as_expr(-1), delta)))
    count = tirx.div(tirx.Select(whole > tirx.const(0, "uint64"), whole - one, whole), width) + one
    has_any = tirx.any(tirx.all(is_up, start < limit), tirx.all(delta < zero, start > limit))
    found = tirx.Select(has_any, tirx.Cast("int64", tirx.Select(count > most, most, count)), zero)
    return tirx.Select(delta == zero, as_expr(_NO_STEP), found)


@converts("HannWindow", "HammingWindow", "BlackmanWindow")
def window(node: Node) -> relax.Expr:
    """By its definition over other ops, of a length that is not negative."""
    known = node.constant(0)
    if known is not None:
        node.require(int(known.reshape(())) >= 0, f"its size is {known.reshape(())}")
    elif isinstance(node.inputs[0], relax.Expr) and isinstance(node.inputs[0].ty, relax.TensorType):
        (size,) = dims_at_run_time(node, node.emit(relax.op.reshape(node.tensor(0), (1,))), "size")
        node.require(size >= 0, f"its size is {size}")
    return convert_by_body(node)
