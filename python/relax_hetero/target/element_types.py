"""Element types by name, those that numpy lacks included."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import tvm_ffi

HALF_TYPES = ("bfloat16", "float16")
"""Floats of two bytes: kernels read and write them, and compute in float32."""

TF32 = "tfloat32"
"""In encodings: float32 in memory, of which products read the first 19 bits where the device is faster so."""

_SHORT = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u"}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type of a TVM element type; AttributeError for what neither numpy nor ml_dtypes knows."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # bfloat16 and its kin; TVM depends on it, a process with the runtime alone may lack it

        return np.dtype(getattr(ml_dtypes, name))


def short_name(name: str) -> str:
    """``f32``, ``bf16``, ``u8``, ``s8``: an element type as names of kernels and reports have it."""
    kind = name.rstrip("0123456789")
    return _SHORT.get(kind, kind) + name[len(kind) :]


def bytes_of(name: str) -> int:
    """Bytes of an element."""
    return numpy_dtype(stored_type(name)).itemsize


def stored_type(name: str) -> str:
    """The type that elements have in memory."""
    return "float32" if name == TF32 else name


def bytes_for(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of the elements of a contiguous tensor."""
    return (math.prod(shape) * bits_of(tvm_ffi.dtype(dtype)) + 7) // 8


@functools.cache
def bits_of(dtype: tvm_ffi.dtype) -> int:
    """Bits of an element, all lanes of a vector type together."""
    return int(dtype.bits) * int(dtype.lanes)
