"""Kernel parameters that are accessed by coordinates of the iteration space, in vectors of up to 16 bytes.

A vector access must be aligned to its size. Tensors are aligned to 64 bytes, so an access is aligned if every stride
but the contiguous one is a multiple of the vector, and so is the coordinate along the contiguous dimension.
"""

from __future__ import annotations

from tvm import sym, tirx
from tvm.script.ir_builder import tirx as T

from ....target.element_types import bytes_of
from ....target.gpu_target import VECTOR_BYTES
from ...core.builder import Expr
from ...core.view import OperandView, View, row_major


class GlobalView(OperandView):
    """`OperandView` for GPUs: strides are expressions, as host code must not compute them before the launch.

    Open it within the function's body, before the launch; declaring a buffer generates no code.
    """

    def open_as(self, dtype: str) -> None:
        """Declare the elements with another type of the same width."""
        View.open_as(self, dtype)
        self._strides: list[Expr] = row_major(self.layout.packed_shape(self.extents), lambda a, b: a * b)

    def is_contiguous(self, name: str) -> bool:
        """Return whether the stride along an iteration dimension is known to be 1."""
        if not self.runs_along(name) or self.index_map.index(name) in self.layout.inner_dims:
            return False
        stride = self.stride(name)
        return isinstance(stride, int) and stride == 1

    def alignment(self, along: str, max_bytes: int) -> int:
        """Alignment in bytes, a power of two up to `max_bytes`, of rows along a contiguous dimension.

        Tensors are aligned to `max_bytes`.
        """
        element = bytes_of(self.nominal)
        width = max(max_bytes, element)
        for name in self.index_map:
            while name not in (along, "1") and width > element and not is_multiple(self.stride(name), width // element):
                width //= 2
        return width


def is_multiple(value: Expr, divisor: int) -> bool:
    """Return whether an expression is provably a multiple of a number."""
    if isinstance(value, int):
        return value % divisor == 0
    return bool(sym.Analyzer().can_prove_equal(tirx.floormod(value, tirx.const(divisor, str(value.ty.dtype))), 0))


def divides(extent: Expr, size: int) -> bool:
    """Return whether an extent is known to be a positive multiple of a tile size."""
    return isinstance(extent, int) and extent > 0 and extent % size == 0


class GpuOperand(GlobalView):
    """A parameter whose elements the kernel computes with.

    Types without CUDA arithmetic (bool, 8-bit floats) are loaded and stored as bytes.
    """

    def open_for_gpu(self) -> None:
        """Declare the elements, as bytes for types without CUDA arithmetic."""
        self.open(raw=self.nominal == "bool" or self.nominal.startswith("float8"))

    def vector(self, name: str, max_bytes: int = VECTOR_BYTES) -> int:
        """Elements of the widest aligned vector access along an iteration dimension, at least 1.

        It divides the dimension's extent, so that no access crosses its end.
        """
        if not self.is_contiguous(name):
            return 1
        d = self.index_map.index(name)
        outer_strides = [stride for stride in self._strides if not (isinstance(stride, int) and stride == 1)]
        lanes = max(1, max_bytes // bytes_of(self.nominal))
        while lanes > 1 and not all(is_multiple(value, lanes) for value in (self.extents[d], *outer_strides)):
            lanes //= 2
        return lanes

    def converted(self, value: Expr, dtype: str) -> Expr:
        """Cast a loaded scalar to another element type."""
        typed = self.typed(value)
        return typed if str(typed.ty.dtype) == dtype else T.cast(typed, dtype)
