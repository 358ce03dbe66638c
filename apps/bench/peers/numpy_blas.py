"""numpy: ``np.matmul`` into a given result, which is OpenBLAS for float32."""

from __future__ import annotations

import numpy as np

from .product import Contestant, Product, empty
from .shape import Unsupported


def matmul(product: Product, threads: int) -> Contestant:
    """OpenBLAS packs the right operand in every call; its threads are fixed by the environment."""
    if product.kind != "f32":
        raise Unsupported("numpy multiplies integers and bfloat16 without BLAS")
    x, w, y = product.lhs, product.rhs, empty(product.result_shape, product.result_dtype)
    return Contestant(lambda: np.matmul(x, w, out=y), lambda: y)
