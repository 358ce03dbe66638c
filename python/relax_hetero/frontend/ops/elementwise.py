"""Elementwise ops whose stock conversion is wrong, narrow in types, or missing."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, topi

from .node import Node, const, dtype_of, is_float, onnx_dtype
from .table import converts

_WIDTH = {"bool": 8, "bfloat16": 16}


def bits_of(dtype: str) -> int:
    """Bits of one element as stored."""
    return _WIDTH.get(dtype) or int(tvm.DataType(dtype).bits)


def cast(node: Node, value: relax.Expr, dtype: str) -> relax.Expr:
    """`value` as `dtype`, without a copy where it has that type."""
    return value if dtype_of(value) == dtype else node.emit(relax.op.astype(value, dtype))


@converts("IsInf")
def is_inf(node: Node) -> relax.Expr:
    """Infinities of the signs asked for."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    signs = [
        sign for sign, name in ((np.inf, "detect_positive"), (-np.inf, "detect_negative")) if node.attribute(name, 1)
    ]
    if not signs:
        return node.emit(relax.op.not_equal(zero := node.emit(relax.op.zeros_like(data)), zero))
    found = [node.emit(relax.op.equal(data, const(sign, dtype))) for sign in signs]
    return found[0] if len(found) == 1 else node.emit(relax.op.logical_or(*found))


@converts("Mod")
def mod(node: Node) -> relax.Expr:
    """Remainder with the divisor's sign (numpy's mod), or with the dividend's (C's fmod) where `fmod` is set."""
    a, b = node.tensor(0), node.tensor(1)
    dtype = dtype_of(a)
    if not is_float(dtype):
        return node.emit((relax.op.mod if node.attribute("fmod", 0) else relax.op.floor_mod)(a, b))
    remainder = node.emit(relax.op.mod(a, b))
    if node.attribute("fmod", 0):
        return remainder
    zero = const(0, dtype)
    is_below, is_above = node.emit(relax.op.less(remainder, zero)), node.emit(relax.op.greater(remainder, zero))
    differs = node.emit(
        relax.op.logical_or(
            node.emit(relax.op.logical_and(is_below, node.emit(relax.op.greater(b, zero)))),
            node.emit(relax.op.logical_and(is_above, node.emit(relax.op.less(b, zero)))),
        )
    )
    return node.emit(relax.op.where(differs, node.emit(relax.op.add(remainder, b)), remainder))


@converts("BitShift")
def bit_shift(node: Node) -> relax.Expr:
    """Shift; by the width or more (or by a negative number, as an unsigned one) everything is shifted out."""
    data, amount = node.tensor(0), node.tensor(1)
    dtype = dtype_of(data)
    left = node.attribute("direction") == "LEFT"
    width = bits_of(dtype)
    is_far = node.emit(relax.op.greater_equal(amount, const(width, dtype)))
    if not dtype.startswith("uint"):
        is_far = node.emit(relax.op.logical_or(is_far, node.emit(relax.op.less(amount, const(0, dtype)))))
    near = node.emit(relax.op.where(is_far, const(0, dtype), amount))
    shifted = node.emit((relax.op.left_shift if left else relax.op.right_shift)(data, near))
    gone = const(0, dtype)
    if not left and not dtype.startswith("uint"):
        gone = node.emit(relax.op.right_shift(data, const(width - 1, dtype)))  # only the sign is left
    return node.emit(relax.op.where(is_far, gone, shifted))


@converts("BitCast")
def bit_cast(node: Node) -> relax.Expr:
    """The same bits as another type of the same width."""
    data, target = node.tensor(0), onnx_dtype(node.attribute("to"))
    source = dtype_of(data)
    if bits_of(source) != bits_of(target):
        raise node.refusal(f"{source} and {target} differ in width")
    if "bool" in (source, target):
        raise node.refusal("the bits of a bool cannot be read or written")
    if source == target:
        return data
    return node.builder.emit_te(lambda x: topi.reinterpret(x, target), data, primfunc_name_hint="bit_cast")


