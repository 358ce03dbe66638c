"""Products, convolutions and pooling that ONNX Runtime's optimizer fuses with transposes, sums or activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm import relax

from ..convolution import convolution
from ..node import Node, const, dtype_of
from ..pooling import max_pool
from ..products import gemm, matmul
from ..quantization import qlinear_conv
from ..required_sizes import require_shape
from ..table import MICROSOFT, convert_node, converts

# Fused activation -> its parameters in the order of `activation_params`, named as the standard op's attributes.
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "Relu": (),
    "Tanh": (),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "HardSwish": (),
    "LeakyRelu": ("alpha",),
    "Elu": ("alpha",),
    "ThresholdedRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Clip": ("min", "max"),
}
# FusedGemm has an attribute for each parameter.
_NAMED_PARAMETERS = {name: f"activation_{name}" for name in ("alpha", "beta", "gamma")}


def apply_activation(node: Node, value: relax.Expr) -> relax.Expr:
    """Apply the activation of the node's attribute `activation`, if any.

    Raises FrontendError if the activation is unknown, or has another number of parameters.
    """
    name = node.attribute("activation", "")
    if not name:
        return value
    if name not in _PARAMETERS:
        raise node.refusal(f"activation {name!r} cannot be imported; expected one of {', '.join(_PARAMETERS)}")
    parameters = [float(number) for number in node.attribute("activation_params", ())]
    named = {
        key: node.attribute(attribute) for key, attribute in _NAMED_PARAMETERS.items() if attribute in node.attributes
    }
    if parameters and len(parameters) != len(_PARAMETERS[name]):
        raise node.refusal(f"activation {name!r} has {len(parameters)} parameters, expected {len(_PARAMETERS[name])}")
    attributes = dict(zip(_PARAMETERS[name], parameters, strict=False)) or named
    if name == "Clip":  # an opset whose bounds are attributes
        return convert_node(node.as_op(name, [value], 6, **attributes))
    return convert_node(node.as_op(name, [value], max(node.opset, 14), **attributes))


def _transpose_operand(node: Node, index: int, letter: str) -> relax.Expr:
    """Transpose an operand of FusedMatMul by its attributes."""
    value = node.tensor(index)
    axes = list(range(node.rank(value)))
    if node.attribute(f"transBatch{letter}", 0) and len(axes) > 2:
        # The operand is (rows, batches ..., columns).
        axes = [*axes[1:-1], axes[0], axes[-1]]
    if node.attribute(f"trans{letter}", 0) and len(axes) > 1:
        axes = [*axes[:-2], axes[-1], axes[-2]]
    return value if axes == sorted(axes) else node.emit(relax.op.permute_dims(value, axes))


@converts("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(node: Node) -> relax.Expr:
    """alpha * A' @ B', with optional transposes."""
    product = matmul(node, _transpose_operand(node, 0, "A"), _transpose_operand(node, 1, "B"))
    alpha = node.attribute("alpha", 1.0)
    return product if alpha == 1.0 else node.emit(product * const(alpha, dtype_of(product)))


@converts("FusedMatMulActivation", domain=MICROSOFT)
def fused_matmul_activation(node: Node) -> relax.Expr:
    """FusedMatMul and an activation, which may be Softmax along `activation_axis`."""
    product = fused_matmul(node)
    if node.attribute("activation") != "Softmax":
        return apply_activation(node, product)
    softmax = node.as_op("Softmax", [product], 13, axis=node.attribute("activation_axis", -1))
    return convert_node(softmax)


@converts("GemmFastGelu", domain=MICROSOFT)
def gemm_fast_gelu(node: Node) -> relax.Expr:
    """Tanh approximation of GELU of a product plus a bias."""
    product = matmul(node, node.tensor(0), node.tensor(1))
    gelu = node.as_op("FastGelu", [product, node.inputs[2] if node.has(2) else None])
    gelu.domain = MICROSOFT
    return convert_node(gelu)


@converts("FusedGemm", domain=MICROSOFT)
def fused_gemm(node: Node) -> relax.Expr:
    """Gemm and an activation."""
    return apply_activation(node, gemm(node))


@converts("MatMulInteger16", domain=MICROSOFT)
def matmul_integer16(node: Node) -> relax.Expr:
    """Product of 16-bit integers in int32, or uint32 if both are unsigned; sums wrap around."""
    operands = [node.tensor(index) for index in (0, 1)]
    is_unsigned = all(dtype_of(operand) == "uint16" for operand in operands)
    dtype = "uint32" if is_unsigned else "int32"
    return matmul(node, *(node.emit(relax.op.astype(operand, dtype)) for operand in operands))


def channels_first(node: Node, value: relax.Expr) -> relax.Expr:
    """Convert [batch, ..., channels] to [batch, channels, ...]."""
    rank = node.rank(value)
    return node.emit(relax.op.permute_dims(value, [0, rank - 1, *range(1, rank - 1)]))


def channels_last(node: Node, value: relax.Expr) -> relax.Expr:
    """Convert [batch, channels, ...] to [batch, ..., channels]."""
    return node.emit(relax.op.permute_dims(value, [0, *range(2, node.rank(value)), 1]))


def _with_channels_first(node: Node, indices: Sequence[int]) -> Node:
    inputs = list(node.inputs)
    for index in indices:
        if node.has(index):
            inputs[index] = channels_first(node, node.tensor(index))
    return replace(node, inputs=inputs)


@converts("FusedConv", domain=MICROSOFT)
def fused_convolution(node: Node) -> relax.Expr:
    """activation(convolution + Z)."""
    result = convolution(node)
    if node.has(3):
        addend = require_shape(node, node.tensor(3), node.shape(result), "its Z")
        result = node.emit(result + addend)
    return apply_activation(node, result)


@converts("NhwcFusedConv", "NhwcConv", domain=MICROSOFT)
def convolution_of_channels_last(node: Node) -> relax.Expr:
    """`fused_convolution` with channels last."""
    return channels_last(node, node.builder.normalize(fused_convolution(_with_channels_first(node, (0, 1, 3)))))


@converts("NhwcMaxPool", domain=MICROSOFT)
def max_pool_of_channels_last(node: Node) -> relax.Expr:
    """MaxPool with channels last."""
    return channels_last(node, node.builder.normalize(max_pool(_with_channels_first(node, (0,)))))


@converts("QLinearConv", domain=MICROSOFT)
def quantized_convolution(node: Node) -> relax.Expr:
    """Standard QLinearConv, optionally with channels last except in the kernel."""
    if not node.attribute("channels_last", 0):
        return qlinear_conv(node)
    return channels_last(node, node.builder.normalize(qlinear_conv(_with_channels_first(node, (0,)))))


@converts("ConvTransposeWithDynamicPads", domain=MICROSOFT)
def transposed_convolution_with_pads(node: Node) -> relax.Expr:
    """ConvTranspose with pads as an input."""
    inputs = [node.tensor(0), node.tensor(1), node.tensor(3) if node.has(3) else None]
    attributes = {name: value for name, value in node.attributes.items() if name != "tvm_custom"}
    if node.has(2):
        pads = node.known_dims(2, "its pads are")
        if not all(isinstance(pad, int) for pad in pads):
            raise node.unknown("its pads are")
        attributes["pads"] = [pad for pad in pads if isinstance(pad, int)]
    return convert_node(node.as_op("ConvTranspose", inputs, 11, **attributes))
