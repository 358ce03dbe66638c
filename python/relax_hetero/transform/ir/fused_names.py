"""Names of FuseOps' results: a fused call's result gets back the name that its value had before.

Before::

    lv: R.Tensor((4,), "float32") = cls.fused_exp_add(x)      # FuseOps calls every result "lv", "lv1", ...

After::

    z: R.Tensor((4,), "float32") = cls.fused_exp_add(x)       # before FuseOps: z = add(exp(x), x)

Readers, and `remarks.kernel_nodes`, use the name to identify the value of the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, TypeAlias

import tvm
from tvm import relax

from ...tir.core.walks import replaced
from .rewriting import handle, is_tensor_constant, relax_functions, walk_bindings, with_functions

_Value: TypeAlias = "int | str | tuple[_Value, ...] | None"
"""A value's number, a constant's text, or a tuple's fields; None for shapes and numbers, for which a fused function has
its own symbols."""


Inside: TypeAlias = "dict[tuple[str, str], tuple[str, ...]]"
"""Function and variable to the names of the values that its fused kernel computes, in order."""


def with_fused_names(before: tvm.IRModule, after: tvm.IRModule) -> tuple[tvm.IRModule, Inside]:
    """The module `after` FuseOps with the names of the module `before` it, and the names of values in kernels."""
    old = {gv.name_hint: func for gv, func in relax_functions(before)}
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    inside: Inside = {}
    for gv, func in relax_functions(after):
        if gv.name_hint in old:
            values = _Values(old[gv.name_hint])
            functions[gv] = replaced(func, values.names_in(func, after))
            inside.update(((gv.name_hint, name), within) for name, within in values.inside.items())
    return with_functions(after, functions), inside


class _Values:
    """The values of a function, numbered by their call: two calls of one callee on the same values are equal."""

    def __init__(self, func: relax.Function) -> None:
        self.inside: dict[str, tuple[str, ...]] = {}
        self._names = [var.name for var in func.params]
        self._calls: dict[Any, deque[int]] = {}
        env: dict[relax.Var, _Value] = {var: number for number, var in enumerate(func.params)}
        for binding in walk_bindings(func):
            if isinstance(binding.value, relax.Call):
                number = len(self._names)
                self._names.append(binding.var.name)
                self._calls.setdefault(_key(binding.value, env), deque()).append(number)
                env[binding.var] = number
            else:
                env[binding.var] = _value(binding.value, env)

    def names_in(self, func: relax.Function, mod: tvm.IRModule) -> dict[relax.Var, relax.Var]:
        """New variables for those of a fused function."""
        env: dict[relax.Var, _Value] = {var: number for number, var in enumerate(func.params)}
        names: dict[relax.Var, relax.Var] = {}
        for binding in walk_bindings(func):
            var, value = binding.var, binding.value
            env[var] = number = self._result(value, env, mod)
            if isinstance(number, int) and self._names[number] != var.name:
                names[var] = type(var)(self._names[number], var.ty, var.span)
        return names

    def _result(self, value: relax.Expr, env: Mapping[relax.Var, _Value], mod: tvm.IRModule) -> _Value:
        if not isinstance(value, relax.Call):
            return _value(value, env)
        callee = mod.functions.get(value.op) if isinstance(value.op, tvm.ir.GlobalVar) else None
        if isinstance(callee, relax.Function) and callee.attrs.get("Primitive"):
            inner = {param: _value(arg, env) for param, arg in zip(callee.params, value.args, strict=True)}
            for binding in walk_bindings(callee):
                inner[binding.var] = self._result(binding.value, inner, mod)
            result = _value(callee.body.body, inner)
            if isinstance(result, int):
                numbers = [inner[binding.var] for binding in walk_bindings(callee)]
                self.inside[self._names[result]] = tuple(self._names[n] for n in numbers if isinstance(n, int))
            return result
        equal_calls = self._calls.get(_key(value, env))  # in program order
        return equal_calls.popleft() if equal_calls else None


def _key(call: relax.Call, env: Mapping[relax.Var, _Value]) -> Any:
    callee = call.op.name_hint if isinstance(call.op, tvm.ir.GlobalVar) else getattr(call.op, "name", str(call.op))
    return callee, tuple(_value(arg, env) for arg in call.args)


def _value(expr: Any, env: Mapping[relax.Var, _Value]) -> _Value:
    if isinstance(expr, relax.Var):
        return env.get(expr)
    if isinstance(expr, tvm.ir.GenericConst):
        return f"constant {handle(expr.value) if is_tensor_constant(expr) else expr.value}"  # or an element type
    if isinstance(expr, tvm.ir.GlobalVar):
        return str(expr.name_hint)
    if isinstance(expr, relax.Tuple):
        return tuple(_value(field, env) for field in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        fields = _value(expr.tuple_value, env)
        return fields[expr.index] if isinstance(fields, tuple) and expr.index < len(fields) else None
    return None
