"""Products of matrices with what ONNX Runtime's optimizer joins to them: transposes, factors, activations."""

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

# The activation that ONNX Runtime's optimizer joins to a product or convolution, named by attributes.

# Activations, their parameters in the order of `activation_params`; the names are the standard op's attributes.
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
# FusedGemm names parameters one by one.
_NAMED = {name: f"activation_{name}" for name in ("alpha", "beta", "gamma")}


def activated(node: Node, value: relax.Expr) -> relax.Expr:
    """The value after the activation that the node's attribute `activation` names; as it is where there is none.

    Raises
    ------
    FrontendError
        If the activation is unknown, or has another number of parameters.
    """
    name = node.attribute("activation", "")
    if not name:
        return value
    if name not in _PARAMETERS:
        raise node.refusal(f"activation {name!r} cannot be imported; expected one of {', '.join(_PARAMETERS)}")
    given = [float(number) for number in node.attribute("activation_params", ())]
    named = {key: node.attribute(attribute) for key, attribute in _NAMED.items() if attribute in node.attributes}
    if given and len(given) != len(_PARAMETERS[name]):
        raise node.refusal(f"activation {name!r} has {len(given)} parameters, expected {len(_PARAMETERS[name])}")
    attributes = dict(zip(_PARAMETERS[name], given, strict=False)) or named
    if name == "Clip":  # of an opset whose bounds are attributes
        return convert_node(node.as_op(name, [value], 6, **attributes))
    return convert_node(node.as_op(name, [value], max(node.opset, 14), **attributes))


def _transposed(node: Node, index: int, letter: str) -> relax.Expr:
    """An operand of FusedMatMul: its last two axes change places, or its second to its last but one moves first."""
    value = node.tensor(index)
    axes = list(range(node.rank(value)))
    if node.attribute(f"transBatch{letter}", 0) and len(axes) > 2:
        # Given as (rows, batches ..., columns).
        axes = [*axes[1:-1], axes[0], axes[-1]]
    if node.attribute(f"trans{letter}", 0) and len(axes) > 1:
        axes = [*axes[:-2], axes[-1], axes[-2]]
    return value if axes == sorted(axes) else node.emit(relax.op.permute_dims(value, axes))


@converts("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(node: Node) -> relax.Expr:
    """alpha * A' @ B', the axes of both in another order where attributes say so."""
    product = matmul(node, _transposed(node, 0, "A"), _transposed(node, 1, "B"))
    alpha = node.attribute("alpha", 1.0)
    return product if alpha == 1.0 else node.emit(relax.op.multiply(product, const(alpha, dtype_of(product))))


@converts("FusedMatMulActivation", domain=MICROSOFT)
def fused_matmul_activation(node: Node) -> relax.Expr:
    """A FusedMatMul and an activation; of Softmax along `activation_axis`."""
    product = fused_matmul(node)
    if node.attribute("activation") != "Softmax":
        return activated(node, product)
    softmax = node.as_op("Softmax", [product], 13, axis=node.attribute("activation_axis", -1))
    return convert_node(softmax)


@converts("GemmFastGelu", domain=MICROSOFT)
def gemm_fast_gelu(node: Node) -> relax.Expr:
    """The approximation of gelu by tanh, of a product plus a bias."""
    product = matmul(node, node.tensor(0), node.tensor(1))
    gelu = node.as_op("FastGelu", [product, node.inputs[2] if node.has(2) else None])
    gelu.domain = MICROSOFT
    return convert_node(gelu)


@converts("FusedGemm", domain=MICROSOFT)
def fused_gemm(node: Node) -> relax.Expr:
    """A Gemm and an activation."""
    return activated(node, gemm(node))


@converts("MatMulInteger16", domain=MICROSOFT)
def matmul_integer16(node: Node) -> relax.Expr:
    """A product of 16-bit integers in int32, or in uint32 where both have no sign; sums wrap around."""
    operands = [node.tensor(index) for index in (0, 1)]
    is_unsigned = all(dtype_of(operand) == "uint16" for operand in operands)
    dtype = "uint32" if is_unsigned else "int32"
    return matmul(node, *(node.emit(relax.op.astype(operand, dtype)) for operand in operands))


# Convolutions and pooling with channels last, or with a sum and an activation joined to them.


def channels_first(node: Node, value: relax.Expr) -> relax.Expr:
    """[batch, ..., channels] as [batch, channels, ...]."""
    rank = node.rank(value)
    return node.emit(relax.op.permute_dims(value, [0, rank - 1, *range(1, rank - 1)]))


def channels_last(node: Node, value: relax.Expr) -> relax.Expr:
    """[batch, channels, ...] as [batch, ..., channels]."""
    rank = node.rank(value)
    return node.emit(relax.op.permute_dims(value, [0, *range(2, rank), 1]))


def _with_channels_first(node: Node, indices: Sequence[int]) -> Node:
    inputs = list(node.inputs)
    for index in indices:
        if node.has(index):
            inputs[index] = channels_first(node, node.tensor(index))
    return replace(node, inputs=inputs)


def _fused(node: Node) -> relax.Expr:
    """activation(convolution + Z)."""
    result = convolution(node)
    if node.has(3):
        addend = require_shape(node, node.tensor(3), node.shape(result), "its Z")
        result = node.emit(relax.op.add(result, addend))
    return activated(node, result)


@converts("FusedConv", domain=MICROSOFT)
def fused_convolution(node: Node) -> relax.Expr:
    """A convolution, plus a tensor of its shape, and an activation."""
    return _fused(node)


@converts("NhwcFusedConv", "NhwcConv", domain=MICROSOFT)
def convolution_of_channels_last(node: Node) -> relax.Expr:
    """The same of images, kernels and sums whose channels are their last axis."""
    return channels_last(node, node.builder.normalize(_fused(_with_channels_first(node, (0, 1, 3)))))


@converts("NhwcMaxPool", domain=MICROSOFT)
def max_pool_of_channels_last(node: Node) -> relax.Expr:
    """MaxPool of images whose channels are their last axis."""
    return channels_last(node, node.builder.normalize(max_pool(_with_channels_first(node, (0,)))))


@converts("QLinearConv", domain=MICROSOFT)
def quantized_convolution(node: Node) -> relax.Expr:
    """As the standard QLinearConv; with channels last where `channels_last` says so, but for the kernel."""
    if not node.attribute("channels_last", 0):
        return qlinear_conv(node)
    return channels_last(node, node.builder.normalize(qlinear_conv(_with_channels_first(node, (0,)))))


@converts("ConvTransposeWithDynamicPads", domain=MICROSOFT)
def transposed_convolution_with_pads(node: Node) -> relax.Expr:
    """As ConvTranspose; the pads are an input."""
    inputs = [node.tensor(0), node.tensor(1), node.tensor(3) if node.has(3) else None]
    attributes = {name: value for name, value in node.attributes.items() if name != "tvm_custom"}
    if node.has(2):
        pads = node.known_dims(2, "its pads are")
        if not all(isinstance(pad, int) for pad in pads):
            raise node.unknown("its pads are")
        attributes["pads"] = [pad for pad in pads if isinstance(pad, int)]
    return convert_node(node.as_op("ConvTranspose", inputs, 11, **attributes))
