"""Ops of ONNX Runtime's quantizer on quantized tensors.

They are imported by their definition as DequantizeLinear, the float op and QuantizeLinear, which passes fuse.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import relax

from ..elementwise import cast
from ..node import Node, dtype_of
from ..products import shifted
from ..quantization import dequantize_linear, dynamic_quantize_linear, quantize_linear
from ..quantization_parameters import as_type
from ..table import MICROSOFT, convert_node, converts
from .contrib_products import channels_first, channels_last

_PLAIN = {
    name: name.removeprefix("QLinear")
    for name in ("QLinearSigmoid", "QLinearLeakyRelu", "QLinearGlobalAveragePool", "QLinearAveragePool")
}


def _optional_tensor(node: Node, index: int) -> relax.Expr | None:
    return node.tensor(index) if node.has(index) else None


def _dequantize(node: Node, first: int) -> relax.Expr:
    """Dequantize inputs `first` to `first + 2`: data, scale and zero point."""
    inputs = [node.tensor(first), node.tensor(first + 1), _optional_tensor(node, first + 2)]
    return dequantize_linear(node.as_op("DequantizeLinear", inputs))


def _quantize(node: Node, value: relax.Expr, first: int, dtype: str) -> relax.Expr:
    """Quantize by inputs `first` (scale) and `first + 1` (zero point); to `dtype` without a zero point."""
    point = _optional_tensor(node, first + 1)
    attributes = {} if point is not None else {"output_dtype": 3 if dtype == "int8" else 2}
    return quantize_linear(node.as_op("QuantizeLinear", [value, node.tensor(first), point], **attributes))


@converts("QLinearAdd", "QLinearMul", domain=MICROSOFT)
def qlinear_binary(node: Node) -> relax.Expr:
    """Sum or product of two quantized tensors with broadcasting."""
    value = convert_node(node.as_op(node.op_type.removeprefix("QLinear"), [_dequantize(node, 0), _dequantize(node, 3)]))
    return _quantize(node, value, 6, dtype_of(node.tensor(0)))


@converts(*_PLAIN, domain=MICROSOFT)
def qlinear_unary(node: Node) -> relax.Expr:
    """Activations and average pooling, with channels first or last."""
    attributes = {name: value for name, value in node.attributes.items() if name not in ("channels_last", "tvm_custom")}
    value, is_last = _dequantize(node, 0), node.attribute("channels_last", 0)
    if is_last:
        value = channels_first(node, node.builder.normalize(value))
    value = node.builder.normalize(convert_node(node.as_op(_PLAIN[node.op_type], [value], **attributes)))
    if is_last:
        value = channels_last(node, value)
    return _quantize(node, value, 3, dtype_of(node.tensor(0)))


@converts("QLinearSoftmax", domain=MICROSOFT)
def qlinear_softmax(node: Node) -> relax.Expr:
    """Softmax of the node's standard opset."""
    opset = node.attribute("opset", 13)
    axis = node.attribute("axis", 1 if opset < 13 else -1)
    value = convert_node(node.as_op("Softmax", [_dequantize(node, 0)], opset, axis=axis))
    return _quantize(node, value, 3, dtype_of(node.tensor(0)))


@converts("QLinearConcat", domain=MICROSOFT)
def qlinear_concat(node: Node) -> relax.Expr:
    """Concatenate tensors of different scales."""
    parts = [_dequantize(node, first) for first in range(2, len(node.inputs), 3)]
    value = convert_node(node.as_op("Concat", parts, axis=node.attribute("axis")))
    return _quantize(node, value, 0, dtype_of(node.tensor(2)))


@converts("QLinearWhere", domain=MICROSOFT)
def qlinear_where(node: Node) -> relax.Expr:
    """Select between two quantized tensors."""
    value = convert_node(node.as_op("Where", [node.tensor(0), _dequantize(node, 1), _dequantize(node, 4)]))
    return _quantize(node, value, 7, dtype_of(node.tensor(1)))


