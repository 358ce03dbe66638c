"""Elementwise ops whose stock conversion is wrong, limited to some types, or missing."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, topi

from .node import Node, const, dtype_of, is_float, onnx_dtype
from .storage_types import STORAGE_TYPES, bytes_of, wrapped
from .table import converts

HALF = ("float16", "bfloat16")
_STORED_BITS = {"bool": 8, "bfloat16": 16}


def bits_of(dtype: str) -> int:
    """Number of bits of a stored element."""
    return _STORED_BITS.get(dtype) or int(tvm.DataType(dtype).bits)


def cast(node: Node, value: relax.Expr, dtype: str) -> relax.Expr:
    """Cast `value` unless it has the type."""
    return value if dtype_of(value) == dtype else node.emit(relax.op.astype(value, dtype))


def widened(node: Node, value: relax.Expr) -> relax.Expr:
    """Cast half precision to float32; other types are unchanged."""
    return cast(node, value, "float32") if dtype_of(value) in HALF else value


@converts("IsInf")
def is_inf(node: Node) -> relax.Expr:
    """Test for infinities of the requested signs."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    names = {"detect_positive": np.inf, "detect_negative": -np.inf}
    signs = [sign for name, sign in names.items() if node.attribute(name, 1)]
    if not signs:
        return node.emit(relax.op.not_equal(zero := node.emit(relax.op.zeros_like(data)), zero))
    matches = [node.emit(relax.op.equal(data, const(sign, dtype))) for sign in signs]
    return matches[0] if len(matches) == 1 else node.emit(relax.op.logical_or(*matches))


@converts("Mod")
def mod(node: Node) -> relax.Expr:
    """Remainder with the divisor's sign (numpy's mod), or with the dividend's (C's fmod) if `fmod` is set."""
    a, b = node.tensor(0), node.tensor(1)
    dtype = dtype_of(a)
    if not is_float(dtype):
        return node.emit((relax.op.mod if node.attribute("fmod", 0) else relax.op.floor_mod)(a, b))
    remainder = node.emit(relax.op.mod(a, b))
    if node.attribute("fmod", 0):
        return remainder
    zero = const(0, dtype)
    is_below = relax.op.logical_and(remainder < zero, b > zero)
    is_above = relax.op.logical_and(remainder > zero, b < zero)
    differs = node.emit(relax.op.logical_or(is_below, is_above))
    return node.emit(relax.op.where(differs, remainder + b, remainder))


@converts("BitShift")
def bit_shift(node: Node) -> relax.Expr:
    """Bit shift; an amount of at least the width, or a negative one, shifts all bits out."""
    data, amount = node.tensor(0), node.tensor(1)
    dtype = dtype_of(data)
    left = node.attribute("direction") == "LEFT"
    width = bits_of(dtype)
    is_far = node.emit(amount >= const(width, dtype))
    if not dtype.startswith("uint"):
        is_far = node.emit(relax.op.logical_or(is_far, amount < const(0, dtype)))
    clamped_amount = node.emit(relax.op.where(is_far, const(0, dtype), amount))
    shifted = node.emit((relax.op.left_shift if left else relax.op.right_shift)(data, clamped_amount))
    overflow = const(0, dtype)
    if not left and not dtype.startswith("uint"):
        overflow = node.emit(relax.op.right_shift(data, const(width - 1, dtype)))  # only the sign is left
    return node.emit(relax.op.where(is_far, overflow, shifted))


@converts("BitCast")
def bit_cast(node: Node) -> relax.Expr:
    """Reinterpret bits as another type of the same width."""
    data, target = node.tensor(0), onnx_dtype(node.attribute("to"))
    source = dtype_of(data)
    if bits_of(source) != bits_of(target):
        raise node.refusal(f"{source} and {target} differ in width")
    if source == target:
        return data
    if target == "bool":
        raise node.refusal("bits cannot be written as a bool, which has two values in a byte")
    data = cast(node, data, "uint8") if source == "bool" else bytes_of(node, data)
    if target in STORAGE_TYPES:
        return wrapped(node, data, target)
    if dtype_of(data) == target:
        return data
    return node.builder.emit_te(lambda x: topi.reinterpret(x, target), data, primfunc_name_hint="bit_cast")


