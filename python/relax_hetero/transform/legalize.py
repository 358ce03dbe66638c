"""Ops become call_tir of kernels, and every variable keeps its device.

Stock legalization gives a kernel's result the device of its first operand: none where there is no operand, where the
operand is a literal, or where the result is a tuple. So the types that variables had are put back afterwards.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm_ffi import structural_map

from ..errors import BuildError
from .realize_vdevice import realize_vdevice
from .rewriting import copy_module, map_bindings, op_name, relax_functions, walk_bindings
from .unique_names import with_unique_names

# Relax ops that later passes or the VM itself carry out; anything else left after legalizing has no kernel.
_KEPT_OPS = frozenset(
    """relax.call_tir relax.call_tir_inplace relax.call_tir_with_grad relax.call_dps_packed relax.call_pure_packed
    relax.call_inplace_packed relax.call_builtin_with_ctx relax.call_py_func relax.to_vdevice relax.hint_on_device
    relax.shape_of relax.tensor_to_shape relax.shape_to_tensor relax.size relax.print relax.assert_op
    relax.make_closure relax.invoke_closure relax.invoke_pure_closure relax.null_value relax.reshape
    relax.memory.view relax.memory.ensure_zero_offset""".split()
)
_SORTS_AND_SCANS = frozenset(
    f"relax.{name}" for name in ("bucketize", "sort", "argsort", "topk", "cumsum", "cumprod")
)
_KEPT_PREFIXES = ("relax.builtin.", "relax.memory.", "relax.vm.", "relax.inspect.", "relax.hetero.")


def legalize(mod: tvm.IRModule) -> tvm.IRModule:
    """Lower every op of a placed module to kernels, keeping each on its device.

    Raises
    ------
    BuildError
        An op has no kernel for its operands.
    """
    mod, variables = with_unique_names(_without_projections(mod))
    if any(op_name(binding.value) in _SORTS_AND_SCANS for _, f in relax_functions(mod) for binding in walk_bindings(f)):
        mod = relax.backend.DispatchSortScan()(mod)  # these have no legalization but a kernel per kind of target
    legal = relax.transform.LegalizeOps()(mod)
    _check(legal, variables)
    functions = dict(legal.functions.items())
    for gv, func in relax_functions(legal):
        functions[gv] = _with_types(func, variables.get(gv.name_hint, {}))
    return realize_vdevice(copy_module(legal, functions))[0]


def is_kept(name: str) -> bool:
    """Whether an op is carried out as it is, not by a kernel."""
    return name in _KEPT_OPS or name.startswith(_KEPT_PREFIXES)


def _without_projections(mod: tvm.IRModule) -> tvm.IRModule:
    """``(a, b)[0]`` becomes ``a``: FuseOps takes apart a tuple written inside an expression and loses its fields."""

    def change(binding: relax.Binding) -> relax.Binding:
        value = binding.value
        if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Tuple):
            return relax.VarBinding(binding.var, value.tuple_value.fields[value.index], binding.span)
        return binding

    functions = dict(mod.functions.items())
    functions.update({gv: map_bindings(func, change) for gv, func in relax_functions(mod)})
    return relax.transform.CanonicalizeBindings()(copy_module(mod, functions))


def _with_types(func: relax.Function, variables: dict[str, relax.Var]) -> relax.Function:
    typed: dict[relax.Var, relax.Var] = {}
    for binding in walk_bindings(func):
        var = binding.var
        old = variables.get(var.name)
        if old is not None and var.ty is not old.ty:
            typed[var] = type(var)(var.name, old.ty, var.span)
    return structural_map(func, (relax.Var, lambda var: typed.get(var, var))) if typed else func


def _check(mod: tvm.IRModule, variables: dict[str, dict[str, relax.Var]]) -> None:
    """Refuse what would fail at run time: an op that is neither a kernel nor the VM's own."""
    for gv, func in relax_functions(mod):
        for binding in walk_bindings(func):
            name = op_name(binding.value)
            if name is None or is_kept(name):
                continue
            var = variables.get(gv.name_hint, {}).get(binding.var.name, binding.var)
            operands = ", ".join(str(arg.ty) for arg in binding.value.args)
            raise BuildError(
                f"op {name} of variable {var.name!r} in function {gv.name_hint!r} has no kernel for operands "
                f"({operands}): expected an op with a legalization and operand shapes that are known (or symbolic)"
            )
