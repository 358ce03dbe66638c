"""Extents of tensor types: as numbers, and as the names that problems give to symbolic ones."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import StructuralKey

from ...encoding.problem import Dim
from ...tir.core.builder import plain_extent


def known_extents(ty: tvm.ir.Type) -> list[Any] | None:
    """The extents of a tensor type, ints where they are numbers; None where they are not written."""
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr) or ty.dtype is None:
        return None
    return [plain_extent(extent) for extent in ty.shape.values]


class Symbols:
    """Names of symbolic extents, in order of appearance; equal expressions have one name."""

    def __init__(self) -> None:
        self._names: dict[StructuralKey, str] = {}

    def dim(self, extent: tvm.tirx.PrimExpr | int) -> Dim:
        """An extent as problems have it."""
        if isinstance(extent, (int, tirx.IntImm)):
            return int(extent)
        key = StructuralKey(extent)
        return self._names.setdefault(key, f"s{len(self._names)}")