@converts("Mish")
def mish(node: Node) -> relax.Expr:
    """x * tanh(log(1 + exp(x))), which with e = exp(x) is x * (e^2 + 2e) / (e^2 + 2e + 2), without cancellation."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    wide = cast(node, data, "float32") if dtype in ("float16", "bfloat16") else data
    compute = dtype_of(wide)
    # Beyond 20 the factor is 1 to the last bit, and exp would overflow.
    exponential = node.emit(relax.op.exp(node.emit(relax.op.minimum(wide, const(20, compute)))))
    two = const(2, compute)
    grown = node.emit(relax.op.multiply(exponential, node.emit(relax.op.add(exponential, two))))
    factor = node.emit(relax.op.divide(grown, node.emit(relax.op.add(grown, two))))
    return cast(node, node.emit(relax.op.multiply(wide, factor)), dtype)


@converts("Softplus")
def softplus(node: Node) -> relax.Expr:
    """log(1 + exp(x)) as max(x, 0) + log(1 + e) with e = exp(-|x|), whose small values the sum with 1 must not lose."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    wide = cast(node, data, "float32") if dtype in ("float16", "bfloat16") else data
    compute = dtype_of(wide)
    one = const(1, compute)
    small = node.emit(relax.op.exp(node.emit(relax.op.negative(node.emit(relax.op.abs(wide))))))
    grown = node.emit(relax.op.add(small, one))
    # log(1 + e) * e / ((1 + e) - 1): the rounding of 1 + e cancels out (Kahan); where nothing is left it is e itself.
    excess = node.emit(relax.op.subtract(grown, one))
    is_lost = node.emit(relax.op.equal(excess, const(0, compute)))
    divisor = node.emit(relax.op.where(is_lost, one, excess))
    ratio = node.emit(relax.op.divide(small, divisor))
    logarithm = node.emit(relax.op.multiply(node.emit(relax.op.log(grown)), ratio))
    rest = node.emit(relax.op.where(is_lost, small, logarithm))
    return cast(node, node.emit(relax.op.add(node.emit(relax.op.maximum(wide, const(0, compute))), rest)), dtype)


@converts("Pow")
def power(node: Node) -> relax.Expr:
    """x ** y in x's type, whatever y's; integers through float64, as onnxruntime computes them."""
    base, exponent = node.tensor(0), node.tensor(1)
    dtype, exponent_type = dtype_of(base), dtype_of(exponent)
    known = node.constant(1)
    if known is not None and known.ndim == 0 and float(known) == 2.0:
        return node.emit(relax.op.multiply(base, base))
    if dtype in ("float32", "float64") and dtype == exponent_type:
        return node.emit(relax.op.power(base, exponent))
    compute = "float32" if dtype in ("float16", "float32", "bfloat16") and is_float(exponent_type) else "float64"
    result = node.emit(relax.op.power(cast(node, base, compute), cast(node, exponent, compute)))
    if not is_float(dtype) and not is_float(exponent_type):
        result = node.emit(relax.op.round(result))  # whole up to an error of pow, or a fraction below one half
    return cast(node, result, dtype)


@converts("PRelu")
def prelu(node: Node) -> relax.Expr:
    """x where x >= 0, else slope * x; the slope broadcasts to x (before opset 7: a vector runs along the channels)."""
    data, slope = node.tensor(0), node.tensor(1)
    rank = node.rank(data)
    if node.opset < 7 and node.rank(slope) == 1 and rank > 2 and node.shape(slope) != [1]:
        slope = node.emit(relax.op.reshape(slope, [1, -1] + [1] * (rank - 2)))
    is_negative = node.emit(relax.op.less(data, const(0, dtype_of(data))))
    return node.emit(relax.op.where(is_negative, node.emit(relax.op.multiply(data, slope)), data))


@converts("LeakyRelu")
def leaky_relu(node: Node) -> relax.Expr:
    """x where x >= 0, else alpha * x."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    scaled = node.emit(relax.op.multiply(data, const(node.attribute("alpha", 0.01), dtype)))
    return node.emit(relax.op.where(node.emit(relax.op.less(data, const(0, dtype))), scaled, data))


def _exponential_unit(node: Node, data: relax.Expr, alpha: float, inverse: float = 1.0) -> relax.Expr:
    """x where x > 0, else alpha * (exp(x / inverse) - 1), in x's type."""
    dtype = dtype_of(data)
    # exp of the negative part only, so that a large x does not overflow on the branch that is not taken
    below = node.emit(relax.op.minimum(data, const(0, dtype)))
    if inverse != 1.0:
        below = node.emit(relax.op.divide(below, const(inverse, dtype)))
    grown = node.emit(relax.op.subtract(node.emit(relax.op.exp(below)), const(1, dtype)))
    scaled = node.emit(relax.op.multiply(const(alpha, dtype), grown))
    return node.emit(relax.op.where(node.emit(relax.op.greater(data, const(0, dtype))), data, scaled))


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
    return node.emit(relax.op.multiply(const(gamma, dtype_of(data)), unit))


