"""Element types by name, those that numpy lacks included."""

from __future__ import annotations

from typing import Any

import numpy as np


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type of a TVM element type; AttributeError for what neither numpy nor ml_dtypes knows."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # bfloat16 and its kin; TVM depends on it, a process with the runtime alone may lack it

        return np.dtype(getattr(ml_dtypes, name))


def bytes_of(name: str) -> int:
    """Bytes of an element."""
    return numpy_dtype(name).itemsize
