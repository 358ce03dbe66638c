"""Encoded tensors of a function: their variables, layouts and physical types."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from ...encoding.encoding import Encoding, IndexMap
from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import Operand
from ...encoding.row_program import RowProgram
from ...errors import EncodingError
from ...op.encoded import UNSET, encoded_op
from ...tir.core.raw_kernel import plain_extent
from ..ir.extents import Symbols
from ..ir.op_names import TRANSFER
from ..ir.rewriting import op_name, walk_bindings


@dataclass(frozen=True)
class EncodedValue:
    """Encoding and layout of an encoded tensor."""

    encoding: Encoding
    layout: PackedLayout | None  # None before SpecializeEncodings


def encoded_values(func: relax.Function) -> dict[relax.Var, EncodedValue]:
    """The variables of `func` that hold encoded tensors, in program order.

    They are the results of all encoded ops except `unset_encoding`, and their transfers and aliases, which keep
    encoding and layout.
    """
    encoded: dict[relax.Var, EncodedValue] = {}
    for binding in walk_bindings(func):
        value = encoded_value(binding.value, encoded)
        if value is not None:
            encoded[binding.var] = value
    return encoded


def encoded_value(expr: relax.Expr, encoded: dict[relax.Var, EncodedValue]) -> EncodedValue | None:
    """The encoded tensor that `expr` is, None for any other value; `encoded` are the variables before it."""
    if isinstance(expr, relax.Var):
        return encoded.get(expr)
    name = encoded_op(expr)
    if name is not None:
        return None if name == UNSET else EncodedValue(Encoding.parse(expr.attrs.encoding), layout_of(expr))
    if op_name(expr) == TRANSFER and isinstance(expr.args[0], relax.Var):
        return encoded.get(expr.args[0])
    return None


def layout_of(call: relax.Call) -> PackedLayout | None:
    """The layout of an encoded op; None before SpecializeEncodings."""
    return PackedLayout.parse(call.attrs.layout) if call.attrs.layout else None


@dataclass(frozen=True)
class Stored:
    """A tensor operand of an encoded op: its logical type and its layout."""

    ty: relax.TensorType  # the logical type
    layout: PackedLayout  # identity for plain tensors

    @staticmethod
    def plain(ty: relax.TensorType) -> Stored:
        """A tensor without an encoding."""
        return Stored(ty, PackedLayout.identity(len(extents_of(ty))))

    def operand(self, symbols: Symbols, index_map: IndexMap) -> Operand:
        """The tensor as an operand of a problem."""
        shape = tuple(symbols.dim(extent) for extent in extents_of(self.ty))
        return Operand(shape, str(self.ty.dtype), index_map, self.layout)


@dataclass(frozen=True)
class StoredRows:
    """Row phase of a product: a `RowPhase` whose operands are tensors of the program."""

    program: RowProgram
    product: int
    operands: tuple[Stored, ...]


def extents_of(ty: relax.TensorType) -> list[tvm.tirx.PrimExpr]:
    """Extents of a tensor type. Raises EncodingError if the type lacks extents."""
    if ty.shape is None or not isinstance(ty.shape, relax.ShapeExpr):
        raise EncodingError(f"an encoded op on a {ty}: found no shape, expected extents (also symbolic ones)")
    return ty.shape.values[:]


def physical_type(stored: Stored) -> relax.TensorType:
    """The type of a stored tensor under its layout."""
    if stored.layout.is_identity:
        return stored.ty
    shape = stored.layout.packed_shape([plain_extent(extent) for extent in extents_of(stored.ty)])
    analyzer = tvm.sym.Analyzer()
    extents = [e if isinstance(e, int) else analyzer.simplify(e) for e in shape]
    return relax.TensorType(extents, stored.ty.dtype, stored.ty.vdevice)
