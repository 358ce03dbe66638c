"""Scatter ops become kernels: of CPUs, one that can work in place (`tir.scatter`); of GPUs, a few (`tir.cuda.loops`).

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

from ...target.backend import backend_of
from ...tir.cuda.loops.scatter import GpuScatter, scatter_in_order, scatter_sorted, scatter_targets
from ...tir.cuda.loops.sort import SortProblem
from ...tir.scatter import REDUCTIONS, ScatterProblem, scatter_elements_kernel, scatter_nd_kernel
from ..ir.blocks import tensor_type
from ..ir.extents import Symbols, known_extents
from ..ir.rewriting import typed
from .sort_kernels import sorted_lines

Legalize = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]

_WITHOUT_PATTERN = 8


def legalizations() -> dict[str, Legalize]:
    """Legalizations by op, for `relax.transform.LegalizeOps`."""
    return {name: partial(_legalize, tvm.ir.Op.get(name).get_attr("FLegalize")) for name in (_ELEMENTS, _ND)}


_ELEMENTS, _ND = "relax.scatter_elements", "relax.scatter_nd"


def _legalize(stock: Legalize, builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    problem = _problem(call)
    vdevice = call.ty.vdevice
    if problem is None or vdevice is None:
        return stock(builder, call)
    if backend_of(vdevice.target).has_sorts:
        return _of_gpus(builder, call, problem)
    if "cpu" not in vdevice.target.keys or not _is_exact(problem):
        return stock(builder, call)
    if call.op.name == _ND:
        kernel = scatter_nd_kernel(problem)
    else:
        kernel = scatter_elements_kernel(problem, int(call.attrs.axis) % len(problem.data))
    plain = kernel.without_attr("global_symbol").with_attr("op_pattern", _WITHOUT_PATTERN)
    gv = builder.add_func(plain, call.op.name.removeprefix("relax."))
    return typed(relax.call_tir(gv, relax.Tuple(list(call.args)), call.ty), call.ty)


def _of_gpus(builder: relax.BlockBuilder, call: relax.Call, problem: ScatterProblem) -> relax.Expr:
    axis = int(call.attrs.axis) % len(problem.data) if call.op.name == _ELEMENTS else None
    scatter, (data, indices, updates) = GpuScatter(problem, axis), call.args
    name = call.op.name.removeprefix("relax.")

    def called(kernel: tirx.PrimFunc, operands: list[relax.Expr], ty: relax.TensorType, suffix: str) -> relax.Call:
        gv = builder.add_func(
            kernel.without_attr("global_symbol").with_attr("op_pattern", _WITHOUT_PATTERN), f"{name}{suffix}"
        )
        return typed(relax.call_tir(gv, relax.Tuple(operands), ty), ty)

    if not scatter.is_sorted:
        return called(scatter_in_order(scatter), [data, indices, updates], call.ty, "")
    ty = tensor_type([scatter.targets], scatter.target_type, data.ty)
    targets = builder.emit(called(scatter_targets(scatter), [indices], ty, "_targets"))
    count = scatter.targets
    assert count is not None, "what is sorted has a known length"
    sort = SortProblem((count,), 0, scatter.target_type, False, count, False, "int32")
    order_type = tensor_type([count], "int32", data.ty)
    order = builder.emit(sorted_lines(builder, targets, sort, order_type, f"{name}_order"))
    return called(scatter_sorted(scatter), [data, updates, targets, order], call.ty, "")


def _is_exact(problem: ScatterProblem) -> bool:
    """Return whether reductions of a CPU's kernel are those of stock TVM's, which computes with wider numbers."""
    return problem.reduction == "update" or problem.dtype in ("float32", "float64", "int32", "int64")


def _problem(call: relax.Call) -> ScatterProblem | None:
    """Problem of a scatter; None where only the stock kernel can solve it."""
    data, indices, updates = (arg.ty for arg in call.args)
    if any(known_extents(ty) is None for ty in (data, indices, updates)):
        return None
    dtype, reduction = str(data.dtype), str(call.attrs.reduction)
    if reduction not in REDUCTIONS or not data.shape.values:
        return None
    if call.op.name == _ND and not isinstance(indices.shape.values[-1], tirx.IntImm):
        return None
    symbols = Symbols()
    shapes = [tuple(map(symbols.dim, ty.shape.values)) for ty in (data, indices, updates)]
    return ScatterProblem(shapes[0], shapes[1], shapes[2], dtype, str(indices.dtype), reduction)