@converts("QGemm", domain=MICROSOFT)
def qgemm(node: Node) -> relax.Expr:
    """alpha * A' @ B' + C, quantized if the result has a scale; C is int32 in units of the product of both scales."""
    b = [node.tensor(3), node.tensor(4), _optional_tensor(node, 5)]
    axis = 0 if node.attribute("transB", 0) else 1
    operands = [_dequantize(node, 0), dequantize_linear(node.as_op("DequantizeLinear", b, axis=axis))]
    attributes = {name: node.attributes[name] for name in ("transA", "transB", "alpha") if name in node.attributes}
    value = convert_node(node.as_op("Gemm", operands, **attributes))
    if node.has(6):
        scale = _product(node, node.tensor(1), node.tensor(4))
        alpha = node.attribute("alpha", 1.0)
        bias = node.emit(cast(node, node.tensor(6), "float32") * scale)
        bias = bias if alpha == 1.0 else node.emit(bias * relax.const(alpha, "float32"))
        value = node.emit(value + bias)
    return _quantize(node, value, 7, dtype_of(node.tensor(0))) if node.has(7) else value


def _product(node: Node, first: relax.Expr, second: relax.Expr) -> relax.Expr:
    return node.emit(as_type(node, first, "float32") * as_type(node, second, "float32"))


@converts("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_integer_to_float(node: Node) -> relax.Expr:
    """Product of integers minus their zero points, times both scales, plus a bias."""
    operands = [node.tensor(0), node.tensor(1), _optional_tensor(node, 4), _optional_tensor(node, 5)]
    return _scaled_product(node, operands, [node.tensor(2), node.tensor(3)], _optional_tensor(node, 6))


@converts("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_matmul(node: Node) -> relax.Expr:
    """Product of dynamically quantized data and quantized weights, plus a bias."""
    quantized = dynamic_quantize_linear(node.as_op("DynamicQuantizeLinear", [node.tensor(0)]))
    data, scale, point = quantized.fields
    operands = [data, node.tensor(1), point, _optional_tensor(node, 3)]
    return _scaled_product(node, operands, [scale, node.tensor(2)], _optional_tensor(node, 4))


def _scaled_product(
    node: Node, operands: list[relax.Expr | None], scales: list[relax.Expr], bias: relax.Expr | None
) -> relax.Expr:
    total = cast(node, convert_node(node.as_op("MatMulInteger", operands)), "float32")
    value = node.emit(total * _product(node, *scales))
    return value if bias is None else node.emit(value + bias)


@converts("QLinearReduceMean", domain=MICROSOFT)
def qlinear_reduce_mean(node: Node) -> relax.Expr:
    """Mean over axes of a quantized tensor."""
    attributes = {name: node.attributes[name] for name in ("axes", "keepdims") if name in node.attributes}
    value = convert_node(node.as_op("ReduceMean", [_dequantize(node, 0)], 13, **attributes))
    return _quantize(node, value, 3, dtype_of(node.tensor(0)))


@converts("ReduceSumInteger", domain=MICROSOFT)
def reduce_sum_integer(node: Node) -> relax.Expr:
    """Sum of 8-bit integers over axes, in int32 or uint32."""
    data = node.tensor(0)
    wide = cast(node, data, "uint32" if dtype_of(data).startswith("uint") else "int32")
    axes = [node.axis(axis, node.rank(data)) for axis in node.attribute("axes", range(node.rank(data)))]
    return node.emit(relax.op.sum(wide, axes, keepdims=bool(node.attribute("keepdims", 1))))


@converts("MulInteger", domain=MICROSOFT)
def mul_integer(node: Node) -> relax.Expr:
    """Product in int32 of 8-bit integers minus their zero points, with broadcasting."""
    operands = [shifted(node, node.tensor(first), _optional_tensor(node, first + 1), None) for first in (0, 2)]
    return convert_node(node.as_op("Mul", operands, 14))


@converts("QEmbedLayerNormalization", domain=MICROSOFT)
def quantized_embed_layer_normalization(node: Node) -> relax.Expr:
    """EmbedLayerNormalization with quantized tables, scale and bias."""
    parameter_indices = {2: (8, 13), 3: (9, 14), 4: (10, 15), 5: (11, 16), 6: (12, 17)}
    floats = [
        dequantize_linear(
            node.as_op("DequantizeLinear", [node.tensor(index), node.tensor(scale), _optional_tensor(node, point)])
        )
        if node.has(index)
        else None
        for index, (scale, point) in parameter_indices.items()
    ]
    inputs = [node.tensor(0), _optional_tensor(node, 1), *floats, _optional_tensor(node, 7)]
    attributes = {"epsilon": node.attributes["epsilon"]} if "epsilon" in node.attributes else {}
    plain = replace(
        node.as_op("EmbedLayerNormalization", inputs, **attributes), domain=MICROSOFT, num_outputs=node.num_outputs
    )
    return convert_node(plain)
