"""Extents of tensor types as ints, as symbols of kernel problems, and as text in signatures and commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import StructuralKey

from ...artifact.signature import Dim
from ...tir.core.builder import plain_extent


def known_extents(ty: tvm.ir.Type) -> list[Any] | None:
    """The extents of a tensor type, ints where they are numbers; None if the type lacks them."""
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr) or ty.dtype is None:
        return None
    return [plain_extent(extent) for extent in ty.shape.values]


class Symbols:
    """Names of symbolic extents, in order of appearance; equal expressions have one name."""

    def __init__(self) -> None:
        self._names: dict[StructuralKey, str] = {}

    def dim(self, extent: tvm.tirx.PrimExpr | int) -> Dim:
        """An extent of a problem: an int, or the name of a symbol."""
        if isinstance(extent, (int, tirx.IntImm)):
            return int(extent)
        return self._names.setdefault(StructuralKey(extent), f"s{len(self._names)}")


_INFIX: tuple[tuple[type[Any], str], ...] = (
    (tirx.Add, "+"),
    (tirx.Sub, "-"),
    (tirx.Mul, "*"),
    (tirx.FloorDiv, "//"),
    (tirx.FloorMod, "%"),
)
_PREFIX: tuple[tuple[type[Any], str], ...] = ((tirx.Min, "min"), (tirx.Max, "max"))


class NoTextError(Exception):
    """An extent that the expression language of signatures cannot express."""


def dim_text(expr: Any, names: Mapping[Any, str] | None = None) -> Dim:
    """Text of an extent, or an int; raises NoTextError if it is beyond the grammar.

    Variables have their own names unless `names` maps them.
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


def dim_or_script(extent: Any) -> Dim:
    """`dim_text` of an extent; one that is beyond the grammar as TVM writes it."""
    try:
        return dim_text(extent)
    except NoTextError:
        return str(extent)
