"""Gelus and sums with a bias, as ONNX Runtime's optimizer joins them."""

from __future__ import annotations

from tvm import relax

from ..elementwise import cast, widened
from ..node import Node, const, dtype_of
from ..required_sizes import require_shape
from ..slicing import cut
from ..table import MICROSOFT, converts


def _with_bias(node: Node, index: int) -> relax.Expr:
    """Input 0, plus a vector along its last axis where input `index` is given; in float32 for half precision."""
    data = node.tensor(0)
    wide = widened(node, data)
    if not node.has(index):
        return wide
    bias = require_shape(node, node.tensor(index), [node.shape(data)[-1]], "its bias")
    return node.emit(relax.op.add(wide, widened(node, bias)))


@converts("Gelu", "BiasGelu", domain=MICROSOFT)
def gelu(node: Node) -> relax.Expr:
    """x / 2 * (1 + erf(x / sqrt(2))) of x + bias."""
    return cast(node, node.emit(relax.op.nn.gelu(_with_bias(node, 1))), dtype_of(node.tensor(0)))


@converts("FastGelu", domain=MICROSOFT)
def fast_gelu(node: Node) -> relax.Expr:
    """The approximation of gelu by tanh, of x + bias."""
    return cast(node, node.emit(relax.op.nn.gelu_tanh(_with_bias(node, 1))), dtype_of(node.tensor(0)))


@converts("QuickGelu", domain=MICROSOFT)
def quick_gelu(node: Node) -> relax.Expr:
    """x * sigmoid(alpha * x)."""
    data = node.tensor(0)
    wide = widened(node, data)
    alpha = node.attribute("alpha", 1.702)
    scaled = wide if alpha == 1.0 else node.emit(relax.op.multiply(wide, const(alpha, dtype_of(wide))))
    return cast(node, node.emit(relax.op.multiply(wide, relax.op.sigmoid(scaled))), dtype_of(data))


@converts("BiasSplitGelu", domain=MICROSOFT)
def bias_split_gelu(node: Node) -> relax.Expr:
    """The first half of the channels of x + bias, times the gelu of the second half."""
    wide = _with_bias(node, 1)
    channels = node.shape(wide)[-1]
    if not isinstance(channels, int) or channels % 2:
        raise node.refusal(f"found {channels} channels, expected a known, even number")
    axis = node.rank(wide) - 1
    left, right = (cut(node, wide, {axis: (start, channels // 2, 1)}) for start in (0, channels // 2))
    product = node.emit(relax.op.multiply(left, relax.op.nn.gelu(right)))
    return cast(node, product, dtype_of(node.tensor(0)))


@converts("BiasAdd", domain=MICROSOFT)
def bias_add(node: Node) -> relax.Expr:
    """x + bias along the last axis + skip."""
    wide = _with_bias(node, 1)
    skip = require_shape(node, node.tensor(2), node.shape(wide), "its skip input")
    return cast(node, node.emit(relax.op.add(wide, widened(node, skip))), dtype_of(node.tensor(0)))
