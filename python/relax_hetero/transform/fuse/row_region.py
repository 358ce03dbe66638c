"""Work on rows that was found among plain ops, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import relax

from ...encoding.row_program import RowProgram


@dataclass(frozen=True)
class RowOperand:
    """A tensor that a region reads.

    Attributes
    ----------
    value : relax.Expr
    shape : tuple or None
        What it is reshaped to first.
    """

    value: relax.Expr
    shape: tuple[Any, ...] | None


@dataclass(frozen=True)
class RowRegion:
    """Work that one `rows` will do.

    Attributes
    ----------
    end : int
        Index of the binding that it ends at.
    inside : tuple of int
        Indices of bindings that vanish.
    program : RowProgram
    operands : tuple of RowOperand
    shape : list
        Of the result of `rows`.
    ops : tuple of str
        Names of what it is made of.
    """

    end: int
    inside: tuple[int, ...]
    program: RowProgram
    operands: tuple[RowOperand, ...]
    shape: list[Any]
    ops: tuple[str, ...]
