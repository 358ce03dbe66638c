"""Which variables of a function hold encoded tensors, how those are stored, and the types of what is stored."""

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
    """Encoding, layout and type of an encoded tensor.

    Attributes
    ----------
    encoding : Encoding
    layout : PackedLayout or None
        None before SpecializeEncodings.
    """

    encoding: Encoding
    layout: PackedLayout | None


def encoded_values(func: relax.Function) -> dict[relax.Var, EncodedValue]:
    """The variables of `func` that hold encoded tensors, in program order.

    Those are the results of every encoded op but `unset_encoding`, and what `to_vdevice` or another name makes of
    them: a transfer keeps encoding and layout.
    """
    found: dict[relax.Var, EncodedValue] = {}
    for binding in walk_bindings(func):
        value = encoded_value(binding.value, found)
        if value is not None:
            found[binding.var] = value
    return found


def encoded_value(expr: relax.Expr, known: dict[relax.Var, EncodedValue]) -> EncodedValue | None:
    """Encoded tensor that `expr` is, None if it is none; `known` are the variables before it."""
    if isinstance(expr, relax.Var):
        return known.get(expr)
    name = encoded_op(expr)
    if name is not None:
        return None if name == UNSET else EncodedValue(Encoding.parse(expr.attrs.encoding), layout_of(expr))
    if op_name(expr) == TRANSFER and isinstance(expr.args[0], relax.Var):
        return known.get(expr.args[0])
    return None


def layout_of(call: relax.Call) -> PackedLayout | None:
    """The layout an encoded op names, None where it names none yet."""
    return PackedLayout.parse(call.attrs.layout) if call.attrs.layout else None


@dataclass(frozen=True)
class Stored:
    """A tensor operand of an encoded op: what the program means by it, and how it is stored.

    Attributes
    ----------
    ty : relax.TensorType
        The logical type.
    layout : PackedLayout
        Identity for plain tensors.
    """

    ty: relax.TensorType
    layout: PackedLayout

    @staticmethod
    def plain(ty: relax.TensorType) -> Stored:
        """A tensor outside of encodings."""
        return Stored(ty, PackedLayout.identity(len(extents_of(ty))))

    def operand(self, symbols: Symbols, index_map: IndexMap) -> Operand:
        """The tensor as problems have it."""
        shape = tuple(symbols.dim(extent) for extent in extents_of(self.ty))
        return Operand(shape, str(self.ty.dtype), index_map, self.layout)


@dataclass(frozen=True)
class StoredRows:
    """Work on the rows of a product's result: see `RowPhase`, whose operands are tensors here."""

    program: RowProgram
    product: int
    operands: tuple[Stored, ...]


def extents_of(ty: relax.TensorType) -> list[tvm.tirx.PrimExpr]:
    """Extents of a tensor type.

    Raises
    ------
    EncodingError
        Where the type does not know them: encodings need extents, if only symbolic ones.
    """
    if ty.shape is None or not isinstance(ty.shape, relax.ShapeExpr):
        raise EncodingError(f"an encoded op on a {ty}: found no shape, expected extents (symbolic ones will do)")
    return list(ty.shape.values)


def physical_type(stored: Stored, vdevice: relax.VDevice | None = None) -> relax.TensorType:
    """The type of the bytes of a tensor under its layout."""
    if stored.layout.is_identity:
        return stored.ty
    shape = stored.layout.packed_shape([plain_extent(extent) for extent in extents_of(stored.ty)])
    analyzer = tvm.sym.Analyzer()
    simple = [e if isinstance(e, int) else analyzer.simplify(e) for e in shape]
    return relax.TensorType(simple, stored.ty.dtype, vdevice or stored.ty.vdevice)
