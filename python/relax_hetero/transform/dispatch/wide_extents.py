"""Kernels whose tensors have 32-bit extents get 64-bit ones, as Relax and all kernels that TVM makes have.

Authors of kernels write ``T.Buffer((4, 4), "float32")`` and ``n = T.int32()``. FuseTIR binds the tensors of two kernels
only if their types are equal, so that such a kernel could not be fused with any other. Extents in the types become
64-bit; inside the kernel a symbolic one is cast back, so that its loops and arithmetic stay as written.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import structural_map, structural_walk

from ..ir.rewriting import copy_module

_WIDE = "int64"


def widen_extents(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with 64-bit extents in the parameters of its kernels; itself where all have them."""
    functions = {
        gv: _widened(func) if isinstance(func, tirx.PrimFunc) and any(map(_is_narrow, func.params)) else func
        for gv, func in mod.functions.items()
    }
    changed = any(not func.same_as(mod.functions[gv]) for gv, func in functions.items())
    return copy_module(mod, functions) if changed else mod


def _is_narrow(param: tvm.ir.Var) -> bool:
    return is_buffer_var(param) and any(str(extent.ty.dtype) != _WIDE for extent in (*param.shape, *param.strides))


def _widened(func: tirx.PrimFunc) -> tirx.PrimFunc:
    sizes: dict[tvm.ir.Var, tvm.ir.Var] = {}

    def size(var: tvm.ir.Var) -> tvm.ir.Var:
        if str(var.ty.dtype) != _WIDE and var not in sizes:
            sizes[var] = tirx.Var(var.name, _WIDE)
        return sizes.get(var, var)

    buffers: dict[tvm.ir.Var, tvm.ir.Var] = {}
    for param in filter(_is_narrow, func.params):
        ty = param.ty
        wide = [[_wide(extent, size) for extent in extents] for extents in (ty.shape, ty.strides)]
        offset = _wide(ty.elem_offset, size)
        form = {"scope": ty.storage_scope, "data_alignment": ty.data_alignment, "offset_factor": ty.offset_factor}
        shape, strides = wide
        buffers[param] = tirx.decl_buffer(
            shape, str(ty.dtype), param.name, strides=strides, elem_offset=offset, layout=ty.layout, **form
        )

    def renamed(var: tvm.ir.Var) -> Any:
        if var in sizes:
            return tirx.Cast(str(var.ty.dtype), sizes[var])
        return buffers.get(var, var)

    params = [buffers.get(param, sizes.get(param, param)) for param in func.params]
    body = structural_map(func.body, (tvm.ir.Var, renamed))
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs, func.span)


def _wide(expr: Any, size: Any) -> Any:
    """An extent as a 64-bit number over 64-bit variables."""
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm(_WIDE, int(expr))
    if isinstance(expr, tvm.ir.Var):
        return size(expr)
    if isinstance(expr, (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)):
        return type(expr)(_wide(expr.a, size), _wide(expr.b, size))
    variables: list[tvm.ir.Var] = []
    structural_walk(expr, (tvm.ir.Var, variables.append))
    narrow = {var: tirx.Cast(str(var.ty.dtype), size(var)) for var in variables if str(var.ty.dtype) != _WIDE}
    return tirx.Cast(_WIDE, structural_map(expr, (tvm.ir.Var, lambda var: narrow.get(var, var))))
