"""Errors about encodings say which variable they are about."""

from __future__ import annotations

from tvm import relax

from ...errors import EncodingError
from .rewriting import BindingMap


def error_context(change: BindingMap, function: str) -> BindingMap:
    """`change`, whose EncodingErrors name the binding's variable and the function where they do not yet."""

    def named(binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        try:
            return change(binding)
        except EncodingError as error:
            where = f"variable {binding.var.name!r} in function {function!r}"
            if where in str(error):
                raise
            raise EncodingError(f"{where}: {error}") from error

    return named
