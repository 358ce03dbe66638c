"""Rows of scalar functions: formulas against numpy in float64, and the Relax ops that they name."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

import relax_hetero  # noqa: F401
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.functions import FUNCTIONS

X = np.concatenate([np.linspace(-30, 30, 601), [-300.0, 300.0, 1e-8, -1e-8]])


@pytest.mark.parametrize("name", [name for name, function in FUNCTIONS.items() if function.formula])
def test_a_formula_is_its_function(name: str) -> None:
    actual, expected = (Expression.parse(text).evaluate([X]) for text in (FUNCTIONS[name].formula, f"{name}(x0)"))
    np.testing.assert_allclose(actual, expected, rtol=1e-14)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_a_relax_op_and_keeps_types(name: str) -> None:
    function = FUNCTIONS[name]
    assert not function.op or f"relax.{function.op}" in tvm.ir.Op.list_op_names()
    params = {"leaky_relu": [0.1], "clip": [-1.0, 1.0], "cast": ["float32"]}.get(name, [])
    assert len(params) == function.num_params
    for dtype in (np.float32, np.float64) if name != "cast" else (np.float32,):
        x = np.abs(X[:5]).astype(dtype)
        assert function.evaluate(*[x] * function.num_args, *params).dtype == dtype


def test_functions_of_plans_are_not_read_from_text() -> None:
    with pytest.raises(relax_hetero.HeteroError, match="exp_nonpositive is not a function of expressions"):
        Expression.parse("exp_nonpositive(x0)")
