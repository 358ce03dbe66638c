"""Problems of encoded ops, which resolvers write kernels for: a function for each kind of op.

A problem has names instead of symbolic variables, so that equal problems are equal objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from ...encoding.block_formats import block_format
from ...encoding.block_panels import Panels
from ...encoding.block_weights import layout_of
from ...encoding.encoding import LHS, RESULT, RHS, Encoding, IndexMap
from ...encoding.expression import Expression
from ...encoding.heads import NAMES, Heads
from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import (
    AttentionProblem,
    BlockRowsProblem,
    CachedAttentionProblem,
    ConvProblem,
    ElementwiseProblem,
    Epilogue,
    MatmulProblem,
    Operand,
    PanelFragmentsProblem,
    QuantizedMatmulProblem,
    RowPhase,
    RowsProblem,
    Window,
)
from ...encoding.row_program import RowProgram
from ...errors import EncodingError
from ...op.attention import attention_sizes
from ...op.cached_attention import optional_operands
from ...op.quantized_matmul import form_of, weight_operands
from ...target.element_types import TF32
from ..ir.blocks import is_one, same_shape
from ..ir.extents import Symbols
from .encoded_values import Stored, StoredRows, extents_of


def product_problem(
    encoding: Encoding,
    operands: Sequence[Stored],
    result: Stored,
    expression: Expression | None = None,
    epilogue_operands: Sequence[Stored] = (),
    rows: StoredRows | None = None,
) -> MatmulProblem | ConvProblem:
    """The problem of an encoded product or convolution of `operands`; see `matmul_problem`.

    A convolution cannot have a row phase.
    """
    if encoding.conv is not None:
        return conv_problem(encoding, operands[0], operands[1], result, expression, epilogue_operands)
    init = operands[2] if len(operands) > 2 else None
    return matmul_problem(encoding, operands[0], operands[1], result, init, expression, epilogue_operands, rows)


def matmul_problem(
    encoding: Encoding,  # encoding of the op
    lhs: Stored,
    rhs: Stored,
    result: Stored,
    init: Stored | None = None,  # initial accumulator, broadcast against the result
    expression: Expression | None = None,  # epilogue, with the accumulator as ``x0``
    # Operands x1, x2, ... of the epilogue, broadcast against the result.
    epilogue_operands: Sequence[Stored] = (),
    rows: StoredRows | None = None,  # row phase
) -> MatmulProblem:
    """The problem of a product of encoded tensors."""
    symbols = Symbols()
    maps = encoding.index_maps
    operands = [s.operand(symbols, maps[i]) for s, i in ((lhs, LHS), (rhs, RHS))]
    init_operand = None if init is None else init.operand(symbols, _broadcast_map(init, result, maps[RESULT]))

    def operands_of(tensors: Sequence[Stored]) -> tuple[Operand, ...]:
        return tuple(s.operand(symbols, _broadcast_map(s, result, maps[RESULT])) for s in tensors)

    epilogue = None if expression is None else Epilogue(expression, operands_of(epilogue_operands))
    phase = None if rows is None else RowPhase(rows.program, rows.product, operands_of(rows.operands))
    out = result.operand(symbols, maps[RESULT])
    tf32 = encoding.element_types[LHS] == TF32
    return MatmulProblem(operands[0], operands[1], out, encoding.element_type, init_operand, epilogue, phase, tf32)


def conv_problem(
    encoding: Encoding,
    data: Stored,
    weight: Stored,
    result: Stored,
    expression: Expression | None = None,
    epilogue_operands: Sequence[Stored] = (),
) -> ConvProblem:
    """The problem of a convolution of encoded tensors; see `matmul_problem` for its parameters."""
    conv, symbols, maps = encoding.conv, Symbols(), encoding.index_maps
    assert conv is not None
    spatial = len(conv.strides)
    sizes = (encoding.sizes[f"w{d}"] for d in range(spatial))
    paddings = conv.padding[:spatial], conv.padding[spatial:]
    windows = tuple(map(Window, sizes, conv.strides, conv.dilation, *paddings))
    data_operand, weight_operand = data.operand(symbols, maps[LHS]), weight.operand(symbols, maps[RHS])
    epilogue = None
    if expression is not None:
        inputs = tuple(s.operand(symbols, _broadcast_map(s, result, maps[RESULT])) for s in epilogue_operands)
        epilogue = Epilogue(expression, inputs)
    out = result.operand(symbols, maps[RESULT])
    tf32 = encoding.element_types[LHS] == TF32
    return ConvProblem(
        data_operand, weight_operand, out, encoding.element_types[RESULT], windows, conv.groups, epilogue, tf32
    )


def elementwise_problem(expression: Expression, operands: Sequence[Stored], result: Stored) -> ElementwiseProblem:
    """The problem of an elementwise op, whose operands broadcast against the result."""
    symbols = Symbols()
    names = tuple(f"d{i}" for i in range(len(extents_of(result.ty))))
    inputs = tuple(s.operand(symbols, _broadcast_map(s, result, names)) for s in operands)
    return ElementwiseProblem(expression, inputs, result.operand(symbols, names))


def _broadcast_map(stored: Stored, result: Stored, names: IndexMap) -> IndexMap:
    """The index map of an operand that broadcasts to `names`: trailing dimensions align, extents of one are "1"."""
    shape, result_shape = extents_of(stored.ty), extents_of(result.ty)
    if len(shape) > len(names):
        raise EncodingError(f"an operand of {len(shape)} dimensions cannot be broadcast to {len(names)}")
    start = len(names) - len(shape)
    aligned = zip(shape, result_shape[start:], names[start:], strict=True)
    return tuple("1" if is_one(extent) and not is_one(size) else name for extent, size, name in aligned)


def rows_problem(program: RowProgram, operands: Sequence[Stored], result: Stored) -> RowsProblem:
    """The problem of `R.hetero.rows`, whose operands broadcast together.

    `operands`: plain tensors. `result`: plain tensor; its last extent is 1 if the result does not vary along a row.
    """
    symbols = Symbols()
    rank = len(extents_of(result.ty))
    # If all rows have one element, they still run along n.
    has_unit_rows = all(is_one(extent) for stored in operands for extent in extents_of(stored.ty)[-1:])

    def operand(stored: Stored) -> Operand:
        return _operand(symbols, stored, rank, has_unit_rows)

    return RowsProblem(program, tuple(map(operand, operands)), operand(result))


def _operand(symbols: Symbols, stored: Stored, rank: int, has_unit_rows: bool) -> Operand:
    """An operand of a row program: dimensions align at the last, which is "n"; extents of one are "1"."""
    shape = tuple(symbols.dim(extent) for extent in extents_of(stored.ty))
    names = [f"d{axis}" for axis in range(rank - 1)] + ["n"]
    aligned = zip(shape, names[rank - len(shape) :], strict=True)
    index_map = tuple("1" if extent == 1 and not (has_unit_rows and name == "n") else name for extent, name in aligned)
    return Operand(shape, str(stored.ty.dtype), index_map, PackedLayout.identity(len(shape)))


def attention_problem(call: relax.Call, result: relax.TensorType) -> AttentionProblem:
    """Problem of a call to `R.hetero.attention`."""
    heads, sizes = Heads.parse(call.attrs.heads), attention_sizes(call)
    symbols = Symbols()

    def operand(ty: relax.TensorType, index_map: tuple[str, ...]) -> Operand:
        return Stored.plain(ty).operand(symbols, index_map)

    types = [arg.ty for arg in call.args]
    query, key, value = (operand(ty, heads_map.index_map) for ty, heads_map in zip(types, heads.operands, strict=False))
    masks = tuple(operand(ty, _mask_map(ty, sizes)) for ty in types[3:])
    return AttentionProblem(
        query,
        key,
        value,
        operand(result, heads.result.index_map),
        (heads.query.starts, heads.key.starts, heads.value.starts),
        tuple((name, symbols.dim(sizes[name])) for name in NAMES),
        Epilogue(Expression.parse(call.attrs.scores), masks),
        str(call.attrs.causal),
        bool(call.attrs.nan_to_zero),
        bool(call.attrs.tf32),
    )


def _mask_map(ty: relax.TensorType, sizes: dict[str, Any]) -> tuple[str, ...]:
    extents = extents_of(ty)
    names = "bhmn"[4 - len(extents) :]
    return tuple(
        "1" if is_one(extent) and not is_one(sizes[name]) else name for extent, name in zip(extents, names, strict=True)
    )


_CACHED_MAPS = {
    "qkv": ("m", "k"),
    "pages": ("p", "h", "e"),
    "table": ("s", "t"),
    "sequences": ("m",),
    "positions": ("m",),
    "rotation": ("m", "r"),
    "q_norm": ("d",),
    "k_norm": ("d",),
    "sinks": ("h",),
}
"""Index maps of the operands of `R.hetero.cached_attention`."""


def cached_attention_problem(call: relax.Call, out: relax.TensorType, order: str) -> CachedAttentionProblem:
    """Problem of a call to `R.hetero.cached_attention`, with the device's order of keys in pages."""
    symbols, attrs = Symbols(), call.attrs
    names = ["qkv", "pages", "table", "sequences", "positions", *optional_operands(attrs)]
    operands = (
        Stored.plain(arg.ty).operand(symbols, _CACHED_MAPS[name]) for arg, name in zip(call.args, names, strict=True)
    )
    return CachedAttentionProblem(
        tuple(operands),
        Stored.plain(out).operand(symbols, ("m", "n")),
        int(attrs.heads),
        int(attrs.kv_heads),
        int(attrs.size),
        float(attrs.scale),
        int(attrs.window),
        float(attrs.softcap),
        str(attrs.rotary),
        str(attrs.norms),
        float(attrs.eps),
        str(attrs.rows),
        order,
        bool(attrs.sinks),
        int(attrs.shared_values),
    )