@converts("Pow")
def power(node: Node) -> relax.Expr:
    """x ** y in x's type; integers are computed in float64, as in onnxruntime."""
    base, exponent = node.tensor(0), node.tensor(1)
    dtype, exponent_type = dtype_of(base), dtype_of(exponent)
    constant = node.constant(1)
    if constant is not None and constant.ndim == 0 and float(constant) == 2.0:
        return node.emit(base * base)
    if dtype in ("float32", "float64") and dtype == exponent_type:
        return node.emit(base**exponent)
    compute = "float32" if dtype in ("float16", "float32", "bfloat16") and is_float(exponent_type) else "float64"
    result = node.emit(cast(node, base, compute) ** cast(node, exponent, compute))
    if not is_float(dtype) and not is_float(exponent_type):
        result = node.emit(relax.op.round(result))  # corrects rounding errors of pow
    return cast(node, result, dtype)


@converts("Clip")
def clip(node: Node) -> relax.Expr:
    """min(max(x, low), high); an absent or NaN bound has no effect."""
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
            bound = node.emit(relax.op.where(relax.op.isnan(bound), const(none, dtype), bound))
        if node.rank(bound) > 0:
            bound = node.emit(relax.op.reshape(bound, ()))
        data = node.emit(operation(data, bound))
    return data


@converts("Max", "Min", "Sum", "Mean")
def variadic(node: Node) -> relax.Expr:
    """Combine the inputs pairwise with broadcasting."""
    operation = {"Max": relax.op.maximum, "Min": relax.op.minimum}.get(node.op_type, relax.op.add)
    result = node.tensor(0)
    for index in range(1, len(node.inputs)):
        result = node.emit(operation(result, node.tensor(index)))
    return result if node.op_type != "Mean" else node.emit(result / const(len(node.inputs), dtype_of(result)))


@converts("Div")
def divide(node: Node) -> relax.Expr:
    """Quotient, truncated for integers."""
    constant = node.constant(1)
    if constant is not None and constant.dtype.kind in "iu" and np.any(constant == 0):
        raise node.refusal("divides integers by a constant 0")
    return node.emit(node.tensor(0) / node.tensor(1))


_FLOAT32_FUNCTIONS = {
    "Acos": relax.op.acos, "Acosh": relax.op.acosh, "Asin": relax.op.asin, "Asinh": relax.op.asinh,
    "Atan": relax.op.atan, "Atanh": relax.op.atanh, "Cosh": relax.op.cosh, "Sinh": relax.op.sinh,
    "Tan": relax.op.tan, "Erf": relax.op.erf,
}  # fmt: skip


@converts(*_FLOAT32_FUNCTIONS)
def rare_unary(node: Node) -> relax.Expr:
    """Functions that not every target has for half precision, which is computed in float32."""
    data = node.tensor(0)
    return cast(node, node.emit(_FLOAT32_FUNCTIONS[node.op_type](widened(node, data))), dtype_of(data))


@converts("Where")
def where(node: Node) -> relax.Expr:
    """Select elementwise; all three operands broadcast."""
    return node.emit(relax.op.where(node.tensor(0), node.tensor(1), node.tensor(2)))


@converts("Dropout")
def dropout(node: Node) -> relax.Expr:
    """Identity with a mask of ones; in training with a seed, dropout with the mask of ONNX's reference."""
    data = node.tensor(0)
    if not node.attribute("is_test", 1):
        raise node.refusal("is_test=0 asks for training, expected 1")
    training = node.tensor(2) if node.opset >= 12 and node.has(2) else None
    training_value = node.constant(2) if training is not None else np.array(False)
    ones = node.filled(node.shape(data), True, "bool")
    if training is None or (training_value is not None and not training_value.any()):
        if node.opset < 10:
            ones = cast(node, ones, dtype_of(data))
        return node.outputs([data, ones])
    if "seed" not in node.attributes:
        raise node.refusal("drops elements at random in training mode, and has no seed to do it by")
    ratio = node.tensor(1) if node.has(1) else const(0.5, dtype_of(data))
    node.check_constant_size(*node.static_shape(data))
    random = np.random.RandomState(node.attribute("seed")).uniform(0, 1.0, node.static_shape(data))
    drops = node.emit(const(random, "float64") < cast(node, ratio, "float64"))
    mask = node.emit(relax.op.logical_not(relax.op.logical_and(drops, training)))
    keep_fraction = node.emit(const(1, dtype_of(ratio)) - ratio)
    scale = node.emit(relax.op.where(training, keep_fraction, const(1, dtype_of(ratio))))
    scaled = node.emit(data / cast(node, scale, dtype_of(data)))
    result = node.emit(relax.op.where(mask, scaled, const(0, dtype_of(data))))
    return node.outputs([result, mask])
