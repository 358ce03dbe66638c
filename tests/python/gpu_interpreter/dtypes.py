"""Element types: numpy's for TVM's names, and casts with the semantics of CUDA."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

_EXTENDED = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
}
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@cache
def lanes_of(dtype: str) -> tuple[str, int]:
    """Element type and elements of a type: ("float16", 8) for float16x8."""
    name, _, lanes = dtype.rpartition("x")
    return (name, int(lanes)) if name and lanes.isdigit() else (dtype, 1)


@cache
def scalar_type(dtype: str) -> np.dtype:
    """The numpy type of a TVM type's elements; handles are 64-bit addresses."""
    name = lanes_of(dtype)[0]
    if name in ("handle", "void", ""):
        return np.dtype(np.uint64)
    if name in ("bool", "uint1"):
        return np.dtype(np.bool_)
    return _EXTENDED[name] if name in _EXTENDED else np.dtype(name)


def is_float(dtype: np.dtype) -> bool:
    """True for types of floats, those of ml_dtypes included."""
    return dtype.kind == "f" or dtype.kind == "V" or dtype.name in _EXTENDED


def cast(value: Any, to: np.dtype) -> Any:
    """The value in another type, as CUDA converts: floats to ints saturate, and so do 8-bit floats."""
    value = np.asarray(value)
    source = value.dtype
    if source == to:
        return value[()]
    if is_float(source) and to.kind in "iu":
        wide = np.trunc(value.astype(np.float64))
        info = np.iinfo(to)
        clipped = np.clip(np.nan_to_num(wide, nan=0.0), float(info.min), float(info.max))
        result = clipped.astype(to)
        # The largest 64-bit ints are not float64 numbers: the rounded bound would wrap.
        result = np.where(clipped >= float(info.max), info.max, result).astype(to) if info.bits == 64 else result
        return result[()]
    if to.name in _LARGEST and (is_float(source) or source.kind in "iub"):
        wide = value.astype(np.float32)
        largest = np.float32(_LARGEST[to.name])
        return np.clip(wide, -largest, largest).astype(to)[()]
    if to.name in _EXTENDED and source.kind in "iub":
        return value.astype(np.float32).astype(to)[()]
    if to.kind in "iu" and source.kind == "b":
        return value.astype(to)[()]
    return value.astype(to)[()]
