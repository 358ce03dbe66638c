"""Operators of weights in blocks of few bits: ``relax.hetero.dequantize_blocks`` and ``relax.hetero.block_matmul``.

Importers write the first, which says what such weights mean as numbers; products that read nothing else become the
second (FormQuantizedMatmuls), of which MaterializeEncodings makes kernels. All tensors are plain. (TVM has 4-bit types,
and miscomputes with them: two weights are a byte here, and eight are an int32.)
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from ..encoding.block_formats import BlockFormat, block_format
from ..encoding.block_panels import Panels, source_form
from ..encoding.block_weights import GROUP, BlockLayout, Fragments, bytes_of_row, layout_of
from ..encoding.expression import Expression
from ..errors import EncodingError
from .definition import check_attrs, differ, extents_of, make_call, number, register_op

DEQUANTIZE_BLOCKS, BLOCK_MATMUL = "relax.hetero.dequantize_blocks", "relax.hetero.block_matmul"
BLOCK_ROWS = "relax.hetero.block_rows"

ACTIVATION_BITS = (8, 16)
"""Bits of the integers that may stand for numbers of the other operand of a product."""

ROWS = ("", "decode", "chunk")
"""Kinds of rows of the other operand, as in `cached_attention`; empty for any."""

_POINTS = ("uint8", "float32")
_MINIMUMS = ("float16", "float32")
_SCALES = ("float32", "float16")


@tvm_ffi.dataclasses.py_class("relax_hetero.DequantizeBlocksAttrs")
class DequantizeBlocksAttrs(tvm.ir.Attrs):
    """Attributes of dequantize_blocks; see `dequantize_blocks`."""

    depth: int
    block: int
    bits: int
    format: str
    activation_bits: int = 16
    rows: str = ""


@tvm_ffi.dataclasses.py_class("relax_hetero.BlockMatmulAttrs")
class BlockMatmulAttrs(tvm.ir.Attrs):
    """Attributes of block_matmul; see `block_matmul`."""

    columns: int
    block: int
    bits: int
    zeros: bool
    expression: str
    format: str
    experts: int = 0
    activation_bits: int = 16
    rows: str = ""


def dequantize_blocks(
    data: relax.Expr,
    scales: relax.Expr | None = None,
    zeros: relax.Expr | None = None,
    *,
    depth: int,
    block: int = 0,
    bits: int = 4,
    format: str = "",
    activation_bits: int = 16,
    rows: str = "",
) -> relax.Call:
    """Weights in blocks as float32: ``(weight - zero) * scale``, or what a file's format says.

    Parameters
    ----------
    data : relax.Expr
        With a format: (n, bytes) of uint8, rows of a file's bytes. Without: (n, bytes) of uint8, weights of 2, 4 or 8
        bits, the first of a byte in its lowest bits; at least as many bytes as `depth` needs.
    scales : relax.Expr, optional
        Without a format: (n, blocks) of float32, ``blocks = ceil(depth / block)``.
    zeros : relax.Expr, optional
        Zero points, (n, blocks) of uint8 or float32; the middle (8 of 4 bits) where they are not given.
    depth : int
        Weights of a row; the result has the shape (n, depth).
    block : int
        How many weights share a scale: a multiple of 8. A format says it by itself.
    bits : int
        Bits of a weight: 2, 4 or 8. A format says it by itself.
    format : str
        A name of `relax_hetero.encoding.block_formats.FILE_FORMATS`: "q4_k", "f16", ...
    activation_bits : int
        How exact products with these weights have to be: their other operand may become integers of 8 or 16 bits, with
        a scale for each block of at most 32 or 128. Devices without such products keep more.
    rows : str
        "decode" or "chunk", as in cached_attention: CPUs then multiply a row with the same instructions for any number
        of rows. "": with the instructions that suit the number of rows.

    Raises
    ------
    EncodingError
        If an operand is not a Relax expression, the format or the kind of rows is unknown, or activation_bits is
        neither 8 nor 16.
    """
    if format:
        form = block_format(format)
        block, bits = form.block, form.bits
    operands = [data, *(one for one in (scales, zeros) if one is not None)]
    _check(activation_bits, rows, DEQUANTIZE_BLOCKS)
    attrs = DequantizeBlocksAttrs(depth, block, bits, format, activation_bits, rows)
    return make_call(DEQUANTIZE_BLOCKS, operands, attrs)


def _check(activation_bits: int, rows: str, op: str) -> None:
    if activation_bits not in ACTIVATION_BITS:
        expected = " or ".join(map(str, ACTIVATION_BITS))
        raise EncodingError(f"{op}: activation_bits is {activation_bits!r}, expected {expected}")
    if rows not in ROWS:
        raise EncodingError(f"{op}: rows is {rows!r}, expected one of {', '.join(map(repr, ROWS))}")


def block_matmul(
    x: relax.Expr,
    *operands: relax.Expr,
    columns: int,
    block: int = 0,
    bits: int = 4,
    zeros: bool = False,
    expression: Expression | str = "x0",
    format: str = "",
    experts: int = 0,
    activation_bits: int = 16,
    rows: str = "",
) -> relax.Call:
    """A product with weights in blocks: ``expression(x * numbers, ...)``, the numbers those of dequantize_blocks.

    Parameters
    ----------
    x : relax.Expr
        (..., m, k) of float32; of float16 or bfloat16 where the weights are fragments. With experts: (tokens, 1, 1, k),
        or (tokens, used, 1, k), of float32.
    operands : relax.Expr
        The weights as the layout of the device packs them: in panels of columns, one operand of bytes
        (`relax_hetero.encoding.block_panels`); in fragments, weights, scales and zero points if there are any
        (`relax_hetero.encoding.block_weights`). Then the operands ``x1``, ``x2``, ... of the expression.
    columns, block : int
        Extent of n, and how many weights along k share a scale. A format says the latter by itself.
    bits : int
        Bits of a weight. A format says it by itself.
    zeros : bool
        Whether zero points are given.
    expression : Expression or str
        Function that is applied to a sum (``x0``) before it is stored.
    format : str
        Format of weights of a file, as in dequantize_blocks.
    experts : int
        How many matrices the weights are, in panels; 0: one, for all rows. Behind the weights stands an operand
        (tokens, used) of int32 or int64 then: which matrices each token is multiplied by; the nearest stand for
        missing ones. The result has the shape (tokens, used, 1, columns).
    activation_bits : int
        8: `x` is rounded to integers of 8 bits with a scale for each 32; 16: it is not.
    rows : str
        As of dequantize_blocks.

    Raises
    ------
    EncodingError
        If text is not an expression, an operand is not a Relax expression, the format or the kind of rows is unknown,
        or activation_bits is neither 8 nor 16.
    """
    text = str(expression if isinstance(expression, Expression) else Expression.parse(expression))
    if format:
        form = block_format(format)
        block, bits = form.block, form.bits
    _check(activation_bits, rows, BLOCK_MATMUL)
    attrs = BlockMatmulAttrs(columns, block, bits, zeros, text, format, experts, activation_bits, rows)
    return make_call(BLOCK_MATMUL, [x, *operands], attrs)


@tvm_ffi.dataclasses.py_class("relax_hetero.BlockRowsAttrs")
class BlockRowsAttrs(tvm.ir.Attrs):
    """Attributes of block_rows; see `block_rows`."""

    rows: int
    depth: int
    format: str


def block_rows(weight: relax.Expr, index: relax.Expr, *, rows: int, depth: int, format: str) -> relax.Call:
    """Rows of weights in panels as float32: those of some indices, of which the nearest stand for missing ones.

    Parameters
    ----------
    weight : relax.Expr
        Bytes, as `relax_hetero.encoding.block_panels` packs them.
    index : relax.Expr
        (m,) of int32 or int64.
    rows, depth : int
        Extents of the weights; the result has the shape (m, depth).
    format : str
        A name that `relax_hetero.encoding.block_formats.block_format` knows.

    Raises
    ------
    EncodingError
        If an operand is not a Relax expression.
    """
    return make_call(BLOCK_ROWS, [weight, index], BlockRowsAttrs(rows, depth, format))


def infer_block_rows(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """The type of `block_rows`; EncodingError for operands that do not fit."""
    check_attrs(call, BlockRowsAttrs)
    _check_call(call, BlockRowsAttrs, 2)
    form, depth = block_format(str(call.attrs.format)), int(call.attrs.depth)
    weight, index = _tensor(call, 0, ("uint8",)), _tensor(call, 1, ("int32", "int64"))
    if len(weight) != 2 or not all(isinstance(extent, int) and extent > 0 for extent in weight):
        raise EncodingError(f"{BLOCK_ROWS}: operand 0 has shape {weight}, expected packed weights")
    _expect(call, 0, weight, layout_of(weight, form, depth).shapes(int(call.attrs.rows), form, depth)[0])
    if len(index) != 1:
        raise EncodingError(f"{BLOCK_ROWS}: operand 1 has shape {index}, expected one dimension")
    return relax.TensorType([index[0], depth], "float32", call.args[0].ty.vdevice)


def _tensor(call: relax.Call, index: int, dtypes: tuple[str, ...]) -> list[Any]:
    """The extents of an operand that has one of some element types; ints where they are numbers."""
    ty = call.args[index].ty
    if not isinstance(ty, relax.TensorType) or str(ty.dtype) not in dtypes:
        raise EncodingError(f"{call.op.name}: operand {index} is a {ty}, expected a tensor of {' or '.join(dtypes)}")
    return [number(extent) for extent in extents_of(call, index)]


def _expect(call: relax.Call, index: int, found: list[Any], expected: list[Any]) -> None:
    if found != expected:
        raise EncodingError(f"{call.op.name}: operand {index} has shape {found}, expected {expected}")


def infer_dequantize_blocks(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """The type of `dequantize_blocks`; EncodingError for operands that do not fit."""
    check_attrs(call, DequantizeBlocksAttrs)
    depth, block = int(call.attrs.depth), int(call.attrs.block)
    if call.attrs.format:
        return _infer_rows_of_a_file(call, depth)
    _check_call(call, DequantizeBlocksAttrs, 2)
    _check_block(call, block)
    data, row_bytes = _tensor(call, 0, ("uint8",)), bytes_of_row(depth, int(call.attrs.bits))
    if len(data) != 2 or not all(isinstance(extent, int) for extent in data) or data[1] < row_bytes:
        raise EncodingError(
            f"{DEQUANTIZE_BLOCKS}: operand 0 has shape {data}, expected rows of {row_bytes} bytes or more"
        )
    for index in range(1, len(call.args)):
        found = _tensor(call, index, ("float32",) if index == 1 else _POINTS)
        _expect(call, index, found, [data[0], -(-depth // block)])
    return relax.TensorType([data[0], depth], "float32", call.args[0].ty.vdevice)


def _infer_rows_of_a_file(call: relax.Call, depth: int) -> relax.TensorType:
    form = block_format(str(call.attrs.format))
    _check_call(call, DequantizeBlocksAttrs, 1)
    if len(call.args) > 1:
        raise EncodingError(f"{DEQUANTIZE_BLOCKS}: found {len(call.args)} operands, expected rows of {form.name} alone")
    data = _tensor(call, 0, ("uint8",))
    if len(data) != 2 or data[1] != form.bytes_of_row(depth):
        expected = f"({form.bytes_of_row(depth)} bytes a row of {depth} weights of {form.name})"
        raise EncodingError(f"{DEQUANTIZE_BLOCKS}: operand 0 has shape {data}, expected {expected}")
    return relax.TensorType([data[0], depth], "float32", call.args[0].ty.vdevice)


def infer_block_matmul(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """The type of `block_matmul`; EncodingError for operands that do not fit."""
    _check_call(call, BlockMatmulAttrs, 2)
    columns = int(call.attrs.columns)
    if not call.attrs.format:
        _check_block(call, int(call.attrs.block))
    form = form_of(call)
    weight = _tensor(call, 1, ("int32", "uint8"))
    if len(weight) not in (2, 4) or not all(isinstance(extent, int) and extent > 0 for extent in weight):
        raise EncodingError(f"{BLOCK_MATMUL}: operand 1 has shape {weight}, expected packed weights")
    x = _tensor(call, 0, Fragments.lhs_types)
    if len(x) < 2 or not isinstance(x[-1], int):
        raise EncodingError(f"{BLOCK_MATMUL}: operand 0 has shape {x}, expected (..., m, k) with a number k")
    layout = layout_of(weight, form, x[-1])
    _tensor(call, 0, layout.lhs_types)
    shapes = _weight_shapes(call, layout, form, x[-1])
    leads = _expert_dims(call, layout, x) if call.attrs.experts else x[:-1]
    _check_call(call, BlockMatmulAttrs, 1 + len(shapes))
    points = _MINIMUMS if call.attrs.format else _POINTS
    for index, shape in enumerate(shapes, 1):
        found = _tensor(call, index, (layout.weight_type,) if index == 1 else _SCALES if index == 2 else points)
        _expect(call, index, found, shape)
    expression = Expression.parse(call.attrs.expression)
    others = list(call.args[1 + len(shapes) + bool(call.attrs.experts) :])
    if expression.num_operands > 1 + len(others):
        raise EncodingError(f"{BLOCK_MATMUL}: {expression} needs {expression.num_operands - 1} operands besides")
    dtype = expression.dtype(["float32", *(str(other.ty.dtype) for other in others)])
    return relax.TensorType([*leads, columns], dtype, call.args[0].ty.vdevice)


def _weight_shapes(call: relax.Call, layout: BlockLayout, form: BlockFormat, depth: int) -> list[list[int]]:
    columns, experts = int(call.attrs.columns), int(call.attrs.experts)
    if experts and isinstance(layout, Panels):
        return layout.shapes(columns, form, depth, experts)
    return layout.shapes(columns, form, depth)


def _expert_dims(call: relax.Call, layout: BlockLayout, x: list[Any]) -> list[Any]:
    """The extents of a product by experts before its columns."""
    if int(call.attrs.experts) < 0 or not isinstance(layout, Panels):
        raise EncodingError(f"{BLOCK_MATMUL}: found {call.attrs.experts} experts, expected some, in panels of columns")
    _check_call(call, BlockMatmulAttrs, 3)
    index = _tensor(call, 2, ("int32", "int64"))
    fits = len(index) == 2 and isinstance(index[1], int) and len(x) == 4 and x[2] == 1 and x[1] in (1, index[1])
    if not fits or differ(*(tvm.tirx.convert(extent) for extent in (x[0], index[0]))):
        raise EncodingError(
            f"{BLOCK_MATMUL}: operands 0 and 2 have shapes {x} and {index}, expected (tokens, 1 or used, 1, k) and "
            "(tokens, used)"
        )
    return [*index, 1]


def form_of(call: relax.Call) -> BlockFormat:
    """The format of the weights of a call of one of the operators."""
    attrs = call.attrs
    has_zeros = bool(attrs.zeros) if isinstance(attrs, BlockMatmulAttrs) else len(call.args) > 2
    return source_form(str(attrs.format), int(attrs.bits), int(attrs.block), has_zeros)


def weight_operands(call: relax.Call) -> int:
    """How many operands of a call of block_matmul, behind the first, are weights."""
    depth = int(call.args[0].ty.shape.values[-1])
    form, weight = form_of(call), [int(extent) for extent in call.args[1].ty.shape.values]
    return len(_weight_shapes(call, layout_of(weight, form, depth), form, depth))


def _check_call(call: relax.Call, attrs: type, operands: int) -> None:
    check_attrs(call, attrs)
    if len(call.args) < operands:
        raise EncodingError(f"{call.op.name}: found {len(call.args)} operands, expected {operands} at least")


def _check_block(call: relax.Call, block: int) -> None:
    if block <= 0 or block % GROUP:
        raise EncodingError(f"{call.op.name}: found blocks of {block}, expected a multiple of {GROUP}")
    if int(call.attrs.bits) not in (2, 4, 8):
        raise EncodingError(f"{call.op.name}: found weights of {call.attrs.bits} bits, expected 2, 4 or 8")


register_op(DEQUANTIZE_BLOCKS, dequantize_blocks, infer_dequantize_blocks)
register_op(BLOCK_MATMUL, block_matmul, infer_block_matmul)
register_op(BLOCK_ROWS, block_rows, infer_block_rows)
