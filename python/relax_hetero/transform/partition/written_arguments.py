"""Which parameters of its functions a module may write to, by ops that work in place.

A variable may be the memory of a parameter if it is one, shows one (a view, a field, an alias, a checked shape), comes
out of a branch that gives one, or of a function that was given one. A transfer is none: in a module that writes in
place it makes a new tensor (`lower_transfers`).
"""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import relax

from ...op.cached_attention import CACHED_ATTENTION, PAGES
from ..ir.blocks import used_vars
from ..ir.op_names import CALL_TIR_INPLACE, IN_PLACE
from ..ir.rewriting import copy_module, op_name, relax_functions, walk_bindings
from ..ir.tensor_aliases import is_view

WRITTEN = "relax_hetero.written"
"""On a Relax function: the numbers of the parameters that it may write to."""
_KERNELS = ("relax.call_tir", "relax.call_dps_packed", "relax.call_tir_with_grad")


def annotate_written(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with the parameters that functions may write to noted on them: lowering hides which they are."""
    functions = dict(mod.functions.items())
    written = written_arguments(mod)
    for gv, func in relax_functions(mod):
        if written[gv.name_hint]:
            functions[gv] = func.with_attr(WRITTEN, written[gv.name_hint])
    return copy_module(mod, functions)


def written_arguments(mod: tvm.IRModule) -> dict[str, list[int]]:
    """Numbers of the parameters that each function may write to."""
    functions = {gv.name_hint: func for gv, func in relax_functions(mod)}
    found: dict[str, list[int]] = {name: [] for name in functions}
    while True:
        writers = {name for name, numbers in found.items() if numbers}
        now = {name: _written(func, writers) for name, func in functions.items()}
        if now == found:
            return found
        found = now


def _written(func: relax.Function, writers: set[str]) -> list[int]:
    shown: dict[relax.Var, set[relax.Var]] = {param: {param} for param in func.params}
    written: set[relax.Var] = set()
    for binding in _in_order(func):
        value = binding.value
        shown.setdefault(binding.var, set()).update(*(shown.get(var, ()) for var in _shown_by(value)))
        for var in overwritten(value, writers):
            written |= shown.get(var, set())
    return [number for number, param in enumerate(func.params) if param in written]


def _in_order(func: relax.Function) -> Iterator[relax.Binding]:
    """Bindings of branches and local functions come last, so all are visited until nothing new can be found."""
    bindings = list(walk_bindings(func.body))
    for _ in range(1 + sum(isinstance(b.value, (relax.If, relax.Function)) for b in bindings)):
        yield from bindings


def _shown_by(value: relax.Expr) -> list[relax.Var]:
    """The variables whose memory a value may be."""
    name = op_name(value) or ""
    if isinstance(value, relax.If):
        return [var for branch in (value.true_branch, value.false_branch) for var in used_vars(branch.body)]
    if name in IN_PLACE:
        return overwritten(value, set())
    if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
        is_fresh = not (is_view(value) or name.startswith(("relax.call_", "relax.invoke_")))
        return [] if is_fresh or name in _KERNELS else used_vars(value)
    return used_vars(value)


def write_places(call: relax.Call) -> tuple[list[relax.Expr], list[int]]:
    """The operands of a call that works in place, and for each of its results the one it is written over, or -1."""
    name = op_name(call)
    if name == CACHED_ATTENTION:
        return list(call.args), [-1, PAGES]
    operands = call.args[1].fields if name == CALL_TIR_INPLACE else call.args[1:]
    return list(operands), [int(index) for index in call.attrs.inplace_indices]


def overwritten(value: relax.Expr, writers: set[str]) -> list[relax.Var]:
    """The variables whose memory a value may write to."""
    if op_name(value) in IN_PLACE:
        operands, places = write_places(value)
        return [operands[place] for place in places if place >= 0 and isinstance(operands[place], relax.Var)]
    if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar):
        return used_vars(value) if value.op.name_hint in writers else []
    is_closure = isinstance(value, relax.Call) and isinstance(value.op, relax.Var)
    return used_vars(value) if is_closure and writers else []
