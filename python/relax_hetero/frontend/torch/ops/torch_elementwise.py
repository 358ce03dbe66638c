"""Elementwise ops, casts and filled tensors. Operands are cast to the type that torch computes in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, topi

from ....encoding.functions import FUNCTIONS
from ....op.functions import apply_function
from ...ops.node import const, is_float
from ..complex_values import Complex, magnitude
from ..exporting import torch_package
from ..torch_node import TABLE, TorchNode, converts, dtype_name

_Emit = Callable[..., relax.Expr]

# Relax ops, computed in the type of the result.
_UNARY: dict[str, Any] = {
    name: getattr(relax.op, name)
    for name in "abs ceil exp floor log sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf "
    "sigmoid trunc negative".split()
}
_UNARY["neg"] = _UNARY["_neg_view"] = _UNARY.pop("negative")
_UNARY |= {
    name: partial(apply_function, name)
    for name, function in FUNCTIONS.items()
    if function.onnx or name in ("relu", "silu", "square")
}

_IDENTITIES = "clone alias detach detach_ contiguous lift_fresh_copy lift_fresh to_dense _to_dense".split()

_COMPARISONS = {
    "eq": relax.op.equal, "ne": relax.op.not_equal, "lt": relax.op.less, "le": relax.op.less_equal,
    "gt": relax.op.greater, "ge": relax.op.greater_equal,
}  # fmt: skip

_LOGICAL = {"logical_and": relax.op.logical_and, "logical_or": relax.op.logical_or, "logical_xor": relax.op.logical_xor}

_BITWISE = {
    "bitwise_and": (relax.op.bitwise_and, relax.op.logical_and),
    "bitwise_or": (relax.op.bitwise_or, relax.op.logical_or),
    "bitwise_xor": (relax.op.bitwise_xor, relax.op.logical_xor),
}


def _register() -> None:
    for name, op in _UNARY.items():
        TABLE[name] = lambda node, x, op=op: node.emit(op(node.tensor(x)))
    for name in _IDENTITIES:
        TABLE[name] = lambda node, x, *_: x
    for name, op in _COMPARISONS.items():
        TABLE[name] = lambda node, a, b, op=op: _compare(node, op, *_promote(node, a, b))
    for name, op in _LOGICAL.items():
        TABLE[name] = lambda node, a, b, op=op: node.emit(op(node.tensor(a, "bool"), node.tensor(b, "bool")))
    for name, ops in _BITWISE.items():
        TABLE[name] = lambda node, a, b, ops=ops: node.emit(ops[node.dtype == "bool"](node.tensor(a), node.tensor(b)))


def _compare(node: TorchNode, op: _Emit, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    """Compare; a comparison of a value with itself tests for NaN, which TVM would simplify away."""
    if a.same_as(b) and is_float(str(a.ty.dtype)):
        is_nan = node.emit(relax.op.isnan(a))
        if op in (relax.op.less, relax.op.greater):
            return node.filled(False)
        return is_nan if op is relax.op.not_equal else node.emit(relax.op.logical_not(is_nan))
    return node.emit(op(a, b))


def _promote(node: TorchNode, a: Any, b: Any) -> tuple[relax.Expr, relax.Expr]:
    """Cast both operands to torch's promoted type."""
    torch = torch_package()
    kinds = ((torch.SymInt, 1), (torch.SymFloat, 1.0), (torch.SymBool, True))
    first, second = (
        next((number for kind, number in kinds if isinstance(value, kind)), value) for value in node.tensors[:2]
    )
    dtype = dtype_name(torch.result_type(first, second))
    return node.tensor(a, dtype), node.tensor(b, dtype)


_register()


@converts("add", "sub", "rsub")
def add(node: TorchNode, a: Any, b: Any, alpha: Any = 1) -> relax.Expr:
    """Sum or difference with a scaled second operand."""
    if node.op.startswith("rsub"):
        a, b, operation = b, a, relax.op.subtract
        scaled_first = True
    else:
        operation = relax.op.add if node.op.startswith("add") else relax.op.subtract
        scaled_first = False
    if node.dtype == "bool":
        if node.op.startswith("add") and alpha == 1:
            return node.emit(relax.op.logical_or(node.tensor(a), node.tensor(b)))
        raise node.refusal("of bools")
    first, second = node.tensor(a), node.tensor(b)
    if alpha != 1:
        factor = node.tensor(alpha)
        if scaled_first:
            raise node.refusal(f"with alpha {alpha}")
        second = node.emit(second * factor)
    return node.emit(operation(first, second))


