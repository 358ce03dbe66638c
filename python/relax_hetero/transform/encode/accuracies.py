"""How exact a user wants which convolutions: checked when a model is compiled, noted on its module, read by name.

Names are those of variables, as `explain` shows them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import tvm
from tvm import relax

from ...encoding.encoding import ACCURACIES, DEFAULT
from ...errors import BuildError
from ..ir.module_attrs import ACCURACY
from ..ir.rewriting import relax_functions, walk_bindings

_NEAR_MISSES = 3


def with_accuracy(mod: tvm.IRModule, accuracy: Any, user: str) -> tvm.IRModule:
    """A module marked with the accuracy of its convolutions; the very module for the default.

    Parameters
    ----------
    accuracy : str or mapping of str to str
        Of all convolutions, or by names of variables, in which ``*`` stands for any letters; the last that fits holds.
    user : str
        Whose argument it is, for messages.

    Raises
    ------
    BuildError
        For another accuracy. Names are checked when convolutions get layouts (`Accuracies`).
    """
    pairs = list(accuracy.items()) if isinstance(accuracy, Mapping) else [("*", accuracy)]
    for name, value in pairs:
        if value not in ACCURACIES:
            of = "" if name == "*" else f" of {name!r}"
            raise BuildError(f"{user}: accuracy{of} is {value!r}, expected one of {', '.join(map(repr, ACCURACIES))}")
    if all(value == DEFAULT for _, value in pairs):
        return mod
    return mod.with_attr(ACCURACY, [[str(name), value] for name, value in pairs])


class Accuracies:
    """The accuracy of each convolution of a module.

    Raises
    ------
    BuildError
        For a name that no variable has; it lists near names.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        marked = mod.attrs[ACCURACY] if mod.attrs and ACCURACY in mod.attrs else []
        self._pairs = [(str(name), str(value)) for name, value in marked]
        if any(name != "*" for name, _ in self._pairs):
            self._check(_variables(mod))

    def of(self, name: str) -> str:
        """The accuracy of the convolution that a variable holds."""
        return next((value for pattern, value in reversed(self._pairs) if fnmatchcase(name, pattern)), DEFAULT)

    def _check(self, names: list[str]) -> None:
        for pattern, _ in self._pairs:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, n=_NEAR_MISSES)
                hint = f"near names: {', '.join(map(repr, near))}" if near else "and no name is near it"
                raise BuildError(f"accuracy has {pattern!r}, which names no variable; {hint}")


def _variables(mod: tvm.IRModule) -> list[str]:
    names: dict[str, None] = {}
    for _, func in relax_functions(mod):
        names.update(dict.fromkeys(b.var.name for b in walk_bindings(func) if isinstance(b, relax.VarBinding)))
    return list(names)
