"""A parameter of a GPU's kernel, its elements found by coordinates of the iteration space."""

from __future__ import annotations

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
