"""Calls of operators in expressions: a table from the operator's name to what compiles it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .dtypes import cast, scalar_type

Handler = Callable[[Any, Any], Callable[[Any, Any], Any]]
"""Function from the compiler of expressions and a call to the call's evaluator."""

HANDLERS: dict[str, Handler] = {}
EXTERNS: dict[str, Handler] = {}
"""Compilers of functions that are called by name."""


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a compiler of calls of operators."""

    def register(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return register


def name_of(call: Any) -> str:
    """An operator's name; the namespace "prim" counts as TIR's own."""
    name = str(getattr(call.op, "name", call.op))
    return f"tirx.{name[5:]}" if name.startswith("prim.") else name


def compiled(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
    """The evaluator of a call.

    Raises
    ------
    NotImplementedError
        Nothing is known about the operator.
    """
    name = name_of(call)
    handler = HANDLERS.get(name)
    if handler is None:
        raise NotImplementedError(f"the interpreter does not know {name}: {str(call)[:300]}")
    return handler(expressions, call)


def result_type(call: Any) -> np.dtype:
    """The element type of a call's value."""
    from .expressions import dtype_of

    return scalar_type(dtype_of(call))


def pure(function: Callable[..., Any], *names: str) -> None:
    """Register a function of values, computed in float32 at least and rounded to the call's type."""

    def handler(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
        arguments = [expressions.compiled(a) for a in call.args]
        dtype = result_type(call)
        narrow = dtype.itemsize < 4 and dtype.kind not in "iub"

        def value(lanes: Any, mask: Any) -> Any:
            values = [a(lanes, mask) for a in arguments]
            if narrow:
                values = [np.asarray(v).astype(np.float32) for v in values]
            return np.asarray(function(*values)).astype(dtype)[()]

        return value

    for name in names:
        HANDLERS[f"tirx.{name}"] = handler


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.float64])(np.asarray(x, np.float64))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _round(x: Any) -> Any:
    return np.trunc(x + np.copysign(0.5, x)) if np.asarray(x).dtype.kind == "f" else x


for _name, _function in {
    "exp": np.exp, "exp2": np.exp2, "exp10": lambda x: np.power(np.asarray(10, np.asarray(x).dtype), x), "erf": _erf,
    "tanh": np.tanh, "sigmoid": _sigmoid, "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "tan": np.tan, "cos": np.cos, "cosh": np.cosh, "sin": np.sin, "sinh": np.sinh, "acos": np.arccos,
    "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan, "atanh": np.arctanh,
    "atan2": np.arctan2, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "floor": np.floor, "ceil": np.ceil,
    "trunc": np.trunc, "fabs": np.abs, "abs": np.abs, "round": _round, "nearbyint": np.rint, "pow": np.power,
    "nextafter": np.nextafter, "hypot": np.hypot, "copysign": np.copysign, "ldexp": np.ldexp, "fmod": np.fmod,
    "fma": lambda a, b, c: (np.asarray(a, np.float64) * b + c), "isnan": np.isnan, "isinf": np.isinf,
    "isfinite": np.isfinite,
}.items():  # fmt: skip
    pure(_function, _name)


def exact(function: Callable[..., Any], *names: str) -> None:
    """Register a function of values of any type."""

    def handler(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
        arguments = [expressions.compiled(a) for a in call.args]
        return lambda lanes, mask: function(*(a(lanes, mask) for a in arguments))

    for name in names:
        HANDLERS[f"tirx.{name}"] = handler


def _shift_left(value: Any, by: Any) -> Any:
    return np.left_shift(value, np.asarray(by).astype(np.asarray(value).dtype))


def _shift_right(value: Any, by: Any) -> Any:
    return np.right_shift(value, np.asarray(by).astype(np.asarray(value).dtype))


exact(np.bitwise_and, "bitwise_and")
exact(np.bitwise_or, "bitwise_or")
exact(np.bitwise_xor, "bitwise_xor")
exact(np.invert, "bitwise_not")
exact(_shift_left, "shift_left")
exact(_shift_right, "shift_right")
exact(lambda value: value, "likely", "ignore_loop_partition", "assume")


exact(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).view(np.uint16)[()], "relax_hetero.bfloat16_bits")


