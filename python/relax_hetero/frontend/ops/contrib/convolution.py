"""Convolutions and pooling with channels last, or with a sum and an activation joined to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm import relax

from ..convolution import convolution
from ..node import Node
from ..pooling import max_pool
from ..quantization import qlinear_conv
from ..required_sizes import require_shape
from ..table import MICROSOFT, convert_node, converts
from .fused_activations import activated


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
