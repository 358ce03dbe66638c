"""Element types by name, including types that numpy lacks."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import tvm_ffi

HALF_TYPES = ("bfloat16", "float16")  # 16-bit floats, which kernels load and store, computing in float32

TF32 = "tfloat32"
"""Type in encodings: float32 in memory, of which products may read only the first 19 bits if that is faster."""

_SHORT = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u"}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type of a TVM element type; AttributeError for types that numpy and ml_dtypes lack."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # a dependency of TVM, but perhaps absent with TVM's runtime alone

        return np.dtype(getattr(ml_dtypes, name))


def short_name(name: str) -> str:
    """The short name of an element type in names of kernels and in reports: ``f32``, ``bf16``, ``u8``, ``s8``."""
    kind = name.rstrip("0123456789")
    return _SHORT.get(kind, kind) + name[len(kind) :]


def bytes_of(name: str) -> int:
    """Bytes of an element."""
    return numpy_dtype(stored_type(name)).itemsize


def stored_type(name: str) -> str:
    """The type of elements in memory."""
    return "float32" if name == TF32 else name


def bytes_for(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of the elements of a contiguous tensor."""
    return (math.prod(shape) * bits_of(tvm_ffi.dtype(dtype)) + 7) // 8


@functools.cache
def bits_of(dtype: tvm_ffi.dtype) -> int:
    """Bits of an element, including all lanes of a vector type."""
    return int(dtype.bits) * int(dtype.lanes)
