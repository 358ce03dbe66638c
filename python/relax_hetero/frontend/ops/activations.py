"""Activation functions."""

from __future__ import annotations

from tvm import relax

from ...encoding.functions import FUNCTIONS
from ...op.functions import apply_function
from .elementwise import cast, widened
from .node import Node, const, dtype_of
from .required_sizes import stretched
from .table import converts


@converts("PRelu")
def prelu(node: Node) -> relax.Expr:
    """x where x >= 0, else slope * x; the slope broadcasts to x (before opset 7: a vector runs along the channels)."""
    data, slope = node.tensor(0), node.tensor(1)
    rank = node.rank(data)
    if node.opset < 7 and node.rank(slope) == 1 and rank > 2 and node.shape(slope) != [1]:
        slope = node.per_channel(slope, rank)
    data, slope = stretched(node, [data, slope])
    return node.emit(relax.op.where(data < const(0, dtype_of(data)), data * slope, data))


@converts("LeakyRelu")
def leaky_relu(node: Node) -> relax.Expr:
    """x where x >= 0, else alpha * x."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    scaled = node.emit(data * const(node.attribute("alpha", 0.01), dtype))
    return node.emit(relax.op.where(data < const(0, dtype), scaled, data))


def _exponential_unit(node: Node, data: relax.Expr, alpha: float, inverse: float = 1.0) -> relax.Expr:
    """x where x > 0, else alpha * (exp(x / inverse) - 1), in x's type."""
    dtype = dtype_of(data)
    # exp of the negative part only, so that a large x does not overflow in the unused branch
    below = node.emit(relax.op.minimum(data, const(0, dtype)))
    if inverse != 1.0:
        below = node.emit(below / const(inverse, dtype))
    expm1 = node.emit(relax.op.exp(below) - const(1, dtype))
    scaled = node.emit(const(alpha, dtype) * expm1)
    return node.emit(relax.op.where(data > const(0, dtype), data, scaled))


@converts("Elu")
def elu(node: Node) -> relax.Expr:
    """x where x > 0, else alpha * (exp(x) - 1)."""
    return _exponential_unit(node, node.tensor(0), node.attribute("alpha", 1.0))


@converts("Celu")
def celu(node: Node) -> relax.Expr:
    """x where x > 0, else alpha * (exp(x / alpha) - 1)."""
    alpha = node.attribute("alpha", 1.0)
    return _exponential_unit(node, node.tensor(0), alpha, alpha)


@converts("Selu")
def selu(node: Node) -> relax.Expr:
    """gamma * elu(x)."""
    data = node.tensor(0)
    alpha = node.attribute("alpha", 1.67326319217681884765625)
    gamma = node.attribute("gamma", 1.05070102214813232421875)
    unit = _exponential_unit(node, data, alpha)
    return node.emit(const(gamma, dtype_of(data)) * unit)


@converts("ThresholdedRelu")
def thresholded_relu(node: Node) -> relax.Expr:
    """x where x > alpha, else 0."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    above = data > const(node.attribute("alpha", 1.0), dtype)
    return node.emit(relax.op.where(above, data, const(0, dtype)))


@converts("HardSigmoid")
def hard_sigmoid(node: Node) -> relax.Expr:
    """max(0, min(1, alpha * x + beta))."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    scaled = const(node.attribute("alpha", 0.2), dtype) * data
    return node.emit(relax.op.clip(scaled + const(node.attribute("beta", 0.5), dtype), 0, 1))


_FUNCTIONS = {function.onnx: name for name, function in FUNCTIONS.items() if function.onnx}


@converts(*_FUNCTIONS)
def function(node: Node) -> relax.Expr:
    """Convert a function of one operand by its row in `FUNCTIONS`."""
    return node.emit(apply_function(_FUNCTIONS[node.op_type], node.tensor(0)))


@converts("Softplus")
def softplus(node: Node) -> relax.Expr:
    """log(1 + exp(x)) as max(x, 0) + log(1 + e) with e = exp(-|x|), whose small values the sum with 1 must not lose."""
    data = node.tensor(0)
    wide = widened(node, data)
    compute = dtype_of(wide)
    one = const(1, compute)
    small = node.emit(relax.op.exp(-relax.op.abs(wide)))
    one_plus_small = node.emit(small + one)
    # log(1 + e) * e / ((1 + e) - 1): the rounding of 1 + e cancels out (Kahan); if 1 + e is 1, the result is e.
    excess = node.emit(one_plus_small - one)
    is_absorbed = node.emit(relax.op.equal(excess, const(0, compute)))
    divisor = node.emit(relax.op.where(is_absorbed, one, excess))
    ratio = node.emit(small / divisor)
    logarithm = node.emit(relax.op.log(one_plus_small) * ratio)
    tail = node.emit(relax.op.where(is_absorbed, small, logarithm))
    return cast(node, node.emit(relax.op.maximum(wide, const(0, compute)) + tail), dtype_of(data))
