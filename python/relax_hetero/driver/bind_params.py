"""Weights given by name become constants of ``main``, each on the device of the parameter it stands for.

TVM's BindParams makes constants without a device, and then finds that calls with them do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_map

from ..errors import BuildError
from ..transform.ir.rewriting import copy_module, relax_functions, typed
from ..transform.record.donated import DONATED, input_names


def bind_params(mod: tvm.IRModule, params: Mapping[str, Any]) -> tvm.IRModule:
    """Put `params` in the place of parameters of ``main``; symbolic extents that they settle become numbers.

    Raises
    ------
    BuildError: No ``main``, a name that is no parameter's, or a value that does not fit its parameter's type.
    """
    mains = [(gv, func) for gv, func in relax_functions(mod) if gv.name_hint == "main"]
    if not mains:
        raise BuildError("params= binds weights of function 'main', and the module has none")
    gv, func = mains[0]
    names = [param.name for param in func.params]
    unknown = [name for name in params if name not in names]
    if unknown:
        raise BuildError(f"params= names {unknown}, which function 'main' does not have; it has {names}")
    callers = [caller.name_hint for caller, f in relax_functions(mod) if gv in relax.analysis.all_global_vars(f)]
    if callers:
        raise BuildError(f"params= binds weights of function 'main', which {callers} call with weights of their own")
    extents: dict[tvm.ir.Var, tvm.ir.Expr] = {}
    weights = {param: _weight(param, params[param.name], extents) for param in func.params if param.name in params}
    kept = [param for param in func.params if param not in weights]
    func = _without_names(func, weights)
    func = _substitute(func, kept, {param: _constant(weight, param.ty) for param, weight in weights.items()})
    func = _substitute(func, list(func.params), extents)
    functions = {old: body for old, body in mod.functions.items() if not old.same_as(gv)}
    return copy_module(mod, {**functions, typed(tvm.ir.GlobalVar(gv.name_hint), func.ty): func})


def _without_names(func: relax.Function, weights: Mapping[relax.Var, tvm.runtime.Tensor]) -> relax.Function:
    """The function, with attributes that count and name the parameters that are not in `weights`."""
    kept = [number for number, param in enumerate(func.params) if param not in weights]
    if "input_names" in func.attrs:
        names = input_names(func)
        func = func.with_attr("input_names", [names[number] for number in kept])
    if "num_input" in func.attrs:
        before = int(func.attrs["num_input"])
        func = func.with_attr("num_input", sum(number < before for number in kept))
    if DONATED in func.attrs:
        donated = [int(number) for number in func.attrs[DONATED]]
        func = func.with_attr(DONATED, [kept.index(number) for number in donated if number in kept])
    return func


def _constant(weight: tvm.runtime.Tensor, ty: relax.TensorType) -> tvm.ir.GenericConst:
    shape = relax.ShapeExpr([int(extent) for extent in weight.shape])
    return tvm.ir.GenericConst(weight, relax.TensorType(shape, str(weight.dtype), ty.vdevice))


def _substitute(
    func: relax.Function, params: list[relax.Var], values: Mapping[tvm.ir.Var, tvm.ir.Expr]
) -> relax.Function:
    plain = relax.Function(params, func.body, func.ret_ty, func.is_pure, func.attrs, func.span)
    return structural_map(plain, (tvm.ir.Var, lambda var: values.get(var, var))) if values else plain


def _weight(param: relax.Var, value: Any, extents: dict[tvm.ir.Var, tvm.ir.Expr]) -> tvm.runtime.Tensor:
    """`value` as a tensor of the parameter's type; symbolic extents that it settles are added to `extents`."""
    where = f"params= gives {param.name!r}"
    try:
        tensor = value if isinstance(value, tvm.runtime.Tensor) else tvm.runtime.tensor(value)
    except (TypeError, ValueError) as error:
        raise BuildError(f"{where} a {type(value).__name__}, expected a tensor: {error}") from error
    shape = tuple(int(extent) for extent in tensor.shape)
    if not _fits(shape, str(tensor.dtype), param.ty, extents):
        raise BuildError(f"{where} a tensor of shape {shape} and dtype {tensor.dtype}, expected {param.ty}")
    return tensor


def _fits(shape: tuple[int, ...], dtype: str, ty: tvm.ir.Type, extents: dict[tvm.ir.Var, tvm.ir.Expr]) -> bool:
    if not isinstance(ty, relax.TensorType) or (ty.dtype is not None and str(ty.dtype.dtype) != dtype):
        return False
    if not isinstance(ty.shape, relax.ShapeExpr):
        return int(ty.ndim) in (-1, len(shape))
    expected = ty.shape.values
    if len(expected) != len(shape):
        return False
    for extent, have in zip(expected, shape, strict=True):
        if isinstance(extent, tvm.ir.Var):
            extent = extents.setdefault(extent, tirx.IntImm("int64", have))
        if isinstance(extent, tirx.IntImm) and int(extent.value) != have:
            return False
    return True