@converts("mul")
def mul(node: TorchNode, a: Any, b: Any) -> relax.Expr:
    """Product; logical and of booleans."""
    operation = relax.op.logical_and if node.dtype == "bool" else relax.op.multiply
    return node.emit(operation(node.tensor(a), node.tensor(b)))


@converts("div", "true_divide", "floor_divide")
def div(node: TorchNode, a: Any, b: Any, rounding_mode: str | None = None) -> relax.Expr:
    """Quotient, optionally floored or truncated."""
    mode = "floor" if node.op.startswith("floor_divide") else rounding_mode
    first, second = node.tensor(a), node.tensor(b)
    if mode is None:
        return node.emit(first / second)
    if is_float(node.dtype):
        if mode == "floor":  # as in torch: exact even if the quotient would round up to an integer
            remainder = node.onnx("Mod", first, second, fmod=1)
            quotient = node.emit((first - remainder) / second)
            zero = const(0, node.dtype)
            differs = node.emit(
                relax.op.logical_and(
                    relax.op.not_equal(remainder, zero),
                    relax.op.logical_xor(remainder < zero, second < zero),
                )
            )
            return node.emit(relax.op.round(relax.op.where(differs, quotient - const(1, node.dtype), quotient)))
        return node.emit(relax.op.trunc(first / second))
    if mode == "trunc":
        return node.onnx("Div", first, second)
    return node.emit(first // second)


@converts("remainder", "fmod")
def remainder(node: TorchNode, a: Any, b: Any) -> relax.Expr:
    """Remainder with the sign of the divisor (`remainder`) or of the dividend (`fmod`)."""
    return node.onnx("Mod", node.tensor(a), node.tensor(b), fmod=int(node.op.startswith("fmod")))


@converts("pow")
def power(node: TorchNode, a: Any, b: Any) -> relax.Expr:
    """Power, with special cases for roots, cubes and reciprocals."""
    if b == 0.5 and isinstance(b, float) and is_float(node.dtype):
        return node.emit(relax.op.sqrt(node.tensor(a)))
    if b == 3 and not isinstance(a, (int, float)):
        x = node.tensor(a)
        return node.emit(x * x * x)
    if b == -1 and is_float(node.dtype):
        return reciprocal(node, a)
    return node.onnx("Pow", node.tensor(a), node.tensor(b))


@converts("reciprocal")
def reciprocal(node: TorchNode, x: Any) -> relax.Expr:
    """1 / x."""
    return node.emit(const(1, node.dtype) / node.tensor(x))


@converts("maximum", "minimum")
def extreme(node: TorchNode, a: Any, b: Any) -> relax.Expr:
    """Maximum or minimum; NaN if either operand is NaN."""
    if node.dtype == "bool":
        operation = relax.op.logical_or if node.op.startswith("max") else relax.op.logical_and
        return node.emit(operation(node.tensor(a), node.tensor(b)))
    return node.onnx("Max" if node.op.startswith("max") else "Min", node.tensor(a), node.tensor(b))


@converts("clamp", "clamp_min", "clamp_max", "hardtanh")
def clamp(node: TorchNode, x: Any, low: Any = None, high: Any = None) -> relax.Expr:
    """Clamp between two numbers or tensors; the upper bound takes precedence."""
    if node.op.startswith("clamp_max"):
        low, high = None, low
    value = node.tensor(x)
    if low is not None:
        value = node.onnx("Max", value, node.tensor(low))
    return value if high is None else node.onnx("Min", value, node.tensor(high))


@converts("logical_not", "bitwise_not")
def invert(node: TorchNode, x: Any) -> relax.Expr:
    """Logical or bitwise not."""
    if node.dtype == "bool":
        return node.emit(relax.op.logical_not(node.tensor(x, "bool")))
    return node.emit(relax.op.bitwise_not(node.tensor(x)))


@converts("__lshift__", "__rshift__", "bitwise_left_shift", "bitwise_right_shift")
def shift(node: TorchNode, a: Any, b: Any) -> relax.Expr:
    """Bit shifts; right shifts are arithmetic."""
    operation = relax.op.left_shift if "lshift" in node.op or "left" in node.op else relax.op.right_shift
    return node.emit(operation(node.tensor(a), node.tensor(b)))


@converts("isnan", "isinf", "isfinite")
def classify(node: TorchNode, x: relax.Expr) -> relax.Expr:
    """Return whether an element is NaN, infinite, or neither."""
    if not is_float(str(x.ty.dtype)):
        return node.filled(node.op.startswith("isfinite"))
    nan = None if node.op.startswith("isinf") else node.emit(relax.op.isnan(x))
    infinite = None if node.op.startswith("isnan") else node.onnx("IsInf", x)
    if nan is None or infinite is None:
        return infinite if nan is None else nan
    return node.emit(relax.op.logical_not(relax.op.logical_or(nan, infinite)))


@converts("log1p", "expm1")
def near_one(node: TorchNode, x: Any) -> relax.Expr:
    """log(1 + x) and exp(x) - 1, accurate for small x."""
    x, one = node.tensor(x), const(1, node.dtype)
    if node.op.startswith("log1p"):
        shifted = node.emit(x + one)
        log = node.emit(relax.op.log(shifted))
        shifted_difference = node.emit(shifted - one)
        exact = node.emit(log * x / shifted_difference)
        is_small = node.emit(relax.op.abs(x) < const(0.5, node.dtype))
        is_tiny = node.emit(relax.op.equal(shifted_difference, const(0, node.dtype)))
        return node.emit(relax.op.where(is_tiny, x, relax.op.where(is_small, exact, log)))
    half = node.emit(relax.op.tanh(x * const(0.5, node.dtype)))
    small = const(2, node.dtype) * half / (one - half)
    is_small = relax.op.abs(x) < const(0.5, node.dtype)
    return node.emit(relax.op.where(is_small, small, relax.op.exp(x) - one))


@converts("log2", "log10", "exp2")
def other_base(node: TorchNode, x: Any) -> relax.Expr:
    """Logarithms and powers of other bases."""
    x = node.tensor(x)
    if node.op.startswith("exp2"):
        return node.emit(relax.op.exp(x * const(math.log(2), node.dtype)))
    base = 2 if node.op.startswith("log2") else 10
    return node.emit(relax.op.log(x) * const(1 / math.log(base), node.dtype))


@converts("sign", "sgn")
def sign(node: TorchNode, x: Any) -> relax.Expr:
    """The sign as -1, 0 or 1; booleans are unchanged."""
    x = node.tensor(x)
    return x if node.dtype == "bool" else node.emit(relax.op.sign(x))


@converts("round")
def round_(node: TorchNode, x: Any, decimals: int = 0) -> relax.Expr:
    """Round to a number of decimals, halves to the even neighbour."""
    x = node.tensor(x)
    if not decimals:
        return node.emit(relax.op.round(x))
    if not is_float(node.dtype):
        raise node.refusal("of integers to decimals")
    factor = const(10.0 ** abs(decimals), node.dtype)
    scale, unscale = (relax.op.multiply, relax.op.divide)[:: 1 if decimals > 0 else -1]
    return node.emit(unscale(relax.op.round(scale(x, factor)), factor))


def _has_sign_bit(node: TorchNode, x: relax.Expr) -> relax.Expr:
    """Return whether the sign bit is set, also for -0.0."""
    dtype = str(x.ty.dtype)
    if not is_float(dtype):
        return node.emit(node.cast(x, "int64") < const(0, "int64"))
    zero = const(0, dtype)
    is_below = const(1, dtype) / x < zero
    return node.emit(relax.op.logical_or(x < zero, relax.op.logical_and(relax.op.equal(x, zero), is_below)))


@converts("signbit", "copysign", "angle")
def signs(node: TorchNode, x: Any, other: Any = None) -> relax.Expr:
    """Sign bit; magnitude with another number's sign; or angle of a real number, 0 or pi."""
    if node.op.startswith("signbit"):
        return _has_sign_bit(node, x)
    if node.op.startswith("angle"):
        x = node.tensor(x)
        half = relax.op.where(x < const(0, node.dtype), const(math.pi, node.dtype), const(0, node.dtype))
        return node.emit(relax.op.where(relax.op.isnan(x), x, half))
    absolute = node.emit(relax.op.abs(node.tensor(x)))
    return node.emit(relax.op.where(_has_sign_bit(node, node.tensor(other)), -absolute, absolute))


@converts("fmax", "fmin")
def extreme_number(node: TorchNode, a: Any, b: Any) -> relax.Expr:
    """Maximum or minimum; if one operand is NaN, the other."""
    a, b = node.tensor(a), node.tensor(b)
    larger = extreme(replace(node, op=node.op[1:]), a, b)
    if not is_float(node.dtype):
        return larger
    return node.emit(relax.op.where(relax.op.isnan(a), b, relax.op.where(relax.op.isnan(b), a, larger)))


@converts("hypot")
def hypot(node: TorchNode, a: Any, b: Any) -> relax.Expr:
    """The root of the sum of both squares."""
    return magnitude(node, Complex(node.tensor(a), node.tensor(b)))


# Polynomial of 1 / (1 + x / 2) for erfc(x), with relative errors up to 1.2e-7 (Press et al., Numerical Recipes).
_ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223,
    0.17087277,
)  # fmt: skip


