"""A parameter of a GPU's kernel, its elements found by coordinates of the iteration space."""

from __future__ import annotations

from tvm import sym, tirx

from ....target.element_types import bytes_of
from ...core.builder import Expr
from ...core.view import OperandView, View, row_major


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
