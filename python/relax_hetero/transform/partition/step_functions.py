"""Functions of a part of another function's bindings."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_map

from ..ir.blocks import renamed
from ..ir.rewriting import typed


def step_function(
    bindings: Sequence[relax.VarBinding], reads: Sequence[relax.Var], makes: Sequence[relax.Var]
) -> tuple[relax.Function, tuple[str, ...]]:
    """A function of some bindings of another one.

    Parameters
    ----------
    bindings : sequence of relax.VarBinding
        In order, without effects.
    reads, makes : sequence of relax.Var
        What becomes its parameters and its results: a tuple unless it is one.

    Returns
    -------
    relax.Function
        Private. Its last parameter is a shape, if there are symbolic sizes that its tensors do not give.
    tuple of str
        The names of these sizes.
    """
    names: dict[relax.Var, relax.Expr] = {var: relax.Var(var.name, var.ty) for var in reads}
    params = list(names.values())
    is_dataflow = not any(isinstance(binding.value, relax.If) for binding in bindings)
    copies: list[relax.Binding] = []
    for binding in bindings:
        copy = renamed(binding, names)
        is_local = is_dataflow and binding.var not in makes
        var = (relax.DataflowVar if is_local else relax.Var)(binding.var.name, binding.var.ty)
        names[binding.var] = var
        copies.append(relax.VarBinding(var, copy.value, binding.span))
    results = [names[var] for var in makes]
    value = results[0] if len(results) == 1 else relax.Tuple(results)
    block = (relax.DataflowBlock if is_dataflow else relax.BindingBlock)(copies)
    body = typed(relax.SeqExpr([block], value), value.ty)
    func = relax.Function(params, body, value.ty, is_pure=True)
    sizes = sorted(relax.analysis.free_symbolic_vars(func), key=lambda var: str(var.name))
    if sizes:
        func = relax.Function([*params, relax.Var("sizes", relax.ShapeType(sizes))], body, value.ty, is_pure=True)
    return _with_own_sizes(func), tuple(str(var.name) for var in sizes)


def _with_own_sizes(func: relax.Function) -> relax.Function:
    """The function with symbolic sizes that no other function has, as TVM wants them."""
    fresh = {var: tirx.Var(var.name, var.ty.dtype) for var in relax.analysis.defined_symbolic_vars(func)}
    return structural_map(func, (tvm.ir.Var, lambda var: fresh.get(var, var))) if fresh else func