@converts("erfc", "special_erfcx")
def erfc(node: TorchNode, x: Any) -> relax.Expr:
    """1 - erf(x), accurate for large x; `special_erfcx` is scaled by exp(x * x)."""
    is_scaled, dtype = node.op.startswith("special"), node.dtype
    x = node.tensor(x)
    if dtype == "float64" and not is_scaled:
        return node.emit(const(1, dtype) - relax.op.erf(x))
    if dtype == "float64":
        raise node.refusal("of float64")
    absolute, one, two = node.emit(relax.op.abs(x)), const(1, dtype), const(2, dtype)
    t = node.emit(one / (one + absolute * const(0.5, dtype)))
    exponent = const(_ERFC[-1], dtype)
    for factor in _ERFC[-2::-1]:
        exponent = node.emit(exponent * t + const(factor, dtype))
    square = node.emit(x * x)
    exponent = exponent if is_scaled else node.emit(exponent - square)
    tail = node.emit(t * relax.op.exp(exponent))
    upper = node.emit(two * relax.op.exp(square)) if is_scaled else two
    return node.emit(relax.op.where(x < const(0, dtype), upper - tail, tail))


@converts("erfinv")
def erfinv(node: TorchNode, x: Any) -> relax.Expr:
    """Inverse error function: Winitzki's estimate and three Newton steps."""
    x, dtype = node.tensor(x), node.dtype
    one, half, a = const(1, dtype), const(0.5, dtype), 0.147
    log_term = relax.op.log((one - x) * (one + x))
    log_term = node.emit(log_term)
    center = node.emit(const(2 / (math.pi * a), dtype) + log_term * half)
    root = relax.op.sqrt(center * center - log_term * const(1 / a, dtype))
    absolute = relax.op.sqrt(relax.op.maximum(root - center, const(0, dtype)))
    estimate = node.emit(relax.op.sign(x) * absolute)
    for _ in range(3):
        slope = const(2 / math.sqrt(math.pi), dtype) * relax.op.exp(-(estimate * estimate))
        correction = node.emit((relax.op.erf(estimate) - x) / slope)
        estimate = node.emit(estimate - correction)
    end = node.emit(relax.op.equal(relax.op.abs(x), one))
    return node.emit(relax.op.where(end, x * const(math.inf, dtype), estimate))


