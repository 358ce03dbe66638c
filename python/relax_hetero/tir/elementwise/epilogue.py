"""The end of a product or convolution: what is done to accumulators before they are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from ...encoding.expression import Expression
from ...encoding.problem import Epilogue
from ..core.builder import Expr, Function, prefetch, vector_type
from ..core.operand_view import Coordinates, OperandView
from . import expression_code


@dataclass(frozen=True)
class EpilogueCode:
    """An epilogue with its operands as parameters of a kernel.

    Attributes
    ----------
    expression : Expression
        ``x0`` is the accumulator.
    views : tuple of OperandView
        Of ``x1``, ``x2``, ...
    acc_dtype, dtype : str
        Element types of the accumulators and of the kernel's result.
    lanes : int
        Of an accumulator.
    """

    expression: Expression
    views: tuple[OperandView, ...]
    acc_dtype: str
    dtype: str
    lanes: int

    @staticmethod
    def of(function: Function, epilogue: Epilogue | None, acc_dtype: str, dtype: str, lanes: int) -> EpilogueCode:
        """Declares the operands, the next parameters of `function`; without an epilogue there are none."""
        operands = epilogue.operands if epilogue else ()
        views = tuple(OperandView(function, f"x{i + 1}", operand) for i, operand in enumerate(operands))
        return EpilogueCode(epilogue.expression if epilogue else Expression.operand(0), views, acc_dtype, dtype, lanes)

    def prefetch(self, along: str, size: tuple[int, int], at: Callable[[OperandView, int, int], Coordinates]) -> None:
        """Ask for what is read of every element of a tile, so that it has come when the sums are done.

        Parameters
        ----------
        along : str
            The tile's iteration dimension beside "n".
        size : tuple of int
            How much of it the tile has, and its vectors.
        at : callable
            Where an element of that dimension and a vector begin in an operand.
        """
        for view in self.views:
            if self.lanes > 1 and view.runs_along(along) and view.runs_along("n"):
                for i in range(size[0]):
                    for j in range(size[1]):
                        prefetch(view.data, view.address(at(view, i, j)))

    def result(self, acc: Expr, load: Callable[[OperandView], Expr]) -> Expr:
        """What is stored for a vector of accumulators; `load` reads an operand where the vector lies."""
        dtypes = [self.acc_dtype, *(view.dtype for view in self.views)]
        value = expression_code.emit(self.expression, [acc, *map(load, self.views)], dtypes, self.lanes)
        if self.expression.dtype(dtypes) == self.dtype:
            return value
        return tirx.Cast(vector_type(self.dtype, self.lanes), value)
