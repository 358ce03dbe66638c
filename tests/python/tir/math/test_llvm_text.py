"""Expressions as LLVM IR: the same values as numpy's, and expressions without a translation are refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from relax_hetero.driver.link.link import build_group
from relax_hetero.tir.core.builder import Function, lane_indices
from relax_hetero.tir.math.llvm_text import llvm_function
from relax_hetero.tir.math.vector_math import as_expression, constant, once, rarely
from seeds import fresh_rng
from tir.kernel_runs import VECTOR_NAMES, poisoned, target_of

LANES = 8


def _shared(x, y):
    total = once(x + y)
    return total * total - total / constant(x, 3.0)


def _integers(x, y):
    a = T.cast(x, "int32x8")
    b = T.shift_right(T.shift_left(a, constant(a, 3)), constant(a, 1))
    odd = T.bitwise_xor(T.bitwise_and(b, constant(b, 12)), T.bitwise_or(a, constant(a, 1)))
    return T.cast(odd - constant(odd, 7), "float32x8") * y


def _choices(x, y):
    both = tirx.And(x < y, tirx.Not(tirx.EQ(x, constant(x, 2.0))))
    either = tirx.Or(x > constant(x, 5.0), tirx.NE(y, constant(y, 1.0)))
    inner = T.Select(either, constant(x, -1.0), y)
    return T.Select(both, x, inner) + T.Select(x <= y, inner, constant(x, 0.5)) + T.Select(x >= y, y, x)


def _wide(x, y):
    product = once(T.cast(x, "float64x8") * T.cast(y, "float64x8"))
    return T.cast(T.sqrt(product * product), "float32x8") + T.sqrt(y)


def _seldom(x, y):
    return rarely(x > constant(x, 6.0), T.sin(x), y) + rarely(x > constant(x, 1e9), T.cos(x), x)


def _numpy_choices(x, y):
    inner = np.where((x > 5) | (y != 1), -1, y)
    return np.where((x < y) & (x != 2), x, inner) + np.where(x <= y, inner, 0.5) + np.where(x >= y, y, x)


def _numpy_integers(x, y):
    a = x.astype("int32")
    b = (a << 3) >> 1
    return ((((b & 12) ^ (a | 1)) - 7) * y).astype("float32")


FUNCTIONS = {
    "shared": (_shared, lambda x, y: (x + y) ** 2 - (x + y) / 3),
    "integers": (_integers, _numpy_integers),
    "choices": (_choices, _numpy_choices),
    "wide": (_wide, lambda x, y: np.abs(x * y) + np.sqrt(y)),
    "seldom": (_seldom, lambda x, y: np.where(x > 6, np.sin(x), y) + x),
}


def _text(name: str) -> str:
    params = [tirx.Var(f"x{i}", f"float32x{LANES}") for i in range(2)]
    return llvm_function(f"text.{name}", params, as_expression(FUNCTIONS[name][0], *params))


def _kernel(name: str) -> tirx.PrimFunc:
    function = Function(name)
    with function:
        x, y, out = (function.argument(n, [LANES], "float32") for n in ("x", "y", "out"))
        with function.body():
            index = lane_indices(tirx.const(0, "int64"), LANES)
            call = T.call_pure_extern(f"float32x{LANES}", f"text.{name}", x[index], y[index])
            with T.attr(tirx.const(0), "pragma_import_llvm", tvm.ir.StringImm(_text(name))):
                T.buffer_store(out, call, [index])
    return function.result


@pytest.mark.parametrize("target", VECTOR_NAMES)
def test_values(target):
    kernels = tvm.IRModule({name: _kernel(name) for name in FUNCTIONS})
    library = build_group(target_of(target), kernels, target_of(target))
    rng = fresh_rng()
    for name, (_, reference) in FUNCTIONS.items():
        for high in (5, 9):  # without and with what is seldom
            x, y = rng.integers(0, high, (2, LANES)).astype("float32")
            out = poisoned([LANES], "float32")
            library[name](tvm.runtime.tensor(x), tvm.runtime.tensor(y), out)
            np.testing.assert_allclose(out.numpy(), reference(x, y), rtol=1e-6, atol=1e-6, err_msg=f"{name} {x} {y}")


def test_common_subexpressions_are_written_once():
    text = _text("shared")
    assert len(re.findall(r"fadd", text)) == 1
    assert "contract" in text


def test_expressions_without_a_translation_are_refused():
    x = tirx.Var("x", "float32x8")
    scalar = T.broadcast(tirx.Var("s", "float32"), 8)
    for value, named in ((T.exp(x), "tirx.exp"), (tirx.Shuffle([x], [0]), "Shuffle"), (x + scalar, "broadcast")):
        with pytest.raises(TypeError, match=f"no translation of .*{named}"):
            llvm_function("f", [x], value)
