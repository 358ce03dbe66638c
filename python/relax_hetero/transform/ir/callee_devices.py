"""Devices in the types of callees (global variables and parameters), which stock passes compare with arguments."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax
from tvm_ffi import structural_map

from ...target.native_target import native
from ...tir.core.walks import replaced
from .rewriting import copy_module, map_bindings, relax_functions, typed, walk_bindings, with_functions


def without_callee_devices(mod: tvm.IRModule) -> tvm.IRModule:
    """Remove devices from the parameters in callee types; the functions' own parameters keep them.

    Lowered allocations, and results of kernels that stock passes make, have types without a device, and passing one
    to a parameter with a device is a type error. Results keep their devices: a stock pass that rewrites a call derives
    its type, and kernels that were fused around the call need the devices that it had.
    """

    def plain(ty: relax.TensorType) -> relax.TensorType:
        if ty.vdevice is None:
            return ty
        ndim = -1 if ty.shape is not None else int(ty.ndim)
        return relax.TensorType(ty.shape, ty.dtype, None, ndim, ty.span)

    def callee_type(_: tvm.ir.GlobalVar, func: relax.Function) -> tvm.ir.Type:
        params = [structural_map(param.ty, (relax.TensorType, plain)) for param in func.params]
        return relax.FuncType(params, func.ret_ty, bool(func.is_pure))

    def without_devices(ty: relax.FuncType) -> relax.FuncType:
        if ty.params is None:
            return ty
        params = [structural_map(param, (relax.TensorType, plain)) for param in ty.params]
        return relax.FuncType(params, ty.ret, bool(ty.purity), ty.span)

    return _with_callee_types(_with_function_variables(mod, without_devices), callee_type)


def with_written_results(mod: tvm.IRModule) -> tvm.IRModule:
    """Give calls of variables an explicit result type, as calls of packed functions have.

    Stock passes would derive it from the variable's type, which lacks a device if the results of several calls
    differ in theirs.
    """
    packed = relax.ExternFunc("callback").ty

    def change(binding: relax.Binding) -> relax.Binding:
        call = binding.value
        if not (isinstance(call, relax.Call) and isinstance(call.op, relax.Var)):
            return binding
        new = relax.Call(call.op, list(call.args), call.attrs, [binding.var.ty], call.span, ret_ty=binding.var.ty)
        return relax.VarBinding(binding.var, new, binding.span)

    mod = with_functions(mod, {gv: map_bindings(func, change) for gv, func in relax_functions(mod)})
    return with_callee_devices(_with_function_variables(mod, lambda _: packed))


def _with_function_variables(mod: tvm.IRModule, change: Callable[[relax.FuncType], relax.FuncType]) -> tvm.IRModule:
    """Apply `change` to the function types of variables that are functions, or tuples with functions."""
    functions = dict(mod.functions.items())
    for gv, func in relax_functions(mod):
        new = {
            var: type(var)(var.name, structural_map(var.ty, (relax.FuncType, change)))
            for var in (*func.params, *(binding.var for binding in walk_bindings(func)))
            if _has_function(var.ty)
        }
        functions[gv] = replaced(func, new)
    return with_functions(mod, functions)


def _has_function(ty: tvm.ir.Type) -> bool:
    return isinstance(ty, relax.FuncType) or (isinstance(ty, tvm.ir.TupleType) and any(map(_has_function, ty.fields)))


def with_callee_devices(mod: tvm.IRModule) -> tvm.IRModule:
    """Restore the devices of functions' parameters and results in their callee types."""
    return _with_callee_types(
        mod, lambda _, func: relax.FuncType([p.ty for p in func.params], func.ret_ty, bool(func.is_pure))
    )


def _with_callee_types(
    mod: tvm.IRModule, type_of: Callable[[tvm.ir.GlobalVar, relax.Function], tvm.ir.Type]
) -> tvm.IRModule:
    """The module with new types of the global variables by which its Relax functions are called."""
    renamed: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
    for gv, func in relax_functions(mod):
        if isinstance(gv.ty, relax.FuncType):
            renamed[gv] = typed(tvm.ir.GlobalVar(gv.name_hint), type_of(gv, func))
    if not renamed:
        return mod
    functions = {renamed.get(gv, gv): func for gv, func in mod.functions.items()}
    for gv, func in functions.items():
        if isinstance(func, relax.Function):
            functions[gv] = replaced(func, renamed, tvm.ir.GlobalVar)
    return copy_module(mod, functions)


def target_of(vdevice: relax.VDevice | None) -> tvm.target.Target:
    """The target of a device; without a device TVM's current target, else this CPU's."""
    if vdevice is not None:
        return vdevice.target
    return tvm.target.Target.current(allow_none=True) or native("llvm")
