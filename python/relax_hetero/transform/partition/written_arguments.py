"""Parameters that the functions of a module may write to, by in-place ops.

A variable may alias a parameter if it is one, a view, field, alias or match_cast of one, or a result of a branch or of
a function call that may return one. The result of a transfer does not: in a module that writes in place it is a new
tensor (`lower_transfers`).
"""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import relax

from ...op.cached_attention import CACHED_ATTENTION, PAGES
from ..ir.blocks import used_vars
from ..ir.op_names import CALL_TIR_INPLACE, IN_PLACE
from ..ir.rewriting import op_name, relax_functions, walk_bindings, with_functions
from ..ir.tensor_aliases import is_view

WRITTEN = "relax_hetero.written"  # function attribute: the indices of the parameters that it may write to
_KERNELS = ("relax.call_tir", "relax.call_dps_packed", "relax.call_tir_with_grad")


def annotate_written(mod: tvm.IRModule) -> tvm.IRModule:
    """Annotate functions with the parameters that they may write to, which lowering hides."""
    functions, written = relax_functions(mod), written_arguments(mod)
    changed = {gv: func.with_attr(WRITTEN, written[gv.name_hint]) for gv, func in functions if written[gv.name_hint]}
    return with_functions(mod, changed)


def written_arguments(mod: tvm.IRModule) -> dict[str, list[int]]:
    """Indices of the parameters that each function may write to."""
    functions = {gv.name_hint: func for gv, func in relax_functions(mod)}
    written: dict[str, list[int]] = {name: [] for name in functions}
    while True:
        writers = {name for name, numbers in written.items() if numbers}
        updated = {name: _written(func, writers) for name, func in functions.items()}
        if updated == written:
            return written
        written = updated


def _written(func: relax.Function, writers: set[str]) -> list[int]:
    aliases: dict[relax.Var, set[relax.Var]] = {param: {param} for param in func.params}
    written: set[relax.Var] = set()
    for binding in _until_fixpoint(func):
        value = binding.value
        aliases.setdefault(binding.var, set()).update(*(aliases.get(var, ()) for var in _aliased_by(value)))
        for var in overwritten(value, writers):
            written |= aliases.get(var, set())
    return [number for number, param in enumerate(func.params) if param in written]


def _until_fixpoint(func: relax.Function) -> Iterator[relax.Binding]:
    """All bindings, repeated often enough for a fixpoint: those of branches and local functions come last."""
    bindings = list(walk_bindings(func.body))
    for _ in range(1 + sum(isinstance(b.value, (relax.If, relax.Function)) for b in bindings)):
        yield from bindings


def _aliased_by(value: relax.Expr) -> list[relax.Var]:
    """The variables that a value may alias."""
    name = op_name(value) or ""
    if isinstance(value, relax.If):
        return [var for branch in (value.true_branch, value.false_branch) for var in used_vars(branch.body)]
    if name in IN_PLACE:
        return overwritten(value, set())
    if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
        is_fresh = not (is_view(value) or name.startswith(("relax.call_", "relax.invoke_")))
        return [] if is_fresh or name in _KERNELS else used_vars(value)
    return used_vars(value)


def inplace_operands(call: relax.Call) -> tuple[list[relax.Expr], list[int]]:
    """The operands of an in-place call, and for each result the index of the operand that it overwrites, or -1."""
    name = op_name(call)
    if name == CACHED_ATTENTION:
        return list(call.args), [-1, PAGES]
    operands = call.args[1].fields if name == CALL_TIR_INPLACE else call.args[1:]
    return list(operands), [int(index) for index in call.attrs.inplace_indices]


def overwritten(value: relax.Expr, writers: set[str]) -> list[relax.Var]:
    """The variables whose memory a value may write to."""
    if op_name(value) in IN_PLACE:
        operands, indices = inplace_operands(value)
        return [operands[index] for index in indices if index >= 0 and isinstance(operands[index], relax.Var)]
    if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar):
        return used_vars(value) if value.op.name_hint in writers else []
    is_closure = isinstance(value, relax.Call) and isinstance(value.op, relax.Var)
    return used_vars(value) if is_closure and writers else []