@converts("ThresholdedRelu")
def thresholded_relu(node: Node) -> relax.Expr:
    """x where x > alpha, else 0."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    above = node.emit(relax.op.greater(data, const(node.attribute("alpha", 1.0), dtype)))
    return node.emit(relax.op.where(above, data, const(0, dtype)))


@converts("Clip")
def clip(node: Node) -> relax.Expr:
    """min(max(x, low), high), any type; a bound that is absent, or NaN, does not bound."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    low, high = node.attributes.get("min"), node.attributes.get("max")
    bounds = [const(bound, dtype) if bound is not None else None for bound in (low, high)]
    if node.opset >= 11:
        bounds = [node.tensor(i) if node.has(i) else None for i in (1, 2)]
    for bound, operation, none in zip(bounds, (relax.op.maximum, relax.op.minimum), (-np.inf, np.inf), strict=True):
        if bound is None:
            continue
        if is_float(dtype) and (not isinstance(bound, tvm.ir.GenericConst) or np.isnan(bound.value.numpy()).any()):
            is_nan = node.emit(relax.op.isnan(bound))
            bound = node.emit(relax.op.where(is_nan, const(none, dtype), bound))
        if node.rank(bound) > 0:
            bound = node.emit(relax.op.reshape(bound, ()))
        data = node.emit(operation(data, bound))
    return data


@converts("Max", "Min", "Sum", "Mean")
def variadic(node: Node) -> relax.Expr:
    """The inputs combined pairwise, each broadcast to the other."""
    operation = {"Max": relax.op.maximum, "Min": relax.op.minimum}.get(node.op_type, relax.op.add)
    result = node.tensor(0)
    for index in range(1, len(node.inputs)):
        result = node.emit(operation(result, node.tensor(index)))
    if node.op_type != "Mean":
        return result
    return node.emit(relax.op.divide(result, const(len(node.inputs), dtype_of(result))))


@converts("Div")
def divide(node: Node) -> relax.Expr:
    """Quotient; of integers it is rounded towards zero."""
    known = node.constant(1)
    if known is not None and known.dtype.kind in "iu" and np.any(known == 0):
        raise node.refusal("divides integers by a constant 0")
    return node.emit(relax.op.divide(node.tensor(0), node.tensor(1)))


@converts("HardSigmoid")
def hard_sigmoid(node: Node) -> relax.Expr:
    """max(0, min(1, alpha * x + beta))."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    scaled = node.emit(relax.op.multiply(const(node.attribute("alpha", 0.2), dtype), data))
    moved = node.emit(relax.op.add(scaled, const(node.attribute("beta", 0.5), dtype)))
    return node.emit(relax.op.clip(moved, 0, 1))


_RARE = {
    "Acos": relax.op.acos, "Acosh": relax.op.acosh, "Asin": relax.op.asin, "Asinh": relax.op.asinh,
    "Atan": relax.op.atan, "Atanh": relax.op.atanh, "Cosh": relax.op.cosh, "Sinh": relax.op.sinh,
    "Tan": relax.op.tan, "Erf": relax.op.erf,
}  # fmt: skip


@converts(*_RARE)
def rare_unary(node: Node) -> relax.Expr:
    """Half precision is computed in float32, as not every target has these functions for it."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    wide = cast(node, data, "float32") if dtype in ("float16", "bfloat16") else data
    return cast(node, node.emit(_RARE[node.op_type](wide)), dtype)


@converts("Where")
def where(node: Node) -> relax.Expr:
    """One of two operands per element; all three broadcast."""
    return node.emit(relax.op.where(node.tensor(0), node.tensor(1), node.tensor(2)))


@converts("Dropout")
def dropout(node: Node) -> relax.Expr:
    """The input itself, with a mask of ones. In training with a seed, the mask that ONNX's reference draws from it."""
    data = node.tensor(0)
    training = node.tensor(2) if node.opset >= 12 and node.has(2) else None
    known = node.constant(2) if training is not None else np.array(False)
    shape = node.shape(data)
    ones = node.filled(shape, True, "bool")
    if training is None or (known is not None and not known.any()):
        if node.opset < 10:
            ones = cast(node, ones, dtype_of(data))
        return relax.Tuple([data, ones]) if node.num_outputs > 1 else data
    if "seed" not in node.attributes:
        raise node.refusal("drops elements at random in training mode, and has no seed to do it by")
    ratio = node.tensor(1) if node.has(1) else const(0.5, dtype_of(data))
    drawn = np.random.RandomState(node.attribute("seed")).uniform(0, 1.0, node.static_shape(data))
    drops = node.emit(relax.op.less(const(drawn, "float64"), cast(node, ratio, "float64")))
    mask = node.emit(relax.op.logical_not(node.emit(relax.op.logical_and(drops, training))))
    kept = node.emit(relax.op.subtract(const(1, dtype_of(ratio)), ratio))
    scale = node.emit(relax.op.where(training, kept, const(1, dtype_of(ratio))))
    scaled = node.emit(relax.op.divide(data, cast(node, scale, dtype_of(data))))
    result = node.emit(relax.op.where(mask, scaled, const(0, dtype_of(data))))
    return relax.Tuple([result, mask]) if node.num_outputs > 1 else result
