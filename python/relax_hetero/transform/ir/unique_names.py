"""Variables of a function get names that are unique in it, so that a pass can find them again by name."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm_ffi import structural_map

from .rewriting import copy_module, relax_functions, walk_bindings


def with_unique_names(mod: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, dict[str, relax.Var]]]:
    """Number the parameters and bindings of every Relax function that share a name with an earlier one.

    Returns
    -------
    mod : tvm.IRModule
    variables : dict
        Function name to new variable name to the variable as it was.
    """
    functions = dict(mod.functions.items())
    variables: dict[str, dict[str, relax.Var]] = {}
    for gv, func in relax_functions(mod):
        functions[gv], variables[gv.name_hint] = _rename(func)
    return copy_module(mod, functions), variables


def _rename(func: relax.Function) -> tuple[relax.Function, dict[str, relax.Var]]:
    old_of: dict[str, relax.Var] = {}
    renamed: dict[relax.Var, relax.Var] = {}
    counts: dict[str, int] = {}
    for var in (*func.params, *(binding.var for binding in walk_bindings(func))):
        name = var.name
        while name in old_of:
            counts[var.name] = counts.get(var.name, 0) + 1
            name = f"{var.name}_{counts[var.name]}"
        old_of[name] = var
        if name != var.name:
            renamed[var] = type(var)(name, var.ty, var.span)
    if not renamed:
        return func, old_of
    return structural_map(func, (relax.Var, lambda var: renamed.get(var, var))), old_of
