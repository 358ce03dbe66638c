"""Extents as the text of signatures and commands (the grammar of `artifact.dims.parse_dim`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx

from ...artifact.signature import Dim

_INFIX: tuple[tuple[type[Any], str], ...] = (
    (tirx.Add, "+"),
    (tirx.Sub, "-"),
    (tirx.Mul, "*"),
    (tirx.FloorDiv, "//"),
    (tirx.FloorMod, "%"),
)
_PREFIX: tuple[tuple[type[Any], str], ...] = ((tirx.Min, "min"), (tirx.Max, "max"))


class NoTextError(Exception):
    """An extent that the small expression language cannot say."""


def dim_text(expr: Any, names: Mapping[Any, str] | None = None) -> Dim:
    """One extent: an int, or an expression over symbolic variables; NoTextError where it is beyond the grammar.

    Variables are written by their own names, where `names` has no other.
    """
    if isinstance(expr, int):
        return expr
    if isinstance(expr, tirx.IntImm):
        return int(expr.value)
    if isinstance(expr, tirx.Var):
        return (names or {}).get(expr, str(expr.name))
    if isinstance(expr, tirx.Cast):
        return dim_text(expr.value, names)
    for node, symbol in _INFIX:
        if isinstance(expr, node):
            return f"({dim_text(expr.a, names)} {symbol} {dim_text(expr.b, names)})"
    for node, symbol in _PREFIX:
        if isinstance(expr, node):
            return f"{symbol}({dim_text(expr.a, names)}, {dim_text(expr.b, names)})"
    raise NoTextError
