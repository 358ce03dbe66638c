"""Parameters of a kernel whose threads load and store elements: accesses of up to 16 bytes where they are aligned.

A vector access of a GPU has to be aligned to its size. Tensors begin at multiples of 64 bytes, so an access is aligned
where every stride but the contiguous one is a multiple of the vector, and so is the first element's place along the
contiguous dimension.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from ....target.element_types import bytes_of
from ....target.gpu_target import VECTOR_BYTES
from ...core.builder import Expr
from .global_view import GlobalView, is_multiple


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
