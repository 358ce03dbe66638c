"""Quantized products: products of 8-bit integers that models write with wider types.

ONNX's MatMulInteger and QLinearMatMul arrive as ``matmul(astype(a, i32) - za, astype(b, i32) - zb)``, quantize-
dequantize models as ``matmul((astype(a, i32) - za) * sa, (astype(b, i32) - zb) * sb)`` in float32. Both equal the
product of the 8-bit tensors with corrections::

    sum((a - za)(b - zb)) = sum(a b) - za * sum(b - zb) - zb * sum(a)        over k

exactly modulo 2**32, and scales that do not depend on k are applied once, to the sums. The right operand is made signed
(128 is subtracted from u8 and its zero point), since machines multiply u8*s8 and s8*s8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import relax

from ...encoding.encoding import LHS, RESULT, RHS, Encoding
from ...op import encoded as op
from ...target.cpu_target import cpu_target_of
from ...target.dot_instructions import multiplies_int16
from ..ir.blocks import Block, shape_of, tensor_type
from ..ir.constant_values import constant_on_device_of
from ..ir.relax_expressions import scalar_of
from ..quantize.quantized_operands import MAX_INT32_TERMS, Parameter, Quantized, read_quantized, signed_constant
from .encoded_products import ProductWriter, as_matrix, product_encoding, with_one_k

_ACCUMULATOR = "int32"


def emit_quantized_product(
    writer: ProductWriter,
    binding: relax.VarBinding,  # binding of an R.matmul
    block: Block,  # block that contains the binding
    constants: dict[Any, relax.Expr],  # signed constants so far, so that shared constants stay shared
) -> bool:
    """Write an integer product in place of ``R.matmul``, if its operands are 8-bit integers.

    Returns False, with nothing written, unless the operands are 8-bit integers.
    """
    var = binding.var
    lhs, rhs = (read_quantized(binding.value.args[index], index, block) for index in (LHS, RHS))
    if lhs is None or rhs is None or lhs.is_float != rhs.is_float or shape_of(var) is None:
        return False
    if str(var.ty.dtype) != ("float32" if lhs.is_float else _ACCUMULATOR):
        return False
    a_shape, b_shape = (as_matrix(shape_of(binding.value.args[index]) or [], index) for index in (LHS, RHS))
    shapes = with_one_k(a_shape, b_shape)
    encoding = product_encoding(*shapes, (str(lhs.data.ty.dtype), "int8", _ACCUMULATOR))
    if encoding is None or (lhs.is_float and not fits_int32(encoding.sizes["k"], lhs, rhs)):
        return False  # sums in int32 wrap by definition, sums in float32 do not
    plain = _emit_integers(writer, lhs, _signed(writer, rhs, constants, var.name), encoding, shapes, var.name)
    writer.end_as(_scaled(writer, plain, lhs, rhs, var.name) if lhs.is_float else plain, var)
    return True


def widened(writer: ProductWriter, data: relax.Expr, name: str) -> relax.Expr:
    """Bytes of a left operand as int16, if its device multiplies those faster; the kernel before can store them."""
    vdevice = data.ty.vdevice
    if vdevice is None or not multiplies_int16(cpu_target_of(vdevice.target)):
        return data
    return writer.cast(data, "int16", name)


def fits_int32(num_terms: int, *operands: Quantized) -> bool:
    """Return whether sums of so many products (negative: unknown) cannot overflow int32."""
    return 0 <= num_terms <= MAX_INT32_TERMS and all(x.zero is None or x.zero.is_narrow for x in operands)


def _emit_integers(
    writer: ProductWriter, lhs: Quantized, rhs: Quantized, encoding: Encoding, shapes: Sequence[list[Any]], name: str
) -> relax.Var:
    """The plain product ``(a - za) * (b - zb)`` in int32; `shapes` are those of the operands as matrices."""
    a, b = (
        writer.matched(
            writer.matrix(writer.permuted(x.data, x.perm, f"{prefix}_permuted"), index, prefix),
            shapes[index],
            f"{prefix}_matched",
        )
        for index, prefix, x in ((LHS, f"{name}_lhs", lhs), (RHS, f"{name}_rhs", rhs))
    )
    left = widened(writer, a, f"{name}_lhs_int16")
    encoding = replace(encoding, element_types=(str(left.ty.dtype), *encoding.element_types[1:]))
    result = encoding.of(RESULT)
    init = columns = rows = None
    if lhs.zero is not None:
        columns = _column_sums(writer, rhs, b, f"{name}_columns")
    if rhs.zero is not None:
        rows = _sum(writer, writer.cast(a, _ACCUMULATOR, f"{name}_lhs_wide"), -1, f"{name}_rows")
    if lhs.zero is not None and lhs.zero.is_scalar:
        init, columns = _multiply_negated(writer, columns, lhs.zero, f"{name}_init"), None
    out = writer.product(left, b, encoding, name, init)
    if columns is not None and lhs.zero is not None:
        zero = emitted_parameter(writer, lhs.zero, f"{name}_lhs_zero")
        zero = writer.reshape(zero, [*(shape_of(zero) or []), 1], f"{name}_lhs_zero_column")
        out = _subtract_product(writer, out, zero, columns, result, f"{name}_less_columns")
    if rows is not None and rhs.zero is not None:
        zero = emitted_parameter(writer, rhs.zero, f"{name}_rhs_zero")
        out = _subtract_product(writer, out, rows, zero, result, f"{name}_less_rows")
    return writer.plain(out, result, f"{name}_plain")


def _signed(writer: ProductWriter, rhs: Quantized, constants: dict[Any, relax.Expr], name: str) -> Quantized:
    """The right operand as int8; a constant absorbs its zero point if the difference fits."""
    if rhs.data_value is not None:
        signed = signed_constant(rhs, constants)
        if signed is not None:
            return signed
    if str(rhs.data.ty.dtype) == "int8":
        return rhs
    wide = writer.cast(rhs.data, "int16", f"{name}_rhs_int16")
    shifted = writer.binary(
        relax.op.subtract, wide, constant_on_device_of(np.array(128, "int16"), wide), f"{name}_rhs_moved"
    )
    data = writer.cast(shifted, "int8", f"{name}_rhs_int8")
    zero = rhs.zero or Parameter(constant_on_device_of(np.array(0, "int32"), data), (), np.array(0, "int32"))
    return replace(rhs, data=data, zero=_shifted_zero_point(writer, zero, f"{name}_rhs_zero"))


def _shifted_zero_point(writer: ProductWriter, zero: Parameter, name: str) -> Parameter:
    if zero.value is not None:
        value = zero.value - np.int32(128)
        return Parameter(constant_on_device_of(value, zero.expr), zero.shape, value)
    expr = emitted_parameter(writer, zero, name)
    shifted = writer.binary(
        relax.op.subtract, expr, constant_on_device_of(np.array(128, "int32"), expr), f"{name}_moved"
    )
    return Parameter(shifted, zero.shape)


def _column_sums(writer: ProductWriter, rhs: Quantized, b: relax.Expr, name: str) -> relax.Expr:
    """The sums ``sum(b - zb)`` over k, of shape (n,) or (..., 1, n)."""
    zero = rhs.zero
    if rhs.data_value is None or (zero is not None and zero.value is None):
        wide = writer.cast(b, _ACCUMULATOR, f"{name}_wide")
        if zero is not None:
            wide = writer.binary(
                relax.op.subtract, wide, emitted_parameter(writer, zero, f"{name}_zero"), f"{name}_shifted"
            )
        return _sum(writer, wide, -2, name)
    array = _as_matrix_array(rhs.data_value.transpose(rhs.perm))
    sums = array.sum(axis=-2, keepdims=True, dtype=_ACCUMULATOR)
    if zero is not None and zero.value is not None:
        sums = sums - np.int32(array.shape[-2]) * zero.value
    return constant_on_device_of(sums.reshape(-1) if array.ndim == 2 else sums, b)


def _as_matrix_array(array: np.ndarray) -> np.ndarray:
    """A right operand as an array of at least two dimensions."""
    return array if array.ndim > 1 else array[:, np.newaxis]


def _multiply_negated(writer: ProductWriter, columns: relax.Expr, zero: Parameter, name: str) -> relax.Expr:
    if zero.value is not None and not isinstance(columns, relax.Var):
        return constant_on_device_of(columns.value.numpy() * -zero.value, columns)
    expr = emitted_parameter(writer, zero, f"{name}_zero")
    negated = writer.emit(relax.op.negative(expr), expr.ty, f"{name}_negated")
    return writer.binary(relax.op.multiply, columns, negated, name)


def _subtract_product(
    writer: ProductWriter, out: relax.Var, first: relax.Expr, second: relax.Expr, encoding: Encoding, name: str
) -> relax.Var:
    scalar = scalar_of(second)
    operands = (out, first, second) if scalar is None else (out, first)
    expression = f"subtract(x0, multiply(x1, {'x2' if scalar is None else scalar}))"
    return writer.emit(op.elementwise(*operands, expression=expression, encoding=encoding), out.ty, name)


def _scaled(writer: ProductWriter, plain: relax.Var, lhs: Quantized, rhs: Quantized, name: str) -> relax.Expr:
    value = writer.cast(plain, "float32", f"{name}_float")
    if lhs.scale is not None and rhs.scale is not None and lhs.scale.is_scalar:
        if lhs.scale.value is not None and rhs.scale.value is not None:
            scale = constant_on_device_of(lhs.scale.value * rhs.scale.value, plain)
        else:
            first, second = (
                emitted_parameter(writer, p, f"{name}_scale_{i}") for i, p in enumerate((lhs.scale, rhs.scale))
            )
            scale = writer.binary(relax.op.multiply, first, second, f"{name}_scale")
        return writer.binary(relax.op.multiply, value, scale, name)
    for index, parameter in ((LHS, lhs.scale), (RHS, rhs.scale)):
        if parameter is not None:
            scale = emitted_parameter(writer, parameter, f"{name}_scale_{index}")
            if index == LHS and not parameter.is_scalar:
                scale = writer.reshape(scale, [*(shape_of(scale) or []), 1], f"{name}_scale_column")
            value = writer.binary(relax.op.multiply, value, scale, name)
    return value


def emitted_parameter(writer: ProductWriter, parameter: Parameter, name: str) -> relax.Expr:
    """A zero point or scale with shape () or (size,)."""
    if parameter.value is not None:
        return constant_on_device_of(parameter.value, parameter.expr)
    if len(shape_of(parameter.expr) or []) == len(parameter.shape):
        return parameter.expr
    return writer.reshape(parameter.expr, parameter.shape, name)


def _sum(writer: ProductWriter, x: relax.Expr, axis: int, name: str) -> relax.Var:
    shape = shape_of(x) or []
    shape[axis] = 1
    return writer.emit(relax.op.sum(x, axis, keepdims=True), tensor_type(shape, str(x.ty.dtype), x.ty), name)
