"""Floats of 8 and 4 bits to and from float32, as nodes of a graph."""

from __future__ import annotations

from tvm import relax, te, tirx

from ....tir.math.narrow_floats import code_of, number_of
from ..node import Node, Position, dtype_of
from .storage_types import bytes_of, of_bytes


def to_float32(node: Node, data: relax.Expr) -> relax.Expr:
    """The numbers of a tensor of such floats; all of them are numbers of float32."""
    dtype = dtype_of(data)

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        return number_of(tirx.Cast("uint32", x(*i)), dtype)

    return node.kernel("narrow_float_to_float32", element, bytes_of(node, data))


def from_float32(node: Node, data: relax.Expr, dtype: str, saturates: bool, rounding: str = "up") -> relax.Expr:
    """The nearest such floats to a float32 tensor, halves to even; `code_of` says what becomes of larger ones."""

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        return code_of(x(*i), dtype, saturates, rounding)

    return of_bytes(node, node.kernel("float32_to_narrow_float", element, data), dtype)
