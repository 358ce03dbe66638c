"""Operators of block-quantized weights: ``relax.hetero.dequantize_blocks``, ``block_matmul`` and ``block_rows``.

Importers emit dequantize_blocks, which defines the numbers of the weights. FormQuantizedMatmuls turns products and
gathers of these numbers into block_matmul and block_rows, and MaterializeEncodings those into calls of kernels. All
tensors are plain: a uint8 holds two 4-bit weights, an int32 eight, because TVM miscomputes with its 4-bit types.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from ..encoding.block_formats import BlockFormat, block_format
from ..encoding.block_panels import source_form
from ..encoding.block_weights import GROUP, BlockLayout, Fragments, bytes_of_row, layout_of
from ..encoding.expression import Expression
from ..errors import EncodingError
from .definition import check_attrs, differ, extents_of, make_call, number, register_op

DEQUANTIZE_BLOCKS, BLOCK_MATMUL = "relax.hetero.dequantize_blocks", "relax.hetero.block_matmul"
BLOCK_ROWS = "relax.hetero.block_rows"

ACTIVATION_BITS = (8, 16)  # bits of the integers that the other operand of a product may be rounded to
ROWS = ("", "decode", "chunk")  # kinds of rows of the other operand, as in `cached_attention`; empty for any

_ZERO_POINT_TYPES = ("uint8", "float32")
_FACTOR_TYPES = ("float16",)
_SCALE_TYPES = ("float32", "float16", "int8", "uint8")


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
    products: int = 1
    shares: bool = False
    biases: bool = False
    rounded: str = ""


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
    """Dequantize weights to float32: ``(weight - zero) * scale``, or as a file's format defines it.

    Parameters
    ----------
    data : relax.Expr
        With a format: (n, bytes) of uint8, rows of a file's bytes. Without: (n, bytes) of uint8, weights of 2, 4 or 8
        bits, the first of a byte in its lowest bits; at least as many bytes as `depth` needs.
    scales : relax.Expr, optional
        Without a format: (n, blocks) of float32, ``blocks = ceil(depth / block)``.
    zeros : relax.Expr, optional
        Zero points, (n, blocks) of uint8 or float32; by default the middle (8 for 4 bits).
    depth : int
        Weights of a row; the result has the shape (n, depth).
    block : int
        Number of weights that share a scale, a multiple of 8. A format implies it.
    bits : int
        Bits of a weight: 2, 4 or 8. A format implies it.
    format : str
        A name of `relax_hetero.encoding.block_formats.FILE_FORMATS`: "q4_k", "f16", ...
    activation_bits : int
        Precision of products with these weights: their other operand may be rounded to integers of 8 or 16 bits, with
        a scale for each block of at most 32 or 128. Devices without such products keep more bits.
    rows : str
        "decode" or "chunk", as in cached_attention: CPUs then multiply a row with the same instructions for any number
        of rows. "": they choose instructions by the number of rows.

    Raises
    ------
    EncodingError
        If an operand is not a Relax expression, the format or the kind of rows is unknown, or activation_bits is
        neither 8 nor 16.
    """
    if format:
        form = block_format(format)
        block, bits = form.block, form.bits
    operands = [data, *(operand for operand in (scales, zeros) if operand is not None)]
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
    products: int = 1,
    shares: bool = False,
    biases: bool = False,
    rounded: str = "",
) -> relax.Call:
    """A product with block-quantized weights: ``expression(x * weights, ...)``, dequantized as by dequantize_blocks.

    Parameters
    ----------
    x : relax.Expr
        (..., m, k) of float32; with weights in fragments also of float16 or bfloat16. With experts: (tokens, 1, 1, k)
        or (tokens, used, 1, k) of float32.
    operands : relax.Expr
        The weights as packed by the layout of the device: in panels of columns, one operand of bytes
        (`relax_hetero.encoding.block_panels`); in fragments, weights, scales and perhaps zero points
        (`relax_hetero.encoding.block_weights`). Then the operands ``x1``, ``x2``, ... of the expression.
    columns, block : int
        Extent of n, and number of weights along k that share a scale. A format implies the latter.
    bits : int
        Bits of a weight. A format implies it.
    zeros : bool
        Whether zero points are given.
    expression : Expression or str
        Function that is applied to a sum (``x0``) before it is stored.
    format : str
        Format of weights of a file, as in dequantize_blocks.
    experts : int
        Number of matrices of the weights; 0: one matrix for all rows. With experts, the weights are followed
        by an operand (tokens, used) of int32 or int64, the matrices that each token is multiplied by. The result then
        has the shape (tokens, used, 1, columns); rows of negative indices are neither computed nor written, and indices
        above the last matrix are clamped.
    activation_bits : int
        8: `x` is rounded to integers of 8 bits with a scale for each 32; 16: it is not.
    rows : str
        See `dequantize_blocks`.
    products : int
        2: the weights are followed by those of a second product of the same rows, with experts in fragments; the
        expression's ``x0`` is the sum of the first, ``x1`` that of the second, and ``x2``, ... are operands.
    shares : bool
        Whether the indices of experts are followed by an operand (tokens, used) of float32: products of a token are
        multiplied by its shares and added up, in order, except for those of negative indices. The result then has the
        shape (tokens, columns).
    biases : bool
        Whether an operand (experts, columns) of float32 for each product follows, of experts in fragments: the bias of
        the row's expert is added to the sum.
    rounded : str
        With experts in fragments, "float16" or "bfloat16" that `x`, of float32, is rounded to.

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
    attrs = BlockMatmulAttrs(
        columns, block, bits, zeros, text, format, experts, activation_bits, rows, products, shares, biases, rounded
    )
    return make_call(BLOCK_MATMUL, [x, *operands], attrs)


