"""Quantized tensors: QuantizeLinear, DequantizeLinear, quantized products and convolutions; and Cast."""

from __future__ import annotations

import numpy as np
import onnx
import tvm
from tvm import relax

from ...tir.math.narrow_floats import FLOATS, POWERS
from .block_weights import dequantized_blocks
from .convolution import integer_convolution
from .elementwise import cast
from .node import Node, as_constant, const, dtype_of, is_float, onnx_dtype
from .products import shifted
from .quantization_parameters import INTEGER_RANGES, along, as_type, check_zero_point, is_zero, reshaped
from .required_sizes import require_fits, require_shape
from .storage_types import INTEGERS, STORAGE_TYPES, bytes_of, from_float32, of_bytes, to_float32, with_bytes, wrapped
from .table import convert_by_stock, converts

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@converts("Cast")
def convert_cast(node: Node) -> relax.Expr:
    """Cast; a float to an integer is truncated."""
    value = node.inputs[0]
    target = _target(node.attribute("to"))
    if isinstance(value, relax.ShapeExpr) or tvm.ir.is_prim_expr(value):
        if target == "int64":
            return value
        return (
            cast(node, node.tensor(0), target)
            if target not in STORAGE_TYPES
            else _to_storage(node, node.tensor(0), target)
        )
    data = node.tensor(0)
    if dtype_of(data) == target:
        return data
    if dtype_of(data) in STORAGE_TYPES:
        data = to_float32(node, data) if dtype_of(data) in FLOATS else bytes_of(node, data)
    if target in STORAGE_TYPES:
        return _to_storage(node, data, target)
    if dtype_of(data) == target:
        return data
    if is_float(dtype_of(data)) and target in _INTEGERS:  # stock TVM converts NaN and infinities to 0, and wraps others
        return node.emit(relax.op.astype(data, target))
    return convert_by_stock(node.as_op(node.op_type, [data], to=target))


def _target(type_: int | str) -> str:
    """Element type of an ONNX number, a name as before opset 6, or a TVM name."""
    if isinstance(type_, int):
        return onnx_dtype(type_)
    numbers = dict(onnx.TensorProto.DataType.items())
    return onnx_dtype(numbers[type_.upper()]) if type_.upper() in numbers else type_


def _to_storage(node: Node, data: relax.Expr, target: str) -> relax.Expr:
    """Convert numbers to a storage type (fp8, int4 …)."""
    if target in INTEGERS:
        return wrapped(node, cast(node, data, "int32") if is_float(dtype_of(data)) else data, target)
    if dtype_of(data) == "float64":
        raise node.refusal(f"float64 to {target} would be rounded twice; cast to float32 before")
    rounding = node.attribute("round_mode", "up")
    if rounding not in ("up", "down", "nearest"):
        raise node.refusal(f"found round_mode {rounding!r}, expected up, down or nearest")
    return from_float32(node, cast(node, data, "float32"), target, bool(node.attribute("saturate", 1)), rounding)


@converts("CastLike")
def cast_like(node: Node) -> relax.Expr:
    """Cast to the type of the second input."""
    return convert_cast(
        node.as_op(
            "Cast",
            [node.inputs[0]],
            to=dtype_of(node.tensor(1)),
            saturate=node.attribute("saturate", 1),
            round_mode=node.attribute("round_mode", "up"),
        )
    )


def quantize(node: Node, scaled: relax.Expr, zero_point: relax.Expr | None, dtype: str) -> relax.Expr:
    """round-half-even(scaled) + zero point, clamped to the range of `dtype`."""
    compute = "float64" if dtype_of(scaled) == "float64" else "float32"
    value = node.emit(relax.op.round(cast(node, scaled, compute)))
    if zero_point is not None and not is_zero(zero_point):
        value = node.emit(value + as_type(node, zero_point, compute))
    low, high = INTEGER_RANGES[dtype] if dtype in INTEGER_RANGES else INTEGERS[dtype]
    clamped = cast(node, node.emit(relax.op.clip(value, low, high)), STORAGE_TYPES.get(dtype, dtype))
    return of_bytes(node, clamped, dtype) if dtype in STORAGE_TYPES else clamped


