"""Parameters of a kernel whose threads load and store elements: accesses of up to 16 bytes where they are aligned.

A vector access of a GPU has to be aligned to its size. Tensors begin at multiples of 64 bytes, so an access is aligned
where every stride but the contiguous one is a multiple of the vector, and so is the first element's place along the
contiguous dimension.
"""

from __future__ import annotations

from tvm import sym, tirx
from tvm.script.ir_builder import tirx as T

from ....target.element_types import bytes_of
from ....target.gpu_target import VECTOR_BYTES
from ...core.builder import Expr
from ...core.view import OperandView, View, row_major

# A parameter of a GPU's kernel, its elements found by coordinates of the iteration space.


class GlobalView(OperandView):
    """As `OperandView`, but nothing is written before the launch: strides are expressions, not held in memory.

    Open it within the body of the function, before the launch: a declaration of a buffer is no statement.
    """

    def open_as(self, dtype: str) -> None:
        """Declare the elements as those of another type of the same width."""
        View.open_as(self, dtype)
        self._strides: list[Expr] = row_major(self.layout.packed_shape(self.extents), lambda a, b: a * b)

    def is_contiguous(self, name: str) -> bool:
        """Return whether neighbours along an iteration dimension lie side by side, known to."""
        if not self.runs_along(name) or self.index_map.index(name) in self.layout.inner_dims:
            return False
        stride = self.stride(name)
        return isinstance(stride, int) and stride == 1

    def alignment(self, along: str, most: int) -> int:
        """The largest power of two, up to `most` bytes, at multiples of which runs along a dimension begin.

        Tensors begin at multiples of `most`; the dimension is contiguous.
        """
        element = bytes_of(self.nominal)
        width = max(most, element)
        for name in self.index_map:
            while name not in (along, "1") and width > element and not is_multiple(self.stride(name), width // element):
                width //= 2
        return width


def is_multiple(value: Expr, of: int) -> bool:
    """Return whether an expression is known to be a multiple of a number."""
    if isinstance(value, int):
        return value % of == 0
    return bool(sym.Analyzer().can_prove_equal(tirx.floormod(value, tirx.const(of, str(value.ty.dtype))), 0))


class GpuOperand(GlobalView):
    """A parameter whose elements are numbers to the kernel.

    Those of types that CUDA has no arithmetic for (bool, 8-bit floats) are loaded and stored as bytes.
    """

    def open_for_gpu(self) -> None:
        """Declare the elements, as bytes where CUDA has no arithmetic for them."""
        self.open(raw=self.nominal == "bool" or self.nominal.startswith("float8"))

    def vector(self, name: str, max_bytes: int = VECTOR_BYTES) -> int:
        """Elements of the widest aligned access along an iteration dimension, 1 where there is none.

        The dimension's extent is a multiple of it, so that no access crosses its end.
        """
        if not self.is_contiguous(name):
            return 1
        d = self.index_map.index(name)
        others = [stride for stride in self._strides if not (isinstance(stride, int) and stride == 1)]
        lanes = max(1, max_bytes // bytes_of(self.nominal))
        while lanes > 1 and not all(is_multiple(value, lanes) for value in (self.extents[d], *others)):
            lanes //= 2
        return lanes

    def converted(self, value: Expr, dtype: str) -> Expr:
        """A scalar that was loaded, as a number of another element type."""
        typed = self.typed(value)
        return typed if str(typed.ty.dtype) == dtype else T.cast(typed, dtype)
