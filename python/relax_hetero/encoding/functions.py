"""Scalar functions of expressions: one row for each function, with all its properties.

The parser of expressions, code generators, cost models, the fusion of Relax ops and constant folding read this table.
Code generators look a function's code up by its name: `tir.math.vector_math` has the vector code of approximated
functions, `tir.elementwise.expression_ops` that of the others, `tir.cuda.core.expression` what differs on GPUs. A
function with a formula needs none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..target.element_types import numpy_dtype

_erf = np.vectorize(math.erf, otypes=[float])
_erfc = np.vectorize(math.erfc, otypes=[float])


@dataclass(frozen=True)
class Function:
    """A scalar function."""

    name: str  # name in the text of expressions and of its code
    op: str  # Relax op that computes it, without ``relax.``; empty for a function that only plans of kernels use
    evaluate: Callable[..., np.ndarray]  # the function of numpy arrays, followed by its parameters
    num_args: int = 1
    num_params: int = 0  # further arguments: numbers, or an element type for "cast"
    cost: int = 1  # instructions for one vector, roughly
    # Whether kernels compute it by polynomials fit for single precision, so not for float64.
    is_approximated: bool = False
    # Whether it is also defined on integers, with one meaning; a quotient or a root is not.
    takes_integers: bool = False
    is_exact: bool = False  # whether the result is one of the values read or has their precision: nothing to round
    formula: str = ""  # expression over ``x0`` of other functions, for a function without code of its own
    onnx: str = ""  # ONNX op that is imported as this function


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _gelu(x: np.ndarray) -> np.ndarray:
    return (x * _erfc(x * -math.sqrt(0.5)) / 2).astype(x.dtype)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def _mish(x: np.ndarray) -> np.ndarray:
    return (x * np.tanh(np.logaddexp(0, x))).astype(x.dtype)


def _leaky_relu(x: np.ndarray, alpha: float) -> np.ndarray:
    return np.where(x > 0, x, x * alpha)


def _cast(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(x).astype(numpy_dtype(dtype))


def _where(condition: np.ndarray, then: Any, otherwise: Any) -> np.ndarray:
    return np.where(condition != 0, then, otherwise)


# With e = exp(x), tanh(log(1 + e)) is n / (n + 2) for n = e (e + 2), without cancellation. Beyond 20 that is 1 to the
# last bit, and exp would overflow.
_EXP = "exp(minimum(x0, 20.0))"
_MISH = "multiply(x0, divide({n}, add({n}, 2.0)))".format(n=f"multiply({_EXP}, add({_EXP}, 2.0))")

_APPROXIMATED: Any = {"is_approximated": True}
_ON_INTEGERS: Any = {"takes_integers": True}
_EXACT: Any = {"takes_integers": True, "is_exact": True}

FUNCTIONS: dict[str, Function] = {
    function.name: function
    for function in (
        Function("add", "add", np.add, 2, **_ON_INTEGERS),
        Function("subtract", "subtract", np.subtract, 2, **_ON_INTEGERS),
        Function("multiply", "multiply", np.multiply, 2, **_ON_INTEGERS),
        Function("divide", "divide", np.divide, 2, cost=5),
        Function("maximum", "maximum", np.maximum, 2, **_EXACT),
        Function("minimum", "minimum", np.minimum, 2, **_EXACT),
        Function("relu", "nn.relu", lambda x: np.maximum(x, 0), **_EXACT),
        Function("gelu", "nn.gelu", _gelu, cost=24, **_APPROXIMATED),
        Function("gelu_tanh", "nn.gelu_tanh", _gelu_tanh, cost=24, **_APPROXIMATED),
        Function("silu", "nn.silu", lambda x: x * _sigmoid(x), cost=18, **_APPROXIMATED),
        Function("sigmoid", "sigmoid", _sigmoid, cost=18, **_APPROXIMATED),
        Function("tanh", "tanh", np.tanh, cost=24, **_APPROXIMATED),
        Function("erf", "erf", lambda x: _erf(x).astype(x.dtype), cost=24, **_APPROXIMATED),
        Function("exp", "exp", np.exp, cost=14, **_APPROXIMATED),
        Function("exp_nonpositive", "", np.exp, cost=10, **_APPROXIMATED),
        Function("log", "log", np.log, cost=18, **_APPROXIMATED),
        Function("mish", "hetero.mish", _mish, cost=23, formula=_MISH, onnx="Mish", **_APPROXIMATED),
        Function(
            "softsign",
            "hetero.softsign",
            lambda x: x / (1 + np.abs(x)),
            cost=7,
            formula="divide(x0, add(abs(x0), 1.0))",
            onnx="Softsign",
        ),
        Function("sqrt", "sqrt", np.sqrt, cost=6),
        Function("rsqrt", "rsqrt", lambda x: 1 / np.sqrt(x), cost=10),
        Function("square", "square", np.square),
        Function("abs", "abs", np.abs, **_EXACT),
        Function("negative", "negative", np.negative, **_EXACT),
        Function("round", "round", np.round, is_exact=True),
        Function("floor", "floor", np.floor, is_exact=True),
        Function("ceil", "ceil", np.ceil, is_exact=True),
        Function("leaky_relu", "nn.leakyrelu", _leaky_relu, num_params=1),
        Function("clip", "clip", np.clip, num_params=2, **_ON_INTEGERS),
        Function("cast", "astype", _cast, num_params=1, **_EXACT),
        Function("where", "where", _where, 3, is_exact=True),
    )
}
