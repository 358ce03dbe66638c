"""Names of ops, variables and functions that a user wants left alone, checked against a module."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import tvm

from ...errors import BuildError
from ..ir.rewriting import op_name, relax_functions, walk_bindings

_NEAR_MISSES = 3


class NameFilter:
    """Functions and variables of a module that are kept as they are.

    Parameters
    ----------
    mod : tvm.IRModule
    patterns : sequence of str
        Names of ops (``relax.nn.softmax``, or ``nn.softmax``), of variables, parameters included, and of functions.
        ``*`` stands for any letters; a name that is there letter by letter is meant itself.
    user : str
        Whose argument it is, for messages.

    Raises
    ------
    BuildError
        For what is no sequence of strings, or a pattern that matches nothing; it lists near names.
    """

    def __init__(self, mod: tvm.IRModule, patterns: Sequence[str], user: str) -> None:
        self._matching: set[str] = set()
        if not isinstance(patterns, Iterable):
            raise BuildError(f"{user}: keep is {patterns!r}, expected names of ops, variables and functions")
        found = [patterns] if isinstance(patterns, str) else list(patterns)
        if not found:
            return
        names = _names(mod)
        ops = [name for name in tvm.ir.Op.list_op_names() if name.startswith("relax.")]
        known = {name: name for name in [*ops, *names]} | {name.removeprefix("relax."): name for name in ops}
        for pattern in found:
            if not isinstance(pattern, str):
                raise BuildError(f"{user}: keep has {pattern!r}, expected names of ops, variables and functions")
            matching = [pattern] if pattern in known else [name for name in known if fnmatchcase(name, pattern)]
            if not matching:
                near = difflib.get_close_matches(pattern, known, n=_NEAR_MISSES)
                hint = f"near names: {', '.join(map(repr, near))}" if near else "and no name is near it"
                raise BuildError(f"{user}: keep has {pattern!r}, which names no op, variable or function; {hint}")
            self._matching.update(known[name] for name in matching)

    def has(self, name: str | None) -> bool:
        """Return whether an op, a variable or a function of this name is kept."""
        return name in self._matching


def _names(mod: tvm.IRModule) -> list[str]:
    """Names of functions and variables, in order."""
    names: dict[str, None] = {}
    for gv, func in relax_functions(mod):
        names.update(dict.fromkeys([gv.name_hint, *(param.name for param in func.params)]))
        names.update(dict.fromkeys(binding.var.name for binding in walk_bindings(func)))
    return list(names)


def excluded_call(excluded: NameFilter, var: tvm.ir.Var, value: tvm.ir.Expr) -> bool:
    """Return whether a binding is kept: by the name of its variable, or of its op."""
    return excluded.has(var.name) or excluded.has(op_name(value))
