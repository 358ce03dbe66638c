"""Scatter ops of CPUs become kernels that can work in place (`tir.scatter`); those of GPUs are stock TVM's.

Before::

    new = R.scatter_nd(cache, rows, updates)

After, where the kernel ties `cache` to `new`::

    new = R.call_tir(cls.scatter_nd, (cache, rows, updates), out_ty=R.Tensor((64, 16), "float32", "llvm:0"))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tvm
from tvm import relax, tirx

from ...tir.scatter import REDUCTIONS, ScatterProblem, scatter_elements_kernel, scatter_nd_kernel
from ..ir.extents import Symbols, known_extents
from ..ir.rewriting import typed

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

_OPAQUE = 8


def legalizations() -> dict[str, Legalize]:
    """By op, for `relax.transform.LegalizeOps`."""
    return {name: partial(_legalize, tvm.ir.Op.get(name).get_attr("FLegalize")) for name in (_ELEMENTS, _ND)}


_ELEMENTS, _ND = "relax.scatter_elements", "relax.scatter_nd"


def _legalize(stock: Legalize, builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    problem = _problem(call)
    vdevice = call.ty.vdevice
    if problem is None or vdevice is None or "cpu" not in vdevice.target.keys:
        return stock(builder, call)
    if call.op.name == _ND:
        kernel = scatter_nd_kernel(problem)
    else:
        kernel = scatter_elements_kernel(problem, int(call.attrs.axis) % len(problem.data))
    plain = kernel.without_attr("global_symbol").with_attr("op_pattern", _OPAQUE)
    gv = builder.add_func(plain, call.op.name.removeprefix("relax."))
    return typed(relax.call_tir(gv, relax.Tuple(list(call.args)), call.ty), call.ty)


def _problem(call: relax.Call) -> ScatterProblem | None:
    """What a scatter computes; None where only the stock kernel can."""
    data, indices, updates = (arg.ty for arg in call.args)
    if any(known_extents(ty) is None for ty in (data, indices, updates)):
        return None
    dtype, reduction = str(data.dtype), str(call.attrs.reduction)
    exact = reduction == "update" or dtype in ("float32", "float64", "int32", "int64")
    if reduction not in REDUCTIONS or not exact or not data.shape.values:
        return None
    if call.op.name == _ND and not isinstance(indices.shape.values[-1], tirx.IntImm):
        return None
    symbols = Symbols()
    shapes = [tuple(map(symbols.dim, ty.shape.values)) for ty in (data, indices, updates)]
    return ScatterProblem(shapes[0], shapes[1], shapes[2], dtype, str(indices.dtype), reduction)