def _popcount(value: Any) -> Any:
    array = np.asarray(value)
    return np.bitwise_count(array.view(f"u{array.dtype.itemsize}")).astype(array.dtype)[()]


exact(_popcount, "popcount")


@handles("tirx.if_then_else")
def _if_then_else(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
    return expressions.chosen(*call.args)


@handles("tirx.reinterpret")
def _reinterpret(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
    argument, dtype = expressions.compiled(call.args[0]), result_type(call)
    vector = "x" in str(getattr(call.ty, "dtype", ""))[-3:]

    def value(lanes: Any, mask: Any) -> Any:
        bits = np.asarray(argument(lanes, mask))
        if bits.dtype.itemsize == dtype.itemsize and bits.ndim < 2:
            return bits.view(dtype)[()]
        rows = np.ascontiguousarray(bits if bits.ndim == 2 else np.atleast_1d(bits)[:, None]).view(dtype)
        return rows if vector else rows[:, 0]

    return value


@handles("tirx.address_of")
def _address_of(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
    return expressions.address(call.args[0])


@handles("tirx.buffer_data")
def _buffer_data(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
    return expressions.address(call.args[0])


@handles("tirx.handle_add_byte_offset", "tirx.ptr_byte_offset")
def _add_bytes(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
    pointer, offset = expressions.address(call.args[0]), expressions.compiled(call.args[1])
    return lambda lanes, mask: pointer(lanes, mask) + np.asarray(offset(lanes, mask), np.int64).astype(np.uint64)


@handles("tirx.tvm_access_ptr")
def _access_ptr(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
    pointer, offset = expressions.address(call.args[1]), expressions.compiled(call.args[2])
    annotation = call.args[0]
    size = scalar_type(str(annotation.ty.dtype)).itemsize

    def value(lanes: Any, mask: Any) -> Any:
        bytes_ = np.asarray(offset(lanes, mask), np.int64) * size
        return pointer(lanes, mask) + bytes_.astype(np.uint64)

    return value


@handles("tirx.call_pure_extern", "tirx.call_extern", "tirx.cuda.func_call")
def _extern(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
    name = str(call.args[0].value)
    if name not in EXTERNS:
        raise NotImplementedError(f"the interpreter does not know the function {name}: {str(call)[:300]}")
    return EXTERNS[name](expressions, call)


def extern(function: Callable[..., Any], *names: str) -> None:
    """Register a function that kernels call by its name in C, as a function of values."""

    def handler(expressions: Any, call: Any) -> Callable[[Any, Any], Any]:
        has_source = call.op.name == "tirx.cuda.func_call"
        arguments = [expressions.compiled(a) for a in list(call.args)[1 : -1 if has_source else None]]
        dtype = result_type(call)
        return lambda lanes, mask: cast(np.asarray(function(*(a(lanes, mask) for a in arguments))), dtype)

    for name in names:
        EXTERNS[name] = handler


for _c, _function in {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "sqrt": np.sqrt, "erf": _erf, "tanh": np.tanh,
    "fabs": np.abs, "floor": np.floor, "ceil": np.ceil, "pow": np.power, "sin": np.sin, "cos": np.cos,
    "fmax": np.fmax, "fmin": np.fmin, "rint": np.rint, "trunc": np.trunc,
}.items():  # fmt: skip
    extern(_function, _c, f"{_c}f", f"__{_c}f")
extern(lambda x: 1 / np.sqrt(x), "rsqrt", "rsqrtf", "__frsqrt_rn")
extern(np.divide, "__fdividef")


def _power(x: np.ndarray, factor: float) -> np.ndarray:
    """2 ** (x * factor) as ``ex2.approx.ftz.f32`` of a rounded product."""
    power = np.exp2(x.astype("float32") * np.float32(factor))
    return np.where(power < np.float32(2.0**-126), np.float32(0), power)


def _quick_tanh(x: np.ndarray) -> np.ndarray:
    rounded = np.float32(1) - np.float32(2) / (np.float32(1) + _power(x, 2 / np.log(2)))
    return np.where(np.abs(x) < np.float32(0.01), x, rounded)


extern(lambda x: _power(x, 1 / np.log(2)), "quick_exp")
extern(lambda x: np.float32(1) / (np.float32(1) + _power(x, -1 / np.log(2))), "quick_sigmoid")
extern(_quick_tanh, "quick_tanh")
