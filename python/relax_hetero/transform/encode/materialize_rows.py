"""Calls of kernels in the place of `R.hetero.rows`: part of MaterializeEncodings."""

from __future__ import annotations

from collections.abc import Sequence

from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import Operand, RowsProblem
from ...encoding.row_program import RowProgram
from ..ir.blocks import is_one
from ..ir.extents import Symbols
from .stored_tensors import Stored, shape_of


def rows_problem(program: RowProgram, operands: Sequence[Stored], result: Stored) -> RowsProblem:
    """The problem of `R.hetero.rows`: operands broadcast against the rows that they have together.

    Parameters
    ----------
    program : RowProgram
    operands : sequence of Stored
        Plain tensors.
    result : Stored
        Plain; the last extent is 1 where the result does not vary along a row.
    """
    symbols = Symbols()
    rank = len(shape_of(result.ty))
    # Rows of one element still run along n.
    single = all(is_one(extent) for stored in operands for extent in shape_of(stored.ty)[-1:])

    def operand(stored: Stored) -> Operand:
        return _operand(symbols, stored, rank, single)

    return RowsProblem(program, tuple(map(operand, operands)), operand(result))


def _operand(symbols: Symbols, stored: Stored, rank: int, single: bool) -> Operand:
    """Dimensions align from the last, which is "n"; extents of one are "1", whatever the others have there."""
    shape = tuple(symbols.dim(extent) for extent in shape_of(stored.ty))
    names = [f"d{axis}" for axis in range(rank - 1)] + ["n"]
    aligned = zip(shape, names[rank - len(shape) :], strict=True)
    index_map = tuple("1" if extent == 1 and not (single and name == "n") else name for extent, name in aligned)
    return Operand(shape, str(stored.ty.dtype), index_map, PackedLayout.identity(len(shape)))
