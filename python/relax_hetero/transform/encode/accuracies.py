"""Accuracies of convolutions that a user requires: checked and stored on the module, and read by a variable's name.

The names of variables are those that `explain` shows.
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


def with_accuracy(mod: tvm.IRModule, accuracy: Any, user: str) -> tvm.IRModule:
    """The module with the accuracy of its convolutions as an attribute; the same module for the default.

    `accuracy`: accuracy of all convolutions, or by patterns of variable names with ``*``; the last match takes
    precedence. `user`: function that takes the argument, for messages. Raises BuildError for an unknown accuracy.
    """
    pairs = list(accuracy.items()) if isinstance(accuracy, Mapping) else [("*", accuracy)]
    for name, value in pairs:
        if value not in ACCURACIES:
            key = "" if name == "*" else f" of {name!r}"
            raise BuildError(f"{user}: accuracy{key} is {value!r}, expected one of {', '.join(map(repr, ACCURACIES))}")
    if all(pair == ("*", DEFAULT) for pair in pairs):
        return mod
    return mod.with_attr(ACCURACY, [[str(name), value] for name, value in pairs])


class Accuracies:
    """The accuracy of each convolution of a module.

    Raises BuildError for a pattern that matches no convolution; the message lists near names.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        entries = mod.attrs[ACCURACY] if mod.attrs and ACCURACY in mod.attrs else []
        self._pairs = [(str(name), str(value)) for name, value in entries]
        if any(name != "*" for name, _ in self._pairs):
            self._check(_convolutions(mod))

    def of(self, name: str) -> str:
        """The accuracy of the convolution bound to a variable."""
        return next((value for pattern, value in reversed(self._pairs) if fnmatchcase(name, pattern)), DEFAULT)

    def _check(self, names: list[str]) -> None:
        for pattern, _ in self._pairs:
            if not any(fnmatchcase(name, pattern) for name in names):
                near_names = difflib.get_close_matches(pattern, names)
                hint = f"near names: {', '.join(map(repr, near_names))}" if near_names else "and no name is near it"
                raise BuildError(f"accuracy has {pattern!r}, which names no convolution; {hint}")


def _convolutions(mod: tvm.IRModule) -> list[str]:
    """Names of variables that hold convolutions, stock ones or the results of encoded ones."""
    ops = {*CONV_OPS, UNSET}
    bindings = (binding for _, func in relax_functions(mod) for binding in walk_bindings(func))
    names = [b.var.name for b in bindings if isinstance(b, relax.VarBinding) and op_name(b.value) in ops]
    return list(dict.fromkeys(names))
