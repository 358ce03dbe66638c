"""Kernels of scatter ops: one on CPUs, which can work in place (`tir.scatter`), a few on GPUs (`tir.cuda.loops`).

Before::

    new = R.scatter_nd(cache, rows, updates)

After, where the kernel ties `cache` to `new`::

    new = R.call_tir(cls.scatter_nd, (cache, rows, updates), out_ty=R.Tensor((64, 16), "float32", "llvm:0"))
"""

from __future__ import annotations

from functools import partial

import tvm
from tvm import relax, tirx

from ...target.backend import backend_of
from ...tir.cuda.loops.cuda_scatter import GpuScatter, scatter_in_order, scatter_sorted, scatter_targets
from ...tir.cuda.loops.sort import SortProblem
from ...tir.scatter import REDUCTIONS, ScatterProblem, scatter_elements_kernel, scatter_nd_kernel
from ..ir.blocks import tensor_type
from ..ir.extents import Symbols, known_extents
from .sort_kernels import Legalize, call_kernel, sorted_lines


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
        return _gpu_scatter(builder, call, problem)
    if "cpu" not in vdevice.target.keys or not _is_exact(problem):
        return stock(builder, call)
    if call.op.name == _ND:
        kernel = scatter_nd_kernel(problem)
    else:
        kernel = scatter_elements_kernel(problem, int(call.attrs.axis) % len(problem.data))
    return call_kernel(builder, kernel, list(call.args), call.ty, call.op.name.removeprefix("relax."))


def _gpu_scatter(builder: relax.BlockBuilder, call: relax.Call, problem: ScatterProblem) -> relax.Expr:
    axis = int(call.attrs.axis) % len(problem.data) if call.op.name == _ELEMENTS else None
    scatter, (data, indices, updates) = GpuScatter(problem, axis), call.args
    name = call.op.name.removeprefix("relax.")

    if not scatter.is_sorted:
        return call_kernel(builder, scatter_in_order(scatter), [data, indices, updates], call.ty, name)
    ty = tensor_type([scatter.targets], scatter.target_type, data.ty)
    targets = builder.emit(call_kernel(builder, scatter_targets(scatter), [indices], ty, f"{name}_targets"))
    count = scatter.targets
    assert count is not None, "a sorted scatter has a known number of targets"
    sort = SortProblem((count,), 0, scatter.target_type, False, count, False, "int32")
    order_type = tensor_type([count], "int32", data.ty)
    order = builder.emit(sorted_lines(builder, targets, sort, order_type, f"{name}_order"))
    return call_kernel(builder, scatter_sorted(scatter), [data, updates, targets, order], call.ty, name)


def _is_exact(problem: ScatterProblem) -> bool:
    """Return whether the CPU kernel's reductions equal those of TVM's, which accumulates in wider types."""
    return problem.reduction == "update" or problem.dtype in ("float32", "float64", "int32", "int64")


def _problem(call: relax.Call) -> ScatterProblem | None:
    """Problem of a scatter; None if only the stock kernel can solve it."""
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