@converts("atan2")
def atan2(node: TorchNode, y: Any, x: Any) -> relax.Expr:
    """The angle of a point."""
    return node.builder.emit_te(topi.atan2, node.tensor(y), node.tensor(x), primfunc_name_hint="atan2")


@converts("where")
def where(node: TorchNode, condition: relax.Expr, a: Any = None, b: Any = None) -> relax.Expr:
    """Select elementwise."""
    if a is None:
        raise node.refusal("without values")
    return node.onnx("Where", node.tensor(condition, "bool"), node.tensor(a), node.tensor(b))


@converts("masked_fill")
def masked_fill(node: TorchNode, x: relax.Expr, mask: relax.Expr, value: Any) -> relax.Expr:
    """Replace elements by a number where the mask is set."""
    return node.onnx("Where", mask, node.tensor(value), node.tensor(x))


@converts("gelu")
def gelu(node: TorchNode, x: relax.Expr, approximate: str = "none") -> relax.Expr:
    """GELU, exact or with tanh."""
    return node.emit((relax.op.nn.gelu if approximate == "none" else relax.op.nn.gelu_tanh)(x))


@converts("leaky_relu", "elu", "hardswish", "hardsigmoid", "prelu", "softplus")
def activation(node: TorchNode, x: relax.Expr, *parameters: Any) -> relax.Expr:
    """Activations by ONNX's converters."""
    name = node.op.partition(".")[0]
    if name == "hardsigmoid":
        return node.onnx("HardSigmoid", x, alpha=1 / 6, beta=0.5)
    if name == "hardswish":
        inner = node.onnx("HardSigmoid", x, alpha=1 / 6, beta=0.5)
        return node.emit(x * inner)
    if name == "leaky_relu":
        return node.onnx("LeakyRelu", x, alpha=float(parameters[0]) if parameters else 0.01)
    if name == "prelu":
        (slope,) = parameters
        if node.dims(slope) != [1]:
            slope = node.reshape(slope, [-1, *[1] * (len(node.shape) - 2)])
        return node.onnx("PRelu", x, slope)
    if name == "softplus":
        beta, threshold = parameters
        scaled = node.emit(x * const(beta, node.dtype))
        soft = node.emit(node.onnx("Softplus", scaled) / const(beta, node.dtype))
        return node.emit(relax.op.where(scaled > const(threshold, node.dtype), x, soft))
    alpha, scale, input_scale = parameters
    negative = node.onnx("Elu", node.emit(x * const(input_scale, node.dtype)), alpha=float(alpha))
    value = node.emit(relax.op.where(x > const(0, node.dtype), x, negative))
    return value if scale == 1 else node.emit(value * const(scale, node.dtype))


