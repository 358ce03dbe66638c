"""Comparisons, the larger and smaller, and sums and products of truth values, which stock TVM takes for floats.

TVM's code generator for LLVM knows no comparison of booleans: it writes that of floats, which LLVM refuses, in the
middle of a build. As bytes they compare as numpy has it, false before true, and LLVM makes one instruction of it.
Their sum is the larger of two, their product the smaller.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax, te, topi

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
_EXTREMES = {"maximum": "maximum", "minimum": "minimum", "add": "maximum", "multiply": "minimum"}
"""Equivalent of an op on numbers 0 and 1."""


def legalizations(others: dict[str, Legalize]) -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`; other types are left to `others`, or to stock."""
    found = {}
    for name in (*_COMPARISONS, *_EXTREMES):
        op = f"relax.{name}"
        found[op] = _legalization(name, others.get(op) or tvm.ir.Op.get(op).get_attr("FLegalize"))
    return found


def _legalization(name: str, otherwise: Legalize) -> Legalize:
    compute = getattr(topi, _EXTREMES.get(name, name))

    def kernel(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        result = compute(topi.cast(a, "int8"), topi.cast(b, "int8"))
        return topi.cast(result, "bool") if name in _EXTREMES else result

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        if not all(map(_is_known_truth, call.args)):
            return otherwise(builder, call)
        return builder.call_te(kernel, *call.args, primfunc_name_hint=name)

    return legalize


def _is_known_truth(arg: relax.Expr) -> bool:
    ty = arg.ty
    return isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr) and str(ty.dtype) == "bool"
