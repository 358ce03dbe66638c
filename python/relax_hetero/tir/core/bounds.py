"""Bounds of indices, one definition for every kernel, and the attribute of kernels that never access out of bounds.

An index has any integer type, an extent is an int or an expression. No computation here overflows, even if the index is
far out of range, or the axis is longer than the index type can represent.
"""

from __future__ import annotations

from tvm import tirx

from .builder import Expr

BOUNDED = "relax_hetero.bounded"  # on a PrimFunc: it accesses only its tensors, whatever numbers it reads


def clamped(index: Expr, extent: Expr) -> Expr:
    """The index clamped to the range from 0 to the last index of an axis."""
    index, end = _to_common_type(index, extent)
    if end is not None:
        index = tirx.Min(index, end - tirx.const(1, _type(end)))
    return tirx.Max(index, tirx.const(0, _type(index)))


def inside(index: Expr, extent: Expr) -> Expr:
    """Return whether an index lies in an axis; a negative one does not."""
    index, end = _to_common_type(index, extent)
    is_nonnegative = index >= tirx.const(0, _type(index))
    return is_nonnegative if end is None else tirx.all(is_nonnegative, index < end)


def from_front(index: Expr, extent: Expr) -> Expr:
    """The index as int64, with negative ones counted from the end."""
    wide, end = _to_common_type(_cast(index, "int64"), extent)
    if _type(index).startswith("uint"):
        return wide
    assert end is not None, "int64 holds every extent"
    return tirx.Select(wide < tirx.const(0, "int64"), wide + end, wide)


def _to_common_type(index: Expr, extent: Expr) -> tuple[Expr, Expr | None]:
    """An index and an extent in one signed type; the extent is None if it exceeds all indices of the type.

    TVM's simplifier compares numbers by subtraction, which fails for unsigned ones. A uint64 above the range of int64
    becomes negative, and so out of bounds.
    """
    dtype = _type(index)
    is_number = isinstance(extent, (int, tirx.IntImm))
    if dtype.startswith("uint") or (not is_number and dtype != _type(extent)):
        dtype = "int64"
    if not is_number:
        return _cast(index, dtype), _cast(extent, dtype)
    exceeds_type = int(extent) > int(tirx.max_value(dtype))
    return _cast(index, dtype), None if exceeds_type else tirx.const(int(extent), dtype)


def _cast(value: Expr, dtype: str) -> Expr:
    return value if _type(value) == dtype else tirx.Cast(dtype, value)


def _type(value: Expr) -> str:
    return str(value.ty.dtype)
