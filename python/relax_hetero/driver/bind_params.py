"""Binding of weights by name: parameters become constants on their parameters' devices.

Functions that share a weight share its constant, so that it is packed and stored once. TVM's BindParams makes constants
without a device, whose calls then fail type checks.
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
    """Replace parameters of all functions by `params`; symbolic extents that these determine become numbers.

    A function's parameters are those after its ``num_input``, or all without that attribute; ``main``'s inputs can be
    bound, too. Functions that other functions call are not changed: their callers pass them weights. Raises BuildError
    if they are not a mapping from names, a name is unknown, or a value does not fit its parameter's type.
    """
    if not isinstance(params, Mapping):
        kind = type(params).__name__
        raise BuildError(f"params= is a {kind}, expected a mapping from names of parameters to tensors{_hint(params)}")
    if not params:
        return mod
    functions = relax_functions(mod)
    called = {callee for _, func in functions for callee in relax.analysis.all_global_vars(func)}
    bindable = {gv: names for gv, func in functions if gv not in called and (names := _bindable(gv, func))}
    names_in_module = list(dict.fromkeys(name for names in bindable.values() for name in names))
    unknown = [name for name in params if name not in names_in_module]
    if unknown:
        callees = [gv.name_hint for gv, func in functions if gv in called and set(unknown) & {*_bindable(gv, func)}]
        if callees:
            callers = [gv.name_hint for gv, func in functions if called & {*relax.analysis.all_global_vars(func)}]
            raise BuildError(f"params= names {unknown} of {callees}, which {callers} call with weights of their own")
        raise BuildError(f"params= names {unknown}, which no function has; the module has {names_in_module}")
    tensors = {name: _tensor(name, value) for name, value in params.items()}
    changed = {gv: _bind(func, bindable[gv], tensors) for gv, func in functions if gv in bindable}
    unchanged = {gv: func for gv, func in mod.functions.items() if gv not in changed}
    bound = {typed(tvm.ir.GlobalVar(gv.name_hint), func.ty): func for gv, func in changed.items()}
    return copy_module(mod, {**unchanged, **bound})


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
    params = [param for param in func.params if param.name in tensors and param.name in names]
    weights = {param: _weight(param, tensors[param.name], extents) for param in params}
    remaining = [param for param in func.params if param not in weights]
    func = _without_names(func, weights)
    func = _substitute(func, remaining, {param: _constant(weight, param.ty) for param, weight in weights.items()})
    return _substitute(func, list(func.params), extents)


def _hint(params: object) -> str:
    if hasattr(params, "state_dict"):
        return ", such as its state_dict()"
    pairs = params if isinstance(params, list | tuple) else ()
    are_pairs = all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs)
    return ", such as {name: array for name, parameter in params}" if pairs and are_pairs else ""


def _tensor(name: str, value: Any) -> tvm.runtime.Tensor:
    """A weight as a tensor that all functions share."""
    if isinstance(value, tvm.runtime.Tensor):
        return value
    where = f"params= gives {name!r} a {type(value).__name__}, expected a tensor"
    if isinstance(value, relax.Expr) or hasattr(value, "_expr"):  # relax.frontend.nn's Parameter and Tensor
        raise BuildError(f"{where}: it describes one of a model, and holds no array")
    try:
        array = np.asarray(value)
        if array.dtype.kind in "OSUMm" or array.dtype.names is not None:
            raise TypeError(f"numpy dtype {array.dtype}")
        return tvm.runtime.tensor(array.astype(array.dtype.newbyteorder("="), copy=False))
    except Exception as error:  # libraries raise various exceptions
        raise BuildError(f"{where}: {error}") from error


def _without_names(func: relax.Function, weights: Mapping[relax.Var, tvm.runtime.Tensor]) -> relax.Function:
    """Remove the parameters in `weights` from the attributes that count and name parameters."""
    remaining = [number for number, param in enumerate(func.params) if param not in weights]
    if "input_names" in func.attrs:
        names = input_names(func)
        func = func.with_attr("input_names", [names[number] for number in remaining])
    if "num_input" in func.attrs:
        before = int(func.attrs["num_input"])
        func = func.with_attr("num_input", sum(number < before for number in remaining))
    if DEFAULTS in func.attrs:
        bound = {param.name for param in weights}
        unbound = {name: tensor for name, tensor in func.attrs[DEFAULTS].items() if str(name) not in bound}
        func = func.with_attr(DEFAULTS, unbound) if unbound else func.without_attr(DEFAULTS)
    if DONATED in func.attrs:
        donated = [int(number) for number in func.attrs[DONATED]]
        func = func.with_attr(DONATED, [remaining.index(number) for number in donated if number in remaining])
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
    """Check a tensor against a parameter's type; adds the symbolic extents that it determines to `extents`."""
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
    for extent, actual in zip(expected, shape, strict=True):
        if isinstance(extent, tvm.ir.Var):
            extent = extents.setdefault(extent, tirx.IntImm("int64", actual))
        if isinstance(extent, tirx.IntImm) and int(extent.value) != actual:
            return False
    return True