def quantized_matmul_problem(call: relax.Call, result: relax.TensorType) -> QuantizedMatmulProblem:
    """Problem of a call to `R.hetero.block_matmul`."""
    symbols, attrs = Symbols(), call.attrs

    def names_of(ty: relax.TensorType, last: str) -> tuple[str, ...]:
        return (*(f"b{axis}" for axis in range(len(extents_of(ty)) - 2)), "m", last)

    stored = [Stored.plain(arg.ty) for arg in call.args]
    end, form = 1 + weight_operands(call), form_of(call)
    shape, epilogue, lhs_names = extents_of(result), None, names_of(stored[0].ty, "k")
    lhs = stored[0].operand(symbols, lhs_names)
    layout = layout_of([int(extent) for extent in extents_of(stored[1].ty)], form, int(extents_of(stored[0].ty)[-1]))
    weights = tuple(weight.operand(symbols, layout.index_map) for weight in stored[1:end])
    count = len(weights) // int(attrs.products)
    routes = stored[end : end + bool(attrs.experts) + bool(attrs.shares)]
    index, shares, *_ = [*(operand.operand(symbols, lhs_names[:-2]) for operand in routes), None, None]
    end += len(routes)
    biases = stored[end : end + bool(attrs.biases) * int(attrs.products)]
    others, names = stored[end + len(biases) :], names_of(result, "n")
    expression = Expression.parse(attrs.expression)
    if expression != Expression.operand(0):
        maps = [names if same_shape(extents_of(x.ty), shape) else _column_map(x, shape[-1]) for x in others]
        operands = (x.operand(symbols, index_map) for x, index_map in zip(others, maps, strict=True))
        epilogue = Epilogue(expression, tuple(operands))
    return QuantizedMatmulProblem(
        lhs,
        weights[:count],
        Stored.plain(result).operand(symbols, names),
        form.block,
        epilogue,
        form.bits,
        form if isinstance(layout, Panels) or form.superblock_bytes else None,
        int(attrs.experts),
        index,
        int(attrs.activation_bits),
        str(attrs.rows),
        weights[count:],
        shares,
        tuple(bias.operand(symbols, ("e", "n")) for bias in biases),
        str(attrs.rounded),
    )