@converts("QuantizeLinear")
def quantize_linear(node: Node) -> relax.Expr:
    """round(x / scale) + zero point to at most 16 bits, with scales per tensor, axis or block."""
    data = node.tensor(0)
    shape = node.shape(data)
    check_zero_point(node, 1, 2)
    constant_scale = as_constant(node.tensor(1))
    if constant_scale is not None and not np.all(constant_scale):
        raise node.refusal("found a scale of 0, expected nonzero numbers")
    zero_point = node.tensor(2) if node.has(2) else None
    dtype = dtype_of(zero_point) if zero_point is not None else "uint8"
    if node.attribute("output_dtype", 0):
        dtype = onnx_dtype(node.attribute("output_dtype"))
    kinds = [*INTEGER_RANGES, *STORAGE_TYPES]
    if dtype not in kinds or dtype == POWERS:
        raise node.refusal(f"to {dtype} cannot be imported; expected one of {', '.join(kinds)}")
    scale = node.tensor(1)
    compute = onnx_dtype(node.attribute("precision")) if node.attribute("precision", 0) else None
    if not is_float(dtype_of(scale)):
        compute = compute or "float32"
    compute = compute or (dtype_of(data) if dtype_of(data) == dtype_of(scale) else "float32")
    scaled = node.emit(cast(node, data, compute) / along(node, scale, shape, compute))
    if zero_point is not None:
        zero_point = to_float32(node, zero_point) if dtype in FLOATS else bytes_of(node, zero_point)
    point = None if zero_point is None else along(node, zero_point, shape, dtype_of(zero_point))
    if dtype in FLOATS:
        number = cast(node, scaled, "float32")
        if point is not None:
            number = node.emit(number + point)
        return from_float32(node, number, dtype, bool(node.attribute("saturate", 1)))
    return quantize(node, scaled, point, dtype)


@converts("DequantizeLinear")
def dequantize_linear(node: Node) -> relax.Expr:
    """(x - zero point) * scale, with scales per tensor, axis or block."""
    node = with_bytes(node)
    blocks = dequantized_blocks(node)
    if blocks is not None:
        return blocks
    data, scale = node.tensor(0), node.tensor(1)
    shape, source = node.shape(data), dtype_of(data)
    check_zero_point(node, 1, 2)
    target = dtype_of(scale)
    if node.attribute("output_dtype", 0):
        target = onnx_dtype(node.attribute("output_dtype"))
    number = _dequantized_scalar(node) if source not in FLOATS else None
    if number is not None:
        return const(number, target)
    if source in FLOATS:
        data = to_float32(node, data)
        if node.has(2):
            point = along(node, to_float32(node, node.tensor(2)), shape, "float32")
            data = node.emit(data - point)
    elif node.has(2) and not is_zero(node.tensor(2)):
        point = along(node, node.tensor(2), shape, "int32")
        data = node.emit(cast(node, data, "int32") - point)
    factor = along(node, scale, shape, "float32")
    return cast(node, node.emit(cast(node, data, "float32") * factor), target)


def _dequantized_scalar(node: Node) -> np.ndarray | None:
    """A dequantized constant of one element, such as an exponent or divisor that converters read."""
    data, scale, point = (node.constant(index) for index in range(3))
    if data is None or data.size != 1 or scale is None or scale.size != 1 or (node.has(2) and point is None):
        return None
    shifted_data = data.astype("int32") - (0 if point is None else point.astype("int32").reshape(()))
    return shifted_data.astype("float32") * scale.astype("float32").reshape(())


@converts("DynamicQuantizeLinear")
def dynamic_quantize_linear(node: Node) -> relax.Expr:
    """Quantize to uint8 over the data's range extended to 0; outputs also scale and zero point."""
    data = node.tensor(0)
    zero = const(0, "float32")
    high = node.emit(relax.op.maximum(relax.op.max(data), zero))
    low = node.emit(relax.op.minimum(relax.op.min(data), zero))
    scale = node.emit((high - low) / const(255, "float32"))
    is_flat = node.emit(relax.op.equal(scale, zero))  # all zeros: onnxruntime uses a scale of 1
    safe = node.emit(relax.op.where(is_flat, const(1, "float32"), scale))
    zero_position = node.emit((zero - low) / safe)
    point = cast(node, node.emit(relax.op.round(relax.op.clip(zero_position, 0, 255))), "uint8")
    return relax.Tuple([quantize(node, node.emit(data / safe), point, "uint8"), safe, point])


