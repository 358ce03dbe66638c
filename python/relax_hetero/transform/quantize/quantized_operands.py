"""Matching of an operand of a product as ``(data - zero) * scale`` with 8-bit data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ...encoding.encoding import LHS
from ...encoding.expression import Expression
from ..ir.axes import permutation
from ..ir.blocks import Block, is_one, same_shape, shape_of
from ..ir.constant_values import constant_on_device_of
from ..ir.op_names import CAST, PERMUTE, RESHAPE
from ..ir.relax_expressions import to_expression
from ..ir.rewriting import handle, op_name

MAX_INT32_TERMS = (1 << 31) // (255 * 255)
"""Maximum number of products of two differences of 8-bit integers in a sum that int32 certainly represents."""

_NARROW = ("int8", "uint8")
_DEQUANTIZING = (CAST, "relax.subtract", "relax.multiply")
# Ops that a match absorbs, and that may be unused after it.
_ABSORBED_OPS = frozenset(
    f"relax.{name}" for name in ("astype", "subtract", "multiply", "permute_dims", "reshape", "divide")
)


@dataclass(frozen=True)
class Parameter:
    """A zero point or a scale: one number, or one for each row of a left or column of a right operand."""

    expr: relax.Expr  # tensor, which may have further dimensions of size one
    shape: tuple[Any, ...]  # shape of its numbers, () or (size,)
    value: np.ndarray | None = None  # numbers of a constant, in `shape`
    # Whether every zero point is certainly in the range of the data's own 8-bit type, as in ONNX.
    is_narrow: bool = False

    @property
    def is_scalar(self) -> bool:
        """True if it is one number for all elements of the operand."""
        return not self.shape


@dataclass(frozen=True)
class Quantized:
    """An operand ``permute_dims((data - zero) * scale, perm)``."""

    data: relax.Expr  # tensor of uint8 or int8
    perm: tuple[int, ...]
    zero: Parameter | None = None
    scale: Parameter | None = None
    is_float: bool = False  # whether the operand was float32, not int32

    @property
    def data_value(self) -> np.ndarray | None:
        """The elements of constant data; None for other data."""
        return self.data.value.numpy() if isinstance(self.data, tvm.ir.GenericConst) else None


def read_quantized(expr: relax.Expr, index: int, block: Block) -> Quantized | None:
    """Match operand `index` of a product as a quantized one; None if it is not.

    The match absorbs casts from 8 bits, differences with a zero point, products with a scale and permutations, as long
    as zero point and scale do not vary along the reduced dimension or the batch.
    """
    shape = shape_of(expr)
    if not shape:
        return None
    free = None if len(shape) == 1 else len(shape) - 2 if index == LHS else len(shape) - 1
    return read_along(expr, free, block)


def read_along(expr: relax.Expr, free: int | None, block: Block) -> Quantized | None:
    """Match any operand whose zero points and scales vary at most along dimension `free`; see `read_quantized`."""
    shape = shape_of(expr)
    return None if shape is None else _read(expr, tuple(range(len(shape))), free, block)


def _read(expr: relax.Expr, perm: tuple[int, ...], free: int | None, block: Block) -> Quantized | None:
    dtype, shape = str(expr.ty.dtype), shape_of(expr)
    if shape is None or len(shape) != len(perm):
        return None
    if dtype in _NARROW:
        return Quantized(expr, perm)
    value = block.definition(expr)
    name = op_name(value)
    if name == PERMUTE:
        axes = permutation(value)
        return _read(value.args[0], tuple(axes[d] for d in perm), free, block)
    if name == CAST and dtype in ("int32", "float32"):
        if str(value.args[0].ty.dtype) not in (*_NARROW, "int32"):
            return None
        operand = _read(value.args[0], perm, free, block)
        return None if operand is None else replace(operand, is_float=dtype == "float32")
    if (name, dtype) == ("relax.subtract", "int32"):
        return _with_parameter("zero", value.args[0], value.args[1], shape, perm, free, block)
    if (name, dtype) == ("relax.multiply", "float32"):
        first, second = value.args
        operand = _with_parameter("scale", first, second, shape, perm, free, block)
        return operand or _with_parameter("scale", second, first, shape, perm, free, block)
    return None


def _with_parameter(
    kind: str,
    data: relax.Expr,
    parameter: relax.Expr,
    result: list[Any],
    perm: tuple[int, ...],
    free: int | None,
    block: Block,
) -> Quantized | None:
    operand = _read(data, perm, free, block)
    if operand is None or getattr(operand, kind) is not None:
        return None
    if not same_shape(shape_of(data) or [], result):  # the parameter enlarges the data
        return None
    shape = shape_of(parameter)
    if shape is None or len(shape) > len(perm):
        return None
    first = len(perm) - len(shape)
    along = {perm.index(axis): extent for axis, extent in enumerate(shape, first) if not is_one(extent)}
    if not set(along) <= {free}:
        return None
    parameter_shape = tuple(along.values())
    value = _constant(parameter, block)
    if value is not None:
        value = value.reshape([int(extent) for extent in parameter_shape])
        if kind == "zero" and not value.any():
            return operand
    if kind == "scale":
        return replace(operand, scale=Parameter(parameter, parameter_shape, value))
    is_narrow = _is_narrow(parameter, value, str(operand.data.ty.dtype), block)
    return replace(operand, zero=Parameter(parameter, parameter_shape, value, is_narrow))


def match_dequantize(expr: relax.Expr, block: Block) -> tuple[Expression, relax.Expr] | None:
    """Match ``(astype(q) - zero) * scale`` with one zero point and one scale.

    Returns the match as an expression over ``q``; None for any other tensor.
    """
    chain: list[Expression] = []  # from the last op to the first
    shape = shape_of(expr)
    while str(expr.ty.dtype) not in _NARROW:
        value = block.definition(expr)
        match = to_expression(value) if op_name(value) in _DEQUANTIZING else None
        if match is None or len(match[1]) != 1:
            return None
        op, (expr,) = match
        chain.append(op)
    expression = Expression.operand(0)
    for op in reversed(chain):
        expression = op.substitute([expression])
    keeps_shape = bool(chain) and shape is not None and same_shape(shape_of(expr) or [], shape)
    return (expression, expr) if keeps_shape else None


def _is_narrow(expr: relax.Expr, value: np.ndarray | None, dtype: str, block: Block) -> bool:
    if value is not None:
        limits = np.iinfo(dtype)
        return bool(np.all((limits.min <= value) & (value <= limits.max)))
    while str(expr.ty.dtype) != dtype:
        expr = block.definition(expr)
        if op_name(expr) not in (CAST, RESHAPE, "relax.expand_dims"):
            return False
        expr = expr.args[0]
    return True


def _constant(expr: relax.Expr, block: Block) -> np.ndarray | None:
    """The value of a constant, perhaps cast or reshaped, in any shape; None for any other expression."""
    value = block.definition(expr)
    if isinstance(value, tvm.ir.GenericConst):
        return value.value.numpy()
    if op_name(value) == CAST and str(value.attrs.dtype) in ("int32", "float32"):
        array = _constant(value.args[0], block)
        return None if array is None else array.astype(str(value.attrs.dtype))
    if op_name(value) == RESHAPE:
        return _constant(value.args[0], block)
    return None


def signed_constant(rhs: Quantized, constants: dict[Any, relax.Expr], axis: int = -1) -> Quantized | None:
    """Convert a constant right operand to int8: subtract its zero point if that fits, else 128 from uint8.

    Zero points may vary along dimension `axis` of the operand. None if the zero point is not constant, or int8 data
    with a zero point do not fit.
    """
    array, zero = rhs.data_value, rhs.zero
    assert array is not None, "only constants are shifted at compile time"
    if zero is not None and zero.value is None:
        return None
    if zero is None and array.dtype == np.int8:
        return rhs
    points = np.array(0, "int32") if zero is None or zero.value is None else zero.value
    if points.ndim:
        axes = [1] * array.ndim
        axes[rhs.perm[axis]] = -1
        aligned = points.reshape(axes)
    else:
        aligned = points
    if np.all(np.abs(points) < 1 << 15):
        wide = array.astype("int16") - aligned.astype("int16")
        if wide.size == 0 or (wide.min() >= -128 and wide.max() <= 127):
            key = (handle(rhs.data), points.tobytes(), rhs.perm[axis])
            return replace(rhs, data=_shared(key, wide.astype("int8"), rhs, constants), zero=None)
    if array.dtype == np.int8:
        return None
    shifted = points - np.int32(128)
    key = (handle(rhs.data), b"", 128)
    data = _shared(key, (array ^ 0x80).view("int8"), rhs, constants)
    return replace(rhs, data=data, zero=Parameter(constant_on_device_of(shifted, data), shifted.shape, shifted))


def _shared(key: Any, array: np.ndarray, rhs: Quantized, constants: dict[Any, Any]) -> relax.Expr:
    if key not in constants:
        constants[key] = (
            constant_on_device_of(array, rhs.data),
            rhs.data,
        )  # also the old constant, whose identity is the key
    return constants[key][0]


def is_absorbable(value: relax.Expr) -> bool:
    """Return whether a value may be removed if it is unused: a match may have absorbed it."""
    return op_name(value) in _ABSORBED_OPS