@converts("rrelu_with_noise_functional")
def rrelu(node: TorchNode, x: relax.Expr, noise: relax.Expr, low: float, high: float, *_: Any) -> list[Any]:
    """Leaky ReLU with the mean slope; training mode is refused before."""
    return [node.onnx("LeakyRelu", x, alpha=(low + high) / 2), noise]


@converts("dropout", "native_dropout")
def dropout(node: TorchNode, x: relax.Expr, *_: Any) -> Any:
    """Identity; training mode is refused before."""
    return [x, node.filled(True, node.dims(x), "bool")] if node.op.startswith("native") else x


@converts("to", "_to_copy", "type_as", "_to_dtype", "convert_element_type")
def to(node: TorchNode, x: Any, *_: Any) -> relax.Expr:
    """Cast to another type."""
    return node.tensor(x)


@converts(
    "full",
    "new_full",
    "full_like",
    "zeros",
    "ones",
    "zeros_like",
    "ones_like",
    "new_zeros",
    "new_ones",
    "scalar_tensor",
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
    "fill",
)
def full(node: TorchNode, *arguments: Any) -> relax.Expr:
    """A tensor filled with one number; uninitialized tensors are 0."""
    name = node.op.partition(".")[0]
    value_index = {"full": 1, "new_full": 2, "full_like": 1, "fill": 1, "scalar_tensor": 0}
    value = arguments[value_index[name]] if name in value_index else int("ones" in name)
    return node.filled(value)


@converts("arange")
def arange(node: TorchNode, *arguments: Any) -> relax.Expr:
    """Arithmetic progression."""
    overload = node.op.partition(".")[2]
    start, end, step = {"default": (0, arguments[0], 1), "start": (*arguments[:2], 1)}.get(overload) or arguments[:3]
    (count,) = node.shape
    if all(isinstance(value, (int, float)) for value in (start, end, step)) and isinstance(count, int):
        return const(start + step * np.arange(count), node.dtype)
    dtype = node.dtype if node.dtype in ("int32", "int64") else "int64"
    values = node.emit(relax.op.arange(relax.prim_value(0), relax.prim_value(count), relax.prim_value(1), dtype))
    values = node.cast(values, node.dtype)
    if not (isinstance(step, int) and step == 1):
        values = node.emit(values * node.tensor(step))
    return values if isinstance(start, int) and start == 0 else node.emit(values + node.tensor(start))
