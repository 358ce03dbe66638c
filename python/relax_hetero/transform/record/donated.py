"""Donated parameters: inputs that a function may overwrite, so that results take their memory.

A function attribute has their indices. Only the sole user of a donated parameter overwrites it: a command buffer
(`form_command_buffers`), or a kernel outside of command buffers (`update_donated`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import tvm
from tvm import relax

from ...errors import BuildError
from ..ir.blocks import Block, used_vars
from ..ir.module_attrs import is_lowered
from ..ir.rewriting import copy_module, relax_functions, walk_bindings, with_functions

DONATED = "relax_hetero.donated"  # function attribute: the indices of the parameters that it may overwrite


def with_donated(mod: tvm.IRModule, donate: Sequence[str] | Mapping[str, Sequence[str]]) -> tvm.IRModule:
    """Annotate functions with donated parameters.

    `donate`: names of inputs; of ``main`` if no function is named. Raises BuildError for a function or an input that
    the module lacks, an input that is not a tensor or is set once for all calls, a function that other functions call,
    a module that is lowered already.
    """
    by_function = dict(donate) if isinstance(donate, Mapping) else {"main": donate}
    if is_lowered(mod):
        raise BuildError("donate= needs a module that is not lowered: a lowered one has its results elsewhere already")
    functions = {gv.name_hint: (gv, func) for gv, func in relax_functions(mod)}
    changed = dict(mod.functions.items())
    for name, inputs in by_function.items():
        if name not in functions:
            raise BuildError(f"donate= names function {name!r}, which the module lacks; it has {sorted(functions)}")
        if isinstance(inputs, str) or not all(isinstance(item, str) for item in inputs):
            raise BuildError(f"donate= gives {inputs!r} for function {name!r}, expected a list of input names")
        gv, func = functions[name]
        callers = [caller for caller, (_, f) in functions.items() if gv in relax.analysis.all_global_vars(f)]
        if callers:
            raise BuildError(
                f"donate= names inputs of function {name!r}, which {callers} call with values of their own"
            )
        numbers = [_number(func, name, item) for item in dict.fromkeys(inputs)]
        changed[gv] = func.with_attr(DONATED, numbers)
    return copy_module(mod, changed)


def without_donated(mod: tvm.IRModule) -> tvm.IRModule:
    """Remove the annotations of donated parameters."""
    functions = {gv: func.without_attr(DONATED) for gv, func in relax_functions(mod) if DONATED in func.attrs}
    return with_functions(mod, functions)


def _number(func: relax.Function, function: str, name: str) -> int:
    names = input_names(func)
    where = f"donate= names {name!r}"
    if name not in names:
        raise BuildError(f"{where}, which function {function!r} lacks; it has {names}")
    number = names.index(name)
    ty = func.params[number].ty
    if not isinstance(ty, relax.TensorType):
        raise BuildError(f"{where} of function {function!r}, which is {ty}, expected a tensor")
    if number >= int(func.attrs.get("num_input", len(names))):
        raise BuildError(f"{where} of function {function!r}, a parameter that set_params gives once for all calls")
    return number


def input_names(func: relax.Function) -> list[str]:
    """Names of a function's parameters for callers; names in the IR if a foreign pass has removed parameters."""
    names = [str(name) for name in func.attrs.get("input_names", [])]
    if len(names) > len(func.params):
        names = []
    return names + [param.name for param in func.params[len(names) :]]


def donated(func: relax.Function) -> list[relax.Var]:
    """The parameters that a function may overwrite."""
    return [func.params[int(number)] for number in func.attrs.get(DONATED, ())]


class DonatedVariables:
    """Donated parameters of a function, and their uses."""

    def __init__(self, func: relax.Function) -> None:
        self._donated = donated(func)
        self._uses: Counter[relax.Var] = Counter()
        if self._donated:
            for binding in walk_bindings(func.body):
                self._uses.update(used_vars(binding.value))

    def of(self, block: Block) -> frozenset[relax.Var]:
        """The donated parameters that a block may overwrite: nothing outside of it uses them."""
        return frozenset(
            var
            for var in self._donated
            if var not in block.used_later and self._uses[var] == len(block.users.get(var, ()))
        )
