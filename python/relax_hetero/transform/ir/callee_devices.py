"""The devices in the types by which functions are called, which stock passes compare with those of arguments."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax
from tvm_ffi import structural_map

from .rewriting import copy_module, relax_functions, typed


def without_callee_devices(mod: tvm.IRModule) -> tvm.IRModule:
    """Take devices off the arguments' types by which functions are called; the functions' own parameters keep them.

    Allocations that are lowered, and results of kernels that stock passes make, have types without a device, and
    passing one to a function that wants one is a type error. Results keep theirs: a stock pass that writes a call
    anew derives its type, and kernels that were fused around it ask for the devices that it had.
    """

    def plain(ty: relax.TensorType) -> relax.TensorType:
        if ty.vdevice is None:
            return ty
        ndim = -1 if ty.shape is not None else int(ty.ndim)
        return relax.TensorType(ty.shape, ty.dtype, None, ndim, ty.span)

    def called(_: tvm.ir.GlobalVar, func: relax.Function) -> tvm.ir.Type:
        params = [structural_map(param.ty, (relax.TensorType, plain)) for param in func.params]
        return relax.FuncType(params, func.ret_ty, bool(func.is_pure))

    return _recalled(mod, called)


def with_callee_devices(mod: tvm.IRModule) -> tvm.IRModule:
    """Give the types by which functions are called the devices of the functions' parameters and results again."""
    return _recalled(mod, lambda _, func: relax.FuncType([p.ty for p in func.params], func.ret_ty, bool(func.is_pure)))


def _recalled(mod: tvm.IRModule, type_of: Callable[[tvm.ir.GlobalVar, relax.Function], tvm.ir.Type]) -> tvm.IRModule:
    """The module with other types by which its Relax functions are called."""
    renamed: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
    for gv, func in relax_functions(mod):
        if isinstance(gv.ty, relax.FuncType):
            renamed[gv] = typed(tvm.ir.GlobalVar(gv.name_hint), type_of(gv, func))
    if not renamed:
        return mod
    functions = {renamed.get(gv, gv): func for gv, func in mod.functions.items()}
    for gv, func in functions.items():
        if isinstance(func, relax.Function):
            functions[gv] = structural_map(func, (tvm.ir.GlobalVar, lambda old: renamed.get(old, old)))
    return copy_module(mod, functions)
