"""Tensors as they are stored, and the problems that calls of encoded ops state about them.

Problems name symbolic extents "s0", "s1", ... in order of appearance, so that dispatches that differ only in the names
of their symbols share a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx

from ...encoding.encoding import LHS, RESULT, RHS, Encoding, IndexMap
from ...encoding.expression import Expression
from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import (
    ConvProblem,
    ElementwiseProblem,
    Epilogue,
    MatmulProblem,
    Operand,
    RowPhase,
    Window,
)
from ...encoding.row_program import RowProgram
from ...errors import EncodingError
from ..ir.blocks import is_one
from ..ir.extents import Symbols


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
        return Stored(ty, PackedLayout.identity(len(shape_of(ty))))

    def operand(self, symbols: Symbols, index_map: IndexMap) -> Operand:
        """The tensor as problems have it."""
        shape = tuple(symbols.dim(extent) for extent in shape_of(self.ty))
        return Operand(shape, str(self.ty.dtype), index_map, self.layout)


@dataclass(frozen=True)
class StoredRows:
    """Work on the rows of a product's result: see `RowPhase`, whose operands are tensors here."""

    program: RowProgram
    product: int
    operands: tuple[Stored, ...]


def shape_of(ty: relax.TensorType) -> list[tvm.tirx.PrimExpr]:
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
    shape = stored.layout.packed_shape([_int_if_known(extent) for extent in shape_of(stored.ty)])
    analyzer = tvm.sym.Analyzer()
    simple = [e if isinstance(e, int) else analyzer.simplify(e) for e in shape]
    return relax.TensorType(simple, stored.ty.dtype, vdevice or stored.ty.vdevice)


def _int_if_known(extent: tvm.tirx.PrimExpr) -> Any:
    return int(extent) if isinstance(extent, tirx.IntImm) else extent


def product_problem(
    encoding: Encoding,
    operands: Sequence[Stored],
    result: Stored,
    expression: Expression | None = None,
    others: Sequence[Stored] = (),
    rows: StoredRows | None = None,
) -> MatmulProblem | ConvProblem:
    """The problem of an encoded product or convolution of `operands`, with its epilogue; see `matmul_problem`.

    No rows stand behind a convolution.
    """
    if encoding.moves is not None:
        return conv_problem(encoding, operands[0], operands[1], result, expression, others)
    init = operands[2] if len(operands) > 2 else None
    return matmul_problem(encoding, operands[0], operands[1], result, init, expression, others, rows)


def matmul_problem(
    encoding: Encoding,
    lhs: Stored,
    rhs: Stored,
    result: Stored,
    init: Stored | None = None,
    expression: Expression | None = None,
    others: Sequence[Stored] = (),
    rows: StoredRows | None = None,
) -> MatmulProblem:
    """The problem of a product of encoded tensors.

    Parameters
    ----------
    encoding : Encoding
        Of the op.
    lhs, rhs, result : Stored
    init : Stored, optional
        Initial accumulator: broadcast against the result.
    expression : Expression, optional
        The epilogue, ``x0`` the accumulator.
    others : sequence of Stored
        The epilogue's operands x1, x2, ..., broadcast against the result.
    rows : StoredRows, optional
        Work on the result's rows.
    """
    symbols = Symbols()
    maps = encoding.index_maps
    operands = [s.operand(symbols, maps[i]) for s, i in ((lhs, LHS), (rhs, RHS))]
    first = None if init is None else init.operand(symbols, _broadcast_map(init, result, maps[RESULT]))
    epilogue = None
    if expression is not None:
        inputs = tuple(s.operand(symbols, _broadcast_map(s, result, maps[RESULT])) for s in others)
        epilogue = Epilogue(expression, inputs)
    phase = None
    if rows is not None:
        inputs = tuple(s.operand(symbols, _broadcast_map(s, result, maps[RESULT])) for s in rows.operands)
        phase = RowPhase(rows.program, rows.product, inputs)
    out = result.operand(symbols, maps[RESULT])
    return MatmulProblem(operands[0], operands[1], out, encoding.element_type, first, epilogue, phase)


def conv_problem(
    encoding: Encoding,
    data: Stored,
    weight: Stored,
    result: Stored,
    expression: Expression | None = None,
    others: Sequence[Stored] = (),
) -> ConvProblem:
    """The problem of a convolution of encoded tensors; parameters as of `matmul_problem`."""
    moves, symbols, maps = encoding.moves, Symbols(), encoding.index_maps
    assert moves is not None
    spatial = len(moves.strides)
    windows = tuple(
        Window(
            encoding.sizes[f"w{d}"],
            moves.strides[d],
            moves.dilation[d],
            moves.padding[d],
            moves.padding[spatial + d],
        )
        for d in range(spatial)
    )
    left, right = data.operand(symbols, maps[LHS]), weight.operand(symbols, maps[RHS])
    epilogue = None
    if expression is not None:
        inputs = tuple(s.operand(symbols, _broadcast_map(s, result, maps[RESULT])) for s in others)
        epilogue = Epilogue(expression, inputs)
    out = result.operand(symbols, maps[RESULT])
    return ConvProblem(left, right, out, encoding.element_types[RESULT], windows, moves.groups, epilogue)


def elementwise_problem(expression: Expression, operands: Sequence[Stored], result: Stored) -> ElementwiseProblem:
    """The problem of an elementwise op: operands broadcast against the result."""
    symbols = Symbols()
    names = tuple(f"d{i}" for i in range(len(shape_of(result.ty))))
    inputs = tuple(s.operand(symbols, _broadcast_map(s, result, names)) for s in operands)
    return ElementwiseProblem(expression, inputs, result.operand(symbols, names))


def _broadcast_map(stored: Stored, result: Stored, names: IndexMap) -> IndexMap:
    """Trailing dimensions align; an extent of one where the result's is another is broadcast."""
    shape, full = shape_of(stored.ty), shape_of(result.ty)
    if len(shape) > len(names):
        raise EncodingError(f"an operand of {len(shape)} dimensions cannot be broadcast to {len(names)}")
    start = len(names) - len(shape)
    aligned = zip(shape, full[start:], names[start:], strict=True)
    return tuple("1" if is_one(extent) and not is_one(whole) else name for extent, whole, name in aligned)
