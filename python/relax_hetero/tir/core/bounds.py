"""Indices made safe: the one definition that every kernel uses, and the attribute of kernels that need no more of it.

An index is of any integer type, an extent an int or an expression. Nothing here wraps, be the index ever so far
outside, and be the axis longer than the index can say.
"""

from __future__ import annotations

from tvm import tirx

from .builder import Expr

BOUNDED = "relax_hetero.bounded"
"""On a PrimFunc: whatever numbers it reads, it touches no memory but its tensors."""


def clamped(index: Expr, extent: Expr) -> Expr:
    """The nearest index of an axis with an element: 0 for those below, the last for those beyond."""
    index, end = _common(index, extent)
    if end is not None:
        index = tirx.Min(index, end - tirx.const(1, _type(end)))
    return tirx.Max(index, tirx.const(0, _type(index)))


def inside(index: Expr, extent: Expr) -> Expr:
    """Return whether an axis has an index, which is counted from the front."""
    index, end = _common(index, extent)
    is_positive = index >= tirx.const(0, _type(index))
    return is_positive if end is None else tirx.all(is_positive, index < end)


def from_front(index: Expr, extent: Expr) -> Expr:
    """An index with the negative ones counted from the back, as int64."""
    wide, end = _common(_as(index, "int64"), extent)
    if _type(index).startswith("uint"):
        return wide
    assert end is not None, "int64 holds every extent"
    return tirx.Select(wide < tirx.const(0, "int64"), wide + end, wide)


def _common(index: Expr, extent: Expr) -> tuple[Expr, Expr | None]:
    """An index and an extent in one signed type; no extent where all that the index can say is below it.

    TVM's simplifier fails on unsigned numbers, which it subtracts to compare them. Of those, what no int64 can say is
    negative, and so outside.
    """
    dtype = _type(index)
    is_number = isinstance(extent, (int, tirx.IntImm))
    if dtype.startswith("uint") or (not is_number and dtype != _type(extent)):
        dtype = "int64"
    if not is_number:
        return _as(index, dtype), _as(extent, dtype)
    is_beyond = int(extent) > int(tirx.max_value(dtype))
    return _as(index, dtype), None if is_beyond else tirx.const(int(extent), dtype)


def _as(value: Expr, dtype: str) -> Expr:
    return value if _type(value) == dtype else tirx.Cast(dtype, value)


def _type(value: Expr) -> str:
    return str(value.ty.dtype)
