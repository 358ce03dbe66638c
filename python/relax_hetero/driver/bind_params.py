"""Weights given by name become constants of the functions that take them, each on the device of its parameter.

Functions that share a weight share its constant, so that it is packed and kept once. TVM's BindParams makes constants
without a device, and then finds that calls with them do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm_ffi import structural_map

from ..errors import BuildError
from ..transform.ir.module_attrs import DEFAULTS
from ..transform.ir.rewriting import copy_module, relax_functions, typed
from ..transform.record.donated import DONATED, input_names


def bind_params(mod: tvm.IRModule, params: Mapping[str, Any]) -> tvm.IRModule:
    """Put `params` in the place of parameters of all functions; symbolic extents that they settle become numbers.

    A function's parameters are those after its ``num_input``, or all where it has none; ``main``'s inputs can be bound,
    too. Functions that others of the module call are left alone: their callers give them weights.

    Raises
    ------
    BuildError
        No mapping from names, a name that is no parameter's, or a value that does not fit its parameter's type.
    """
    if not isinstance(params, Mapping):
        found = type(params).__name__
        raise BuildError(f"params= is a {found}, expected a mapping from names of parameters to tensors{_hint(params)}")
    if not params:
        return mod
    functions = relax_functions(mod)
    called = {callee for _, func in functions for callee in relax.analysis.all_global_vars(func)}
    takers = {gv: names for gv, func in functions if gv not in called and (names := _bindable(gv, func))}
    known = list(dict.fromkeys(name for names in takers.values() for name in names))
    unknown = [name for name in params if name not in known]
    if unknown:
        callees = [gv.name_hint for gv, func in functions if gv in called and set(unknown) & {*_bindable(gv, func)}]
        if callees:
            callers = [gv.name_hint for gv, func in functions if called & {*relax.analysis.all_global_vars(func)}]
            raise BuildError(f"params= names {unknown} of {callees}, which {callers} call with weights of their own")
        raise BuildError(f"params= names {unknown}, which no function has; the module has {known}")
    tensors = {name: _tensor(name, value) for name, value in params.items()}
    changed = {gv: _bind(func, takers[gv], tensors) for gv, func in functions if gv in takers}
    kept = {gv: func for gv, func in mod.functions.items() if gv not in changed}
    bound = {typed(tvm.ir.GlobalVar(gv.name_hint), func.ty): func for gv, func in changed.items()}
    return copy_module(mod, {**kept, **bound})


def bind_defaults(mod: tvm.IRModule) -> tvm.IRModule:
    """Bind the default inputs of functions: they become constants, and calls no longer take them."""
    for _, func in relax_functions(mod):
        names = {param.name for param in func.params}
        defaults = func.attrs.get(DEFAULTS, {}).items()
        mod = bind_params(mod, {name: tensor for name, tensor in defaults if str(name) in names})
    return mod


def _bindable(gv: tvm.ir.GlobalVar, func: relax.Function) -> list[str]:
    """The names of the parameters of a function that can be bound."""
    inputs = int(func.attrs["num_input"]) if "num_input" in func.attrs and gv.name_hint != "main" else 0
    return [param.name for param in func.params][inputs:]


def _bind(func: relax.Function, names: list[str], tensors: Mapping[str, tvm.runtime.Tensor]) -> relax.Function:
    extents: dict[tvm.ir.Var, tvm.ir.Expr] = {}
    given = [param for param in func.params if param.name in tensors and param.name in names]
    weights = {param: _weight(param, tensors[param.name], extents) for param in given}
    kept = [param for param in func.params if param not in weights]
    func = _without_names(func, weights)
    func = _substitute(func, kept, {param: _constant(weight, param.ty) for param, weight in weights.items()})
    return _substitute(func, list(func.params), extents)


def _hint(params: object) -> str:
    if hasattr(params, "state_dict"):
        return ", such as its state_dict()"
    pairs = params if isinstance(params, list | tuple) else ()
    are_pairs = all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs)
    return ", such as {name: array for name, parameter in params}" if pairs and are_pairs else ""


def _tensor(name: str, value: Any) -> tvm.runtime.Tensor:
    """A weight as a tensor, one for all functions that take it."""
    if isinstance(value, tvm.runtime.Tensor):
        return value
    where = f"params= gives {name!r} a {type(value).__name__}, expected a tensor"
    if isinstance(value, relax.Expr) or hasattr(value, "_expr"):  # Parameter and Tensor of relax.frontend.nn
        raise BuildError(f"{where}: it describes one of a model, and holds no array")
    try:
        array = np.asarray(value)
        if array.dtype.kind in "OSUMm" or array.dtype.names is not None:
            raise TypeError(f"numpy dtype {array.dtype}")
        return tvm.runtime.tensor(array.astype(array.dtype.newbyteorder("="), copy=False))
    except Exception as error:  # each library raises its own
        raise BuildError(f"{where}: {error}") from error


def _without_names(func: relax.Function, weights: Mapping[relax.Var, tvm.runtime.Tensor]) -> relax.Function:
    """The function, with attributes that count and name the parameters that are not in `weights`."""
    kept = [number for number, param in enumerate(func.params) if param not in weights]
    if "input_names" in func.attrs:
        names = input_names(func)
        func = func.with_attr("input_names", [names[number] for number in kept])
    if "num_input" in func.attrs:
        before = int(func.attrs["num_input"])
        func = func.with_attr("num_input", sum(number < before for number in kept))
    if DEFAULTS in func.attrs:
        bound = {param.name for param in weights}
        left = {name: tensor for name, tensor in func.attrs[DEFAULTS].items() if str(name) not in bound}
        func = func.with_attr(DEFAULTS, left) if left else func.without_attr(DEFAULTS)
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


def _weight(param: relax.Var, tensor: tvm.runtime.Tensor, extents: dict[tvm.ir.Var, tvm.ir.Expr]) -> tvm.runtime.Tensor:
    """`tensor` if it has the parameter's type; symbolic extents that it settles are added to `extents`."""
    shape = tuple(int(extent) for extent in tensor.shape)
    if not _fits(shape, str(tensor.dtype), param.ty, extents):
        found = f"a tensor of shape {shape} and dtype {tensor.dtype}"
        raise BuildError(f"params= gives {param.name!r} {found}, expected {param.ty}")
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
