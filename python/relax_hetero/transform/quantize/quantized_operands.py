"""Reading an operand of a product as ``(data - zero) * scale`` with 8-bit data."""

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
"""Maximum number of products of two differences of 8-bit integers in a sum: as many as int32 certainly holds."""

_NARROW = ("int8", "uint8")
_DEQUANTIZING = (CAST, "relax.subtract", "relax.multiply")
# What reading sees through, and what is left without a use once it has.
_SEEN_THROUGH = frozenset(
    f"relax.{name}" for name in ("astype", "subtract", "multiply", "permute_dims", "reshape", "divide")
)


@dataclass(frozen=True)
class Parameter:
    """A zero point or a scale: one number, or one per row (of a left operand) or column (of a right one).

    Attributes
    ----------
    expr : relax.Expr
        The tensor, which has further dimensions of size one.
    shape : tuple
        () or (size,).
    value : np.ndarray, optional
        The numbers, in `shape`, where it is constant.
    is_narrow : bool
        Whether every number of a zero point certainly is one of the data's own 8-bit type, as ONNX has it.
    """

    expr: relax.Expr
    shape: tuple[Any, ...]
    value: np.ndarray | None = None
    is_narrow: bool = False

    @property
    def is_scalar(self) -> bool:
        """True if it is one number for the whole operand."""
        return not self.shape


@dataclass(frozen=True)
class Quantized:
    """An operand ``permute_dims((data - zero) * scale, perm)``.

    Attributes
    ----------
    data : relax.Expr
        Tensor of uint8 or int8.
    perm : tuple of int
    zero, scale : Parameter, optional
    is_float : bool
        Whether the operand was float32, not int32.
    """

    data: relax.Expr
    perm: tuple[int, ...]
    zero: Parameter | None = None
    scale: Parameter | None = None
    is_float: bool = False

    @property
    def data_value(self) -> np.ndarray | None:
        """The data where they are constant."""
        return self.data.value.numpy() if isinstance(self.data, tvm.ir.GenericConst) else None


def read_quantized(expr: relax.Expr, index: int, block: Block) -> Quantized | None:
    """Operand `index` of a product as a quantized one, None if it is not.

    Casts from 8 bits, differences with a zero point, products with a scale and permutations are seen through, as long
    as zero point and scale do not depend on the reduced dimension or on the batch.
    """
    shape = shape_of(expr)
    if not shape:
        return None
    free = None if len(shape) == 1 else len(shape) - 2 if index == LHS else len(shape) - 1
    return read_along(expr, free, block)


def read_along(expr: relax.Expr, free: int | None, block: Block) -> Quantized | None:
    """As `read_quantized`, of any operand whose zero points and scales may vary along dimension `free` alone."""
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
        source = str(value.args[0].ty.dtype)
        if source not in (*_NARROW, "int32"):
            return None
        found = _read(value.args[0], perm, free, block)
        return None if found is None else replace(found, is_float=dtype == "float32")
    if (name, dtype) == ("relax.subtract", "int32"):
        return _with_parameter("zero", value.args[0], value.args[1], shape, perm, free, block)
    if (name, dtype) == ("relax.multiply", "float32"):
        first, second = value.args
        found = _with_parameter("scale", first, second, shape, perm, free, block)
        return found or _with_parameter("scale", second, first, shape, perm, free, block)
    return None


def _with_parameter(
    which: str,
    data: relax.Expr,
    parameter: relax.Expr,
    result: list[Any],
    perm: tuple[int, ...],
    free: int | None,
    block: Block,
) -> Quantized | None:
    found = _read(data, perm, free, block)
    if found is None or getattr(found, which) is not None:
        return None
    if not same_shape(shape_of(data) or [], result):  # the parameter broadcasts the data
        return None
    shape = shape_of(parameter)
    if shape is None or len(shape) > len(perm):
        return None
    first = len(perm) - len(shape)
    along = {perm.index(axis): extent for axis, extent in enumerate(shape, first) if not is_one(extent)}
    if not set(along) <= {free}:
        return None
    own = tuple(along.values())
    value = _constant(parameter, block)
    if value is not None:
        value = value.reshape([int(extent) for extent in own])
        if which == "zero" and not value.any():
            return found
    if which == "scale":
        return replace(found, scale=Parameter(parameter, own, value))
    is_narrow = _is_narrow(parameter, value, str(found.data.ty.dtype), block)
    return replace(found, zero=Parameter(parameter, own, value, is_narrow))


def dequantized(expr: relax.Expr, block: Block) -> tuple[Expression, relax.Expr] | None:
    """``(astype(q) - zero) * scale`` with one zero point and one scale, as an expression over the bytes.

    Returns
    -------
    expression, operand
        None for what is no float32 tensor computed so from an 8-bit one.
    """
    above: list[Expression] = []
    shape = shape_of(expr)
    while str(expr.ty.dtype) not in _NARROW:
        value = block.definition(expr)
        found = to_expression(value) if op_name(value) in _DEQUANTIZING else None
        if found is None or len(found[1]) != 1:
            return None
        above.append(found[0])
        expr = found[1][0]
    whole = Expression.operand(0)
    for step in reversed(above):
        whole = step.substitute([whole])
    keeps_shape = bool(above) and shape is not None and same_shape(shape_of(expr) or [], shape)
    return (whole, expr) if keeps_shape else None


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
    """The value of a small constant, casts and reshapes of it included; the shape does not matter."""
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
    """A constant right operand as int8: less its zero point where that fits, else less 128 if it is uint8.

    Zero points may vary along dimension `axis` of the operand.

    None if the zero point of uint8 data is not known, or int8 data are best left as they are.
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
        along = points.reshape(axes)
    else:
        along = points
    if np.all(np.abs(points) < 1 << 15):
        wide = array.astype("int16") - along.astype("int16")
        if wide.size == 0 or (wide.min() >= -128 and wide.max() <= 127):
            key = (handle(rhs.data), points.tobytes(), rhs.perm[axis])
            return replace(rhs, data=_shared(key, wide.astype("int8"), rhs, constants), zero=None)
    if array.dtype == np.int8:
        return None
    moved = points - np.int32(128)
    key = (handle(rhs.data), b"", 128)
    data = _shared(key, (array ^ 0x80).view("int8"), rhs, constants)
    return replace(rhs, data=data, zero=Parameter(constant_on_device_of(moved, data), moved.shape, moved))


def _shared(key: Any, array: np.ndarray, rhs: Quantized, constants: dict[Any, Any]) -> relax.Expr:
    if key not in constants:
        constants[key] = (constant_on_device_of(array, rhs.data), rhs.data)  # the old one too: its identity is the key
    return constants[key][0]


def is_part_of_quantized(value: relax.Expr) -> bool:
    """Return whether a value that nobody uses any more may be dropped: reading has seen through it."""
    return op_name(value) in _SEEN_THROUGH
