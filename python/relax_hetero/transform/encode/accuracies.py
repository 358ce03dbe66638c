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
from ...op.encoded import UNSET
from ..ir.module_attrs import ACCURACY
from ..ir.rewriting import op_name, relax_functions, walk_bindings
from .encoded_convolutions import CONV_OPS

_NEAR_MISSES = 3


def with_accuracy(mod: tvm.IRModule, accuracy: Any, user: str) -> tvm.IRModule:
    """A module marked with the accuracy of its convolutions; the very module for the default.

    Parameters
    ----------
    accuracy : str or mapping of str to str
        Accuracy of all convolutions, or by names of variables, in which ``*`` stands for any letters; the last that
        fits holds.
    user : str
        Whose argument it is, for messages.

    Raises
    ------
    BuildError
        For another accuracy.
    """
    pairs = list(accuracy.items()) if isinstance(accuracy, Mapping) else [("*", accuracy)]
    for name, value in pairs:
        if value not in ACCURACIES:
            of = "" if name == "*" else f" of {name!r}"
            raise BuildError(f"{user}: accuracy{of} is {value!r}, expected one of {', '.join(map(repr, ACCURACIES))}")
    if all(pair == ("*", DEFAULT) for pair in pairs):
        return mod  # names are checked where convolutions are known, whatever is asked for them
    return mod.with_attr(ACCURACY, [[str(name), value] for name, value in pairs])


class Accuracies:
    """The accuracy of each convolution of a module.

    Raises
    ------
    BuildError
        For a name that no convolution has; it lists near names.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        marked = mod.attrs[ACCURACY] if mod.attrs and ACCURACY in mod.attrs else []
        self._pairs = [(str(name), str(value)) for name, value in marked]
        if any(name != "*" for name, _ in self._pairs):
            self._check(_convolutions(mod))

    def of(self, name: str) -> str:
        """The accuracy of the convolution that a variable holds."""
        return next((value for pattern, value in reversed(self._pairs) if fnmatchcase(name, pattern)), DEFAULT)

    def _check(self, names: list[str]) -> None:
        for pattern, _ in self._pairs:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, n=_NEAR_MISSES)
                hint = f"near names: {', '.join(map(repr, near))}" if near else "and no name is near it"
                raise BuildError(f"accuracy has {pattern!r}, which names no convolution; {hint}")


def _convolutions(mod: tvm.IRModule) -> list[str]:
    """Names of variables that hold convolutions, stock ones or the results of encoded ones."""
    ops = {*CONV_OPS, UNSET}
    bindings = (binding for _, func in relax_functions(mod) for binding in walk_bindings(func))
    names = [b.var.name for b in bindings if isinstance(b, relax.VarBinding) and op_name(b.value) in ops]
    return list(dict.fromkeys(names))
