"""Legalization of functions that have a formula: the formula's Relax ops, as kernels that TVM fuses.

Before::

    y: R.Tensor((4,), "float32") = R.hetero.softsign(x)

After, with kernels in place of the ops::

    y: R.Tensor((4,), "float32") = R.divide(x, R.add(R.abs(x), R.const(1.0)))

Halves are computed in float32.
"""

from __future__ import annotations

from functools import partial

import tvm
from tvm import relax

from ...encoding.expression import Expression, Term
from ...encoding.functions import FUNCTIONS
from ...target.element_types import HALF_TYPES
from ..ir.relax_expressions import from_expression
from .sort_kernels import Legalize


def legalizations(others: dict[str, Legalize]) -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`; the ops of formulas use those of `others`, else TVM's."""
    return {f"relax.{row.op}": partial(_legalize, row.formula, others) for row in FUNCTIONS.values() if row.formula}


def _legalize(formula: str, others: dict[str, Legalize], builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    def emit(op: relax.Expr, _ty: relax.TensorType) -> relax.Expr:
        op = builder.normalize(op)
        legalize = others.get(op.op.name) or tvm.ir.Op.get(op.op.name).get_attr("FLegalize")
        return builder.emit(legalize(builder, op))

    expression, dtype = Expression.parse(formula), str(call.ty.dtype)
    if dtype in HALF_TYPES:
        single = Expression(Term("cast", (Expression.operand(0).term,), ("float32",)))
        expression = Expression(Term("cast", (expression.substitute([single]).term,), (dtype,)))
    return from_expression(expression, list(call.args), emit)
