"""Functions with a formula as the Relax ops that it names, each a kernel that TVM fuses with its neighbours.

Before::

    y: R.Tensor((4,), "float32") = R.hetero.softsign(x)

After, with kernels in the place of the ops::

    y: R.Tensor((4,), "float32") = R.divide(x, R.add(R.abs(x), R.const(1.0)))

Halves are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tvm
from tvm import relax

from ...encoding.expression import Expression, Term
from ...encoding.functions import FUNCTIONS
from ...target.element_types import HALF_TYPES
from ..ir.relax_expressions import from_expression

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]


def legalizations(others: dict[str, Legalize]) -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`; `others` legalizes the ops of formulas, or stock does."""
    return {f"relax.{name.op}": partial(_legalize, name.formula, others) for name in FUNCTIONS.values() if name.formula}


def _legalize(formula: str, others: dict[str, Legalize], builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    def emit(part: relax.Expr, _ty: relax.TensorType) -> relax.Expr:
        part = builder.normalize(part)
        legalize = others.get(part.op.name) or tvm.ir.Op.get(part.op.name).get_attr("FLegalize")
        return builder.emit(legalize(builder, part))

    expression, dtype = Expression.parse(formula), str(call.ty.dtype)
    if dtype in HALF_TYPES:
        single = Expression(Term("cast", (Expression.operand(0).term,), ("float32",)))
        expression = Expression(Term("cast", (expression.substitute([single]).term,), (dtype,)))
    return from_expression(expression, list(call.args), emit)
