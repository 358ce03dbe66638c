"""The operator of attention: ``relax.hetero.attention``, in TVMScript ``R.hetero.attention``.

Its operands and result are plain row-major tensors. FormAttention forms it where a device has a kernel for it;
MaterializeEncodings turns it into calls of kernels.
"""

from __future__ import annotations

from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from ..encoding.encoding import DYNAMIC
from ..encoding.expression import Expression
from ..encoding.heads import NAMES, Heads
from ..errors import EncodingError
from .definition import check_attrs, differ, extents_of, is_one, make_call, register_op

ATTENTION = "relax.hetero.attention"
CAUSAL = ("", "top_left", "bottom_right")


@tvm_ffi.dataclasses.py_class("relax_hetero.AttentionAttrs")
class AttentionAttrs(tvm.ir.Attrs):
    """Attributes of attention; see `attention`."""

    heads: str
    scores: str
    causal: str
    nan_to_zero: bool
    tf32: bool = False


def attention(
    query: relax.Expr,
    key: relax.Expr,
    value: relax.Expr,
    *masks: relax.Expr,
    heads: Heads | str,
    scores: Expression | str = "x0",
    causal: str = "",
    nan_to_zero: bool = False,
    tf32: bool = False,
) -> relax.Call:
    """``softmax(scores(query * key^T)) * value``, for each head separately.

    Parameters
    ----------
    query, key, value : relax.Expr
        Tensors; all three may be slices of one tensor.
    masks : relax.Expr
        Operands ``x1``, ``x2``, ... of `scores`, which broadcast to (batch, heads, queries, keys).
    heads : Heads or str
        Positions of the heads in the tensors.
    scores : Expression or str
        Function that is applied to a product (``x0``) before softmax.
    causal : str
        "top_left": query i sees keys up to i; "bottom_right": the last query sees all keys; "": every query sees all.
    nan_to_zero : bool
        Whether a row whose scores are all -inf gives zeros, not NaN.
    tf32 : bool
        Whether products of float32 tensors may round their operands to 10 bits of fraction, where tensor cores do.

    Raises
    ------
    EncodingError
        If text is not a map of heads or an expression, or an operand is not a Relax expression.
    """
    if causal not in CAUSAL:
        raise EncodingError(f"{ATTENTION}: found causal={causal!r}, expected one of {CAUSAL}")
    text = str(heads if isinstance(heads, Heads) else Heads.parse(heads))
    expression = str(scores if isinstance(scores, Expression) else Expression.parse(scores))
    attrs = AttentionAttrs(text, expression, causal, nan_to_zero, tf32)
    return make_call(ATTENTION, [query, key, value, *masks], attrs)


def attention_sizes(call: relax.Call) -> dict[str, Any]:
    """The extents of the iteration dimensions of a call, as PrimExprs; EncodingError where a tensor does not fit."""
    heads = Heads.parse(call.attrs.heads)
    sizes: dict[str, Any] = {
        name: tvm.tirx.IntImm("int64", size) for name, size in zip(NAMES, heads.sizes, strict=True) if size != DYNAMIC
    }
    for index, mapping in enumerate(heads.operands):
        extents = extents_of(call, index)
        if len(extents) != len(mapping.dims):
            raise EncodingError(
                f"{ATTENTION}: operand {index} has {len(extents)} dimensions, its map ({mapping}) {len(mapping.dims)}"
            )
        for extent, names in zip(extents, mapping.dims, strict=True):
            if len(names) == 1:
                sizes.setdefault(names[0], extent)
    unknown = [name for name in NAMES if name not in sizes]
    if unknown:
        raise EncodingError(f"{ATTENTION}: no operand gives the sizes {unknown} of {heads}")
    for index, mapping in enumerate(heads.operands):
        for extent, names, start in zip(extents_of(call, index), mapping.dims, mapping.starts, strict=True):
            _check_fits(extent, [sizes[name] for name in names], start, index, heads)
    return sizes


def _check_fits(extent: Any, sizes: list[Any], start: int, index: int, heads: Heads) -> None:
    if not all(isinstance(size, tvm.tirx.IntImm) for size in (extent, *sizes)):
        return
    needed = prod(map(int, sizes))
    if start + needed > int(extent):
        raise EncodingError(
            f"{ATTENTION}: operand {index} has a dimension of {int(extent)}, {heads} reads {needed} from {start} on"
        )


def infer_attention(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """The type of `attention`; EncodingError for operands that do not fit."""
    check_attrs(call, AttentionAttrs)
    if len(call.args) < 3 or len(call.args) < 2 + Expression.parse(call.attrs.scores).num_operands:
        raise EncodingError(
            f"{ATTENTION}: found {len(call.args)} operands, expected query, key, value and those of {call.attrs.scores}"
        )
    sizes = attention_sizes(call)
    score_shape = [sizes[name] for name in "bhmn"]
    for index in range(3, len(call.args)):
        extents = extents_of(call, index)
        aligned = zip(reversed(extents), reversed(score_shape), strict=False)
        if len(extents) > 4 or any(not is_one(extent) and differ(extent, size) for extent, size in aligned):
            raise EncodingError(
                f"{ATTENTION}: operand {index} has shape {extents}, expected one that broadcasts to {score_shape}"
            )
    shape = []
    for names in Heads.parse(call.attrs.heads).result.dims:
        extent = prod((sizes[name] for name in names), start=tvm.tirx.IntImm("int64", 1))
        shape.append(tvm.sym.Analyzer().simplify(extent))
    query = call.args[0].ty
    return relax.TensorType(shape, query.dtype, query.vdevice)


register_op(ATTENTION, attention, infer_attention)