@tvm_ffi.dataclasses.py_class("relax_hetero.BlockRowsAttrs")
class BlockRowsAttrs(tvm.ir.Attrs):
    """Attributes of block_rows; see `block_rows`."""

    rows: int
    depth: int
    format: str


def block_rows(*operands: relax.Expr, rows: int, depth: int, format: str) -> relax.Call:
    """Gather rows of weights as float32; indices out of range are clamped.

    Parameters
    ----------
    operands : relax.Expr
        The weights as in `block_matmul`, then the indices, (m,) of int32 or int64.
    rows, depth : int
        Extents of the weights; the result has the shape (m, depth).
    format : str
        A name that `relax_hetero.encoding.block_formats.block_format` knows.

    Raises
    ------
    EncodingError
        If an operand is not a Relax expression.
    """
    return make_call(BLOCK_ROWS, list(operands), BlockRowsAttrs(rows, depth, format))


def infer_block_rows(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """The type of `block_rows`; EncodingError for operands that do not fit."""
    check_attrs(call, BlockRowsAttrs)
    _check_call(call, BlockRowsAttrs, 2)
    form, depth = block_format(str(call.attrs.format)), int(call.attrs.depth)
    layout = layout_of(_packed_weight(call, 0), form, depth)
    shapes = layout.shapes(int(call.attrs.rows), form, depth)
    _check_call(call, BlockRowsAttrs, len(shapes) + 1)
    _check_weights(call, 0, shapes, layout)
    index = _tensor(call, len(shapes), ("int32", "int64"))
    if len(index) != 1:
        raise EncodingError(f"{BLOCK_ROWS}: operand {len(shapes)} has shape {index}, expected one dimension")
    return relax.TensorType([index[0], depth], "float32", call.args[0].ty.vdevice)


def _packed_weight(call: relax.Call, index: int) -> list[int]:
    """Shape of the operand with the quants of packed weights."""
    weight = _tensor(call, index, ("int32", "uint8"))
    if len(weight) not in (2, 4) or not all(isinstance(extent, int) and extent > 0 for extent in weight):
        raise EncodingError(f"{call.op.name}: operand {index} has shape {weight}, expected packed weights")
    return weight


def _check_weights(call: relax.Call, first: int, shapes: list[list[int]], layout: BlockLayout) -> None:
    """Check types and shapes of the operands of weights, from number `first` on."""
    last_types = _FACTOR_TYPES if call.attrs.format else _ZERO_POINT_TYPES
    dtypes = [(layout.weight_type,), _SCALE_TYPES, last_types]
    for index, shape in enumerate(shapes):
        _expect_shape(call, first + index, _tensor(call, first + index, dtypes[index]), shape)


def _tensor(call: relax.Call, index: int, dtypes: tuple[str, ...]) -> list[Any]:
    """The extents of an operand after a check of its element type; constants as ints."""
    ty = call.args[index].ty
    if not isinstance(ty, relax.TensorType) or str(ty.dtype) not in dtypes:
        raise EncodingError(f"{call.op.name}: operand {index} is a {ty}, expected a tensor of {' or '.join(dtypes)}")
    return [number(extent) for extent in extents_of(call, index)]


def _expect_shape(call: relax.Call, index: int, shape: list[Any], expected: list[Any]) -> None:
    if shape != expected:
        raise EncodingError(f"{call.op.name}: operand {index} has shape {shape}, expected {expected}")


def infer_dequantize_blocks(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """The type of `dequantize_blocks`; EncodingError for operands that do not fit."""
    check_attrs(call, DequantizeBlocksAttrs)
    depth, block = int(call.attrs.depth), int(call.attrs.block)
    if call.attrs.format:
        return _infer_file_rows(call, depth)
    _check_call(call, DequantizeBlocksAttrs, 2)
    _check_block(call, block)
    data, row_bytes = _tensor(call, 0, ("uint8",)), bytes_of_row(depth, int(call.attrs.bits))
    if len(data) != 2 or not all(isinstance(extent, int) for extent in data) or data[1] < row_bytes:
        raise EncodingError(
            f"{DEQUANTIZE_BLOCKS}: operand 0 has shape {data}, expected rows of {row_bytes} bytes or more"
        )
    for index in range(1, len(call.args)):
        shape = _tensor(call, index, ("float32",) if index == 1 else _ZERO_POINT_TYPES)
        _expect_shape(call, index, shape, [data[0], -(-depth // block)])
    return relax.TensorType([data[0], depth], "float32", call.args[0].ty.vdevice)


def _infer_file_rows(call: relax.Call, depth: int) -> relax.TensorType:
    form = block_format(str(call.attrs.format))
    _check_call(call, DequantizeBlocksAttrs, 1)
    if len(call.args) > 1:
        raise EncodingError(f"{DEQUANTIZE_BLOCKS}: found {len(call.args)} operands, expected rows of {form.name} alone")
    data = _tensor(call, 0, ("uint8",))
    if len(data) != 2 or data[1] != form.row_bytes(depth):
        expected = f"({form.row_bytes(depth)} bytes a row of {depth} weights of {form.name})"
        raise EncodingError(f"{DEQUANTIZE_BLOCKS}: operand 0 has shape {data}, expected {expected}")
    return relax.TensorType([data[0], depth], "float32", call.args[0].ty.vdevice)


def infer_block_matmul(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """The type of `block_matmul`; EncodingError for operands that do not fit."""
    _check_call(call, BlockMatmulAttrs, 2)
    columns = int(call.attrs.columns)
    if not call.attrs.format:
        _check_block(call, int(call.attrs.block))
    form = form_of(call)
    weight = _packed_weight(call, 1)
    x = _tensor(call, 0, Fragments.lhs_types)
    if len(x) < 2 or not isinstance(x[-1], int):
        raise EncodingError(f"{BLOCK_MATMUL}: operand 0 has shape {x}, expected (..., m, k) with a number k")
    layout = layout_of(weight, form, x[-1])
    _tensor(call, 0, layout.lhs_types)
    dtype, rounded = str(call.args[0].ty.dtype), str(call.attrs.rounded)
    if rounded and not (call.attrs.experts and dtype == "float32" and rounded in layout.lhs_types[1:]):
        raise EncodingError(
            f"{BLOCK_MATMUL}: found {dtype} that is rounded to {rounded}, expected float32 to float16 or bfloat16 of "
            "experts in fragments"
        )
    dtype = rounded or dtype
    if not layout.multiplies(form, dtype):
        raise EncodingError(f"{BLOCK_MATMUL}: operand 0 is of {dtype}, which kernels do not multiply by {form.name}")
    products, experts = int(call.attrs.products), int(call.attrs.experts)
    has_shares, has_biases = bool(call.attrs.shares), bool(call.attrs.biases)
    is_special = products > 1 or has_shares or has_biases
    if products not in (1, 2) or (is_special and not (experts and isinstance(layout, Fragments))):
        parts = f"{' and shares' * has_shares}{' and biases' * has_biases}"
        raise EncodingError(
            f"{BLOCK_MATMUL}: found {products} products{parts} of {experts} experts, expected one product, or two "
            "products, shares or biases of experts in fragments"
        )
    shapes = _weight_shapes(call, layout, form, x[-1])
    leading_dims = _expert_dims(call, layout, x) if experts else x[:-1]
    first = 1 + len(shapes) * products
    _check_call(call, BlockMatmulAttrs, first)
    for begin in range(1, first, len(shapes)):
        _check_weights(call, begin, shapes, layout)
    expression = Expression.parse(call.attrs.expression)
    first += bool(experts) + has_shares
    _check_call(call, BlockMatmulAttrs, first + has_biases * products)
    for index in range(first, first + has_biases * products):
        _expect_shape(call, index, _tensor(call, index, ("float32",)), [experts, columns])
    epilogue_operands = list(call.args[first + has_biases * products :])
    if expression.num_operands > products + len(epilogue_operands):
        raise EncodingError(f"{BLOCK_MATMUL}: {expression} needs {expression.num_operands - products} more operands")
    dtype = expression.dtype([*["float32"] * products, *(str(operand.ty.dtype) for operand in epilogue_operands)])
    return relax.TensorType([*leading_dims, columns], dtype, call.args[0].ty.vdevice)


def _weight_shapes(call: relax.Call, layout: BlockLayout, form: BlockFormat, depth: int) -> list[list[int]]:
    return layout.shapes(int(call.attrs.columns), form, depth, int(call.attrs.experts) or 1)


def _expert_dims(call: relax.Call, layout: BlockLayout, x: list[Any]) -> list[Any]:
    """The extents of the result of a product with experts, without its columns."""
    experts, columns = int(call.attrs.experts), int(call.attrs.columns)
    if experts < 0 or not layout.fits_matrices(columns):
        raise EncodingError(f"{BLOCK_MATMUL}: found {experts} experts with {columns} columns, expected whole fragments")
    place = 1 + weight_operands(call)
    _check_call(call, BlockMatmulAttrs, 1 + place)
    index = _tensor(call, place, ("int32", "int64"))
    fits = len(index) == 2 and isinstance(index[1], int) and len(x) == 4 and x[2] == 1 and x[1] in (1, index[1])
    if not fits or differ(*(tvm.tirx.convert(extent) for extent in (x[0], index[0]))):
        raise EncodingError(
            f"{BLOCK_MATMUL}: operands 0 and {place} have shapes {x} and {index}, expected (tokens, 1 or used, 1, k) "
            "and (tokens, used)"
        )
    if not call.attrs.shares:
        return [*index, 1]
    _check_call(call, BlockMatmulAttrs, 2 + place)
    _expect_shape(call, place + 1, _tensor(call, place + 1, ("float32",)), index)
    return index[:1]


def form_of(call: relax.Call) -> BlockFormat:
    """The format of the weights of a call to one of the operators."""
    attrs = call.attrs
    has_zeros = bool(attrs.zeros) if isinstance(attrs, BlockMatmulAttrs) else len(call.args) > 2
    return source_form(str(attrs.format), int(attrs.bits), int(attrs.block), has_zeros)


def weight_operands(call: relax.Call) -> int:
    """Number of operands of a call to block_matmul that are weights; they follow the first operand."""
    depth = int(call.args[0].ty.shape.values[-1])
    form, weight = form_of(call), [int(extent) for extent in call.args[1].ty.shape.values]
    return int(call.attrs.products) * len(_weight_shapes(call, layout_of(weight, form, depth), form, depth))


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
