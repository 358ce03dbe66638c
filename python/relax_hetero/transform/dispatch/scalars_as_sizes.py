"""Fused functions that take a symbolic size both by itself and in a shape: all sizes come in the shape.

FuseOps gives a size that an op reads as a number, ``shape_to_tensor(n)``, as a scalar, and sizes that only types
mention in a shape behind all arguments. Stock FuseTIR refuses functions that have both.
"""

from __future__ import annotations

from typing import NamedTuple

import tvm
from tvm import relax

from ..ir.rewriting import copy_module, map_bindings, relax_functions, typed


class _Changed(NamedTuple):
    """A function with another signature, and which of the arguments it had are scalars."""

    gv: tvm.ir.GlobalVar
    func: relax.Function
    scalars: list[int]


def scalars_as_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with scalars of such functions at the end of the shape, and calls of them changed alike."""
    changed = {gv: found for gv, func in relax_functions(mod) if (found := _changed(gv, func)) is not None}
    if not changed:
        return mod

    def with_shape(binding: relax.Binding) -> relax.Binding:
        call = binding.value
        if not isinstance(call, relax.Call) or call.op not in changed:
            return binding
        gv, _, scalars = changed[call.op]
        left = [arg for i, arg in enumerate(call.args[:-1]) if i not in scalars]
        shape = relax.ShapeExpr([*call.args[-1].values, *(call.args[i] for i in scalars)])
        new = relax.Call(gv, [*left, shape], call.attrs, call.ty_args, call.span)
        return relax.VarBinding(binding.var, typed(new, call.ty))

    result = copy_module(mod)
    for gv, func in relax_functions(mod):
        if gv in changed:
            del result[gv]
            result[changed[gv].gv] = changed[gv].func
        else:
            result[gv] = map_bindings(func, with_shape)
    return result


def _changed(gv: tvm.ir.GlobalVar, func: relax.Function) -> _Changed | None:
    scalars = [i for i, param in enumerate(func.params) if isinstance(param.ty, tvm.ir.PrimType)]
    is_fused = func.attrs is not None and "Primitive" in func.attrs
    if not is_fused or not scalars:
        return None
    last = func.params[-1]
    if not isinstance(last.ty, relax.ShapeType) or last.ty.values is None:
        return None
    left = [param for i, param in enumerate(func.params[:-1]) if i not in scalars]
    shape = relax.Var(last.name, relax.ShapeType([*last.ty.values, *(func.params[i] for i in scalars)]))
    made = relax.Function([*left, shape], func.body, func.ret_ty, func.is_pure, func.attrs, func.span)
    return _Changed(typed(tvm.ir.GlobalVar(gv.name_hint), made.ty), made, scalars)
