"""Entry points for repeated calls with arguments of the same shapes, which skip checks and shape computations.

Before::

    @R.function
    def main(x: R.Tensor(("n", 4), "float32"), constants):
        weight = R.call_packed("vm.builtin.tuple_getitem", constants, 0)
        shape_heap = R.call_builtin_with_ctx("vm.builtin.alloc_shape_heap", (2,))
        R.call_packed("vm.builtin.check_tensor_info", x, 2, "float32", ...)
        R.call_packed("vm.builtin.match_shape", x, shape_heap, ...)
        shape_func(shape_heap)
        size = R.call_packed("vm.builtin.make_shape", shape_heap, ...)
        storage = R.vm.alloc_storage(size, 0, "uint8", "global")
        ...

After, in addition to the unchanged `main`::

    @R.function
    def main_shared(x, constants):      # the checks, the sizes of tensors, and the constants
        ...
        return (weight, size)

    @R.function
    def main_repeated(x, weight, size):
        storage = R.vm.alloc_storage(size, 0, "uint8", "global")
        ...

The machine recognizes calls whose arguments have the devices, element types and shapes of an earlier call
(`vm.args.argument_binding`). It calls `main_shared` once for each such combination, and `main_repeated` from then on,
so that a symbolic function costs the CPU as little as a static one.

A function gets these entry points if its parameters are tensors whose sizes determine all other sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import tvm
from tvm import relax, tirx

from ...artifact.metadata import RepeatedCall
from ...transform.ir.rewriting import (
    copy_module,
    fresh_global_var,
    op_name,
    relax_functions,
    sequence,
    walk_bindings,
)
from .link import stores_extents

_HEAP, _NO_HEAP = "vm.builtin.alloc_shape_heap", "relax.null_value"
_CHECK, _MATCH = "vm.builtin.check_tensor_info", "vm.builtin.match_shape"
_SHARED = ("vm.builtin.make_prim_value", "vm.builtin.make_shape", "vm.builtin.tuple_getitem")
"""Calls whose results depend only on constants, sizes and types."""
_MAKE_TENSOR = ("relax.vm.alloc_tensor", "vm.builtin.reshape")  # calls that make a tensor of a given shape


def with_repeated_calls(mod: tvm.IRModule, names: Iterable[str]) -> tuple[tvm.IRModule, tuple[RepeatedCall, ...]]:
    """Add these entry points to a module for those of the functions `names` that can have them.

    Assumes that shapes are lowered and constants lifted.
    """
    functions, all_names = dict(mod.functions.items()), {gv.name_hint for gv in mod.functions}
    eligible, repeated_calls = set(names), []

    def add(name: str, func: relax.Function) -> str:
        gv = fresh_global_var(name, func.ty, all_names)
        functions[gv] = func.with_attr("global_symbol", gv.name_hint)
        return gv.name_hint

    for gv, func in relax_functions(mod):
        name = gv.name_hint
        parts = _split(func, mod) if name in eligible else None
        if parts is not None:
            repeated = add(f"{name}_repeated", parts.repeated())
            shares = add(f"{name}_shared", parts.shared_values()) if parts.shared else ""
            repeated_calls.append(RepeatedCall(name, repeated, shares))
    return (copy_module(mod, functions) if repeated_calls else mod), tuple(repeated_calls)


@dataclass
class _Parts:
    """The bindings of a function, split into those that repeated calls share, and the rest."""

    func: relax.Function
    shared: list[relax.Binding] = field(default_factory=list)
    rest: list[relax.Binding] = field(default_factory=list)
    used: list[relax.Var] = field(default_factory=list)  # variables of shared bindings that the rest uses

    def repeated(self) -> relax.Function:
        """The function of the tensors and the shared values."""
        body = sequence(self.rest, self.func.body.body, self.func.ret_ty)
        return relax.Function([*_tensors(self.func), *self.used], body, self.func.ret_ty, self.func.is_pure)

    def shared_values(self) -> relax.Function:
        """The function of all parameters that returns the shared values."""
        values = relax.Tuple(self.used)
        body = sequence(self.shared, values)
        return relax.Function(list(self.func.params), body, values.ty, self.func.is_pure)


def _split(func: relax.Function, mod: tvm.IRModule) -> _Parts | None:
    """Split the bindings of a function; None if a parameter is not a tensor, or sizes depend on data."""
    tensors = _tensors(func)
    if not isinstance(func.body, relax.SeqExpr) or not all(isinstance(var.ty, relax.TensorType) for var in tensors):
        return None
    parts = _Parts(func)
    shared = set(func.params) - set(tensors)
    heaps: set[relax.Var] = set()  # shape heaps
    known_shapes: set[relax.Var] = set()  # tensors of shapes that need no check
    for binding in walk_bindings(func, nested=False):
        var, value = binding.var, binding.value
        callee, operands = _callee(value), _variables(value)
        if callee in (_HEAP, _NO_HEAP):
            heaps.add(var)
        elif callee == _MATCH and value.args[0] in known_shapes and not stores_extents(value):
            continue
        elif not (
            (callee in (_CHECK, _MATCH) and operands <= shared | set(tensors))
            or (callee in _SHARED and operands <= shared)
            or _computes_sizes(value, mod, shared, heaps)
        ):
            if operands & heaps:
                return None
            if callee in _MAKE_TENSOR:
                known_shapes.add(var)
            parts.rest.append(binding)
            continue
        shared.add(var)
        parts.shared.append(binding)
    needed = set().union(_variables(func.body.body), *(_variables(binding.value) for binding in parts.rest))
    if any(var in needed and isinstance(var.ty, tvm.ir.TupleType) for var in shared):
        return None
    parts.used = [binding.var for binding in parts.shared if binding.var in needed]
    return parts


def _computes_sizes(value: relax.Expr, mod: tvm.IRModule, shared: set[relax.Var], heaps: set[relax.Var]) -> bool:
    """Return whether an expression calls a kernel on shape heaps or shared scalars."""
    if not isinstance(value, relax.Call) or not isinstance(mod.functions.get(value.op), tirx.PrimFunc):
        return False
    return all(arg in heaps or (arg in shared and isinstance(arg.ty, tvm.ir.PrimType)) for arg in value.args)


def _tensors(func: relax.Function) -> list[relax.Var]:
    """The parameters without the tuple of constants, which comes last if there is one."""
    params = list(func.params)
    return params[:-1] if params and isinstance(params[-1].ty, tvm.ir.TupleType) else params


def _callee(value: relax.Expr) -> str:
    """The name of the packed function, built-in or op that an expression calls; otherwise empty."""
    if not isinstance(value, relax.Call):
        return ""
    callee = value.args[0] if op_name(value) == "relax.call_builtin_with_ctx" else value.op
    return str(getattr(callee, "global_symbol", "")) or op_name(value) or ""


def _variables(expr: relax.Expr) -> set[relax.Var]:
    """The variables that an expression uses, including its branches, without symbols in types."""
    return set(relax.analysis.free_vars(expr))