def block_rows_problem(call: relax.Call, result: relax.TensorType) -> BlockRowsProblem:
    """Problem of a call to `R.hetero.block_rows`."""
    symbols = Symbols()
    *weights, index = (Stored.plain(arg.ty) for arg in call.args)
    layout = layout_of(extents_of(weights[0].ty), block_format(str(call.attrs.format)), int(call.attrs.depth))
    return BlockRowsProblem(
        tuple(weight.operand(symbols, layout.index_map) for weight in weights),
        index.operand(symbols, ("m",)),
        Stored.plain(result).operand(symbols, ("m", "k")),
        block_format(str(call.attrs.format)),
        int(call.attrs.rows),
    )


def panel_fragments_problem(call: relax.Call, result: relax.TensorType) -> PanelFragmentsProblem:
    """Problem of a call to `R.hetero.panel_fragments`."""
    symbols, attrs = Symbols(), call.attrs
    names = tuple(f"d{axis}" for axis in range(len(extents_of(result))))
    return PanelFragmentsProblem(
        Stored.plain(call.args[0].ty).operand(symbols, Panels.index_map),
        Stored.plain(result).operand(symbols, names),
        block_format(str(attrs.format)),
        int(attrs.depth),
        int(attrs.columns),
        int(attrs.part),
    )


def _column_map(operand: Stored, columns: Any) -> tuple[str, ...]:
    """The index map of a scalar, or of one number for each column."""
    extents = extents_of(operand.ty)
    return ("n",) if same_shape(extents, [columns]) else ("1",) * len(extents)