def quantized_and_back(node: Node, data: relax.Expr) -> relax.Expr:
    """Quantize to uint8 and dequantize."""
    quantized, scale, point = dynamic_quantize_linear(node.as_op("DynamicQuantizeLinear", [data])).fields
    difference = node.emit(cast(node, quantized, "float32") - cast(node, point, "float32"))
    return node.emit(difference * scale)


def _requantize(node: Node, total: relax.Expr, scales: list[relax.Expr], zero_point: relax.Expr) -> relax.Expr:
    """Quantize int32 sums: total * (scale of A * scale of B / scale of the result) + zero point."""
    factor = _factor(node, [as_type(node, scale, "float32") for scale in scales])
    scaled = node.emit(cast(node, total, "float32") * factor)
    return quantize(node, scaled, zero_point, dtype_of(zero_point))


def _factor(node: Node, scales: list[relax.Expr]) -> relax.Expr:
    """first * second / result in float32, folded if all three are constant."""
    arrays = [as_constant(scale) for scale in scales]
    first, second, result = scales
    if any(array is None for array in arrays):
        return node.emit(first * second / result)
    constants = [array for array in arrays if array is not None]
    return const(constants[0] * constants[1] / constants[2], "float32")


def _scalar(node: Node, index: int) -> relax.Expr:
    value = node.tensor(index)
    if node.static_shape(value) not in ([], [1]):
        raise node.refusal(f"input {index} has shape {node.static_shape(value)}, expected one number")
    return reshaped(node, value, ())


def _broadcast_along(node: Node, index: int, result: relax.Expr, axis: int) -> relax.Expr:
    """A scalar input, or a vector reshaped to broadcast along an axis of the result."""
    value, rank = node.tensor(index), node.rank(result)
    if node.static_shape(value) in ([], [1]):
        return reshaped(node, value, ())
    if node.rank(value) == rank:
        require_fits(node, value, node.shape(result), f"input {index}")
        return value
    value = require_shape(node, value, [node.shape(result)[axis]], f"input {index}")
    return reshaped(node, value, [-1 if i == axis % rank else 1 for i in range(rank)])


@converts("QLinearMatMul")
def qlinear_matmul(node: Node) -> relax.Expr:
    """Quantized product of quantized matrices; scales per tensor, row of A, or column of B."""
    a, b = node.tensor(0), node.tensor(3)
    product = node.emit(
        relax.op.matmul(shifted(node, a, node.tensor(2), -2), shifted(node, b, node.tensor(5), -1), out_dtype="int32")
    )
    scales = [_broadcast_along(node, 1, product, -2), _broadcast_along(node, 4, product, -1), _scalar(node, 6)]
    return _requantize(node, product, scales, _scalar(node, 7))


@converts("QLinearConv")
def qlinear_conv(node: Node) -> relax.Expr:
    """Quantized convolution of quantized tensors; the weight's scale is per tensor or output channel."""
    data, weight = node.tensor(0), node.tensor(3)
    check_zero_point(node, 1, 2)
    check_zero_point(node, 4, 5)
    shifted_weight = shifted(node, weight, node.tensor(5), 0)
    total = integer_convolution(node, shifted(node, data, node.tensor(2), None), shifted_weight)
    if node.has(8):
        bias = require_shape(node, node.tensor(8), [node.shape(total)[1]], "its bias")
        total = node.emit(total + node.per_channel(bias, node.rank(data)))
    scales = [_scalar(node, 1), _broadcast_along(node, 4, total, 1), _scalar(node, 6)]
    return _requantize(node, total, scales, _scalar(node, 7))


@converts("ConvInteger")
def conv_integer(node: Node) -> relax.Expr:
    """Convolution of 8-bit integers minus their zero points, in int32."""
    data, weight = node.tensor(0), node.tensor(1)
    data_point, weight_point = (node.tensor(i) if node.has(i) else None for i in (2, 3))
    return integer_convolution(node, shifted(node, data, data_point, None), shifted(node, weight, weight_point, 0))
