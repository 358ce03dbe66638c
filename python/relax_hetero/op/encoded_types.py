"""Type inference of ``relax.hetero.*``: the logical type of a result, and the first thing that is wrong with a call."""

from __future__ import annotations

import re
from typing import Any

import tvm
from tvm import relax

from ..encoding.encoding import LHS, RESULT, RHS, Encoding
from ..encoding.expression import Expression
from ..encoding.packed_layout import PackedLayout, misfit
from ..errors import EncodingError
from .definition import Infer, check_attrs, differ, is_one, number, register_op
from .encoded import (
    CONV,
    ELEMENTWISE,
    MATMUL,
    PREPACKED,
    RELAYOUT,
    SET,
    UNSET,
    EncodedConvAttrs,
    EncodedElementwiseAttrs,
    EncodedMatmulAttrs,
    EncodingAttrs,
    PrepackedAttrs,
    RelayoutAttrs,
    conv,
    elementwise,
    matmul,
    prepacked,
    relayout,
    set_encoding,
    unset_encoding,
)


def _tensor(call: relax.Call, index: int) -> relax.TensorType:
    ty = call.args[index].ty
    if not isinstance(ty, relax.TensorType):
        raise EncodingError(f"{call.op.name}: operand {index} is a {ty}, expected a tensor")
    return ty


def _extents(ty: relax.TensorType) -> list[Any] | None:
    return list(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else None


def _check_encoded(call: relax.Call, ty: relax.TensorType, encoding: Encoding, what: str) -> None:
    if ty.ndim not in (-1, len(encoding.index_map)):
        raise EncodingError(f"{call.op.name}: {what} has {ty.ndim} dimensions, encoding {encoding} is for others")
    for extent, name, size in zip(_extents(ty) or [], encoding.index_map, encoding.shape(), strict=False):
        if isinstance(extent, tvm.tirx.IntImm) and size >= 0 and int(extent) != size:
            raise EncodingError(f"{call.op.name}: {what} has {name} = {int(extent)}, encoding {encoding} says {size}")


def _check_layout(call: relax.Call, encoding: Encoding) -> None:
    for text in (call.attrs.layout, getattr(call.attrs, "from_layout", "")):
        wrong = misfit(PackedLayout.parse(text), encoding) if text else ""
        if wrong:
            raise EncodingError(f"{call.op.name}: layout {wrong}: encoding {encoding}")


def _check_broadcast(call: relax.Call, index: int, onto: relax.TensorType) -> None:
    """Refuse an operand that certainly does not broadcast to the shape of the result."""
    ty, wanted = _tensor(call, index), _extents(onto)
    found = _extents(ty)
    if onto.ndim >= 0 and ty.ndim > onto.ndim:
        raise EncodingError(f"{call.op.name}: operand {index} has {ty.ndim} dimensions, the result {onto.ndim}")
    if found is None or wanted is None:
        return
    for extent, size in zip(reversed(found), reversed(wanted), strict=False):
        if not is_one(extent) and differ(extent, size):
            raise EncodingError(
                f"{call.op.name}: operand {index} has shape {_text(found)}, expected one that broadcasts to "
                f"{_text(wanted)}"
            )


def _text(extents: list[Any]) -> str:
    return f"({', '.join(str(number(extent)) for extent in extents)})"


def _infer_same(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    ty = _tensor(call, 0)
    encoding = Encoding.parse(call.attrs.encoding)
    _check_encoded(call, ty, encoding, "the operand")
    _check_layout(call, encoding)
    # What has the result's encoding may be of another type: a residual, or what elementwise work made of the result.
    if encoding.operand_index != RESULT and str(ty.dtype) not in ("", encoding.element_type):
        raise EncodingError(f"{call.op.name}: the operand is {ty.dtype}, encoding {encoding} is for others")
    return ty


def _infer_prepacked(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    ty = _tensor(call, 0)
    attrs = call.attrs
    if not re.fullmatch("[0-9]{1,18}(x[0-9]{1,18})*", attrs.shape):
        raise EncodingError(f"{PREPACKED}: found shape {attrs.shape!r}, expected extents like '5x3'")
    shape = [int(extent) for extent in attrs.shape.split("x")]
    stored = PackedLayout.parse(attrs.layout).packed_shape(shape)
    extents = _extents(ty)
    found = None if extents is None else tuple(map(number, extents))
    if found != stored:
        raise EncodingError(
            f"{PREPACKED}: the operand has shape {found}; {tuple(shape)} stored as {attrs.layout} has {stored}"
        )
    logical = relax.TensorType(shape, ty.dtype, ty.vdevice)
    _check_encoded(call, logical, Encoding.parse(attrs.encoding), "the stored tensor")
    return logical


def _infer_product(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """Of matmul and conv: the result's extents are those of its operands, or follow from the encoding's sizes."""
    name, encoding = call.op.name, Encoding.parse(call.attrs.encoding)
    if encoding.operand_index != RESULT:
        raise EncodingError(
            f"{name}: takes the encoding of its result, found {encoding}, which is that of {encoding.operand_name}"
        )
    if (encoding.moves is not None) != (name == CONV):
        raise EncodingError(f"{name}: found {encoding}, the encoding of another op")
    _check_layout(call, encoding)
    one = tvm.tirx.IntImm("int64", 1)
    extents: dict[str, Any] = {"1": one}
    for index in (LHS, RHS):
        ty, operand = _tensor(call, index), encoding.of(index)
        _check_encoded(call, ty, operand, f"operand {index}")
        if str(ty.dtype) != operand.element_type:
            raise EncodingError(f"{name}: operand {index} is {ty.dtype}, its encoding is for {operand.element_type}")
        for dim, extent in zip(operand.index_map, _extents(ty) or [], strict=False):
            known = extents.setdefault(dim, extent)
            if dim != "1" and differ(known, extent):
                raise EncodingError(f"{name}: {dim} is {number(known)} in one operand and {number(extent)} in another")
    _add_places(encoding, extents)
    vdevice = _tensor(call, LHS).vdevice or _tensor(call, RHS).vdevice
    names = encoding.index_map
    if any(dim not in extents for dim in names):
        return relax.TensorType(None, encoding.element_type, vdevice, len(names))
    return relax.TensorType([extents[dim] for dim in names], encoding.element_type, vdevice)


def _add_places(encoding: Encoding, extents: dict[str, Any]) -> None:
    """How many places a convolution's windows have along each spatial dimension whose extents are known."""
    if encoding.moves is None:
        return
    spatial = len(encoding.moves.strides)
    for d in range(spatial):
        image, window = extents.get(f"x{d}"), extents.get(f"w{d}")
        if image is None or window is None:
            continue
        padding = encoding.moves.padding[d] + encoding.moves.padding[spatial + d]
        room = image + padding - ((window - 1) * encoding.moves.dilation[d] + 1)
        extents[f"y{d}"] = tvm.sym.Analyzer().simplify(tvm.tirx.floordiv(room, encoding.moves.strides[d]) + 1)


def _infer_matmul(call: relax.Call, ctx: relax.BlockBuilder) -> relax.TensorType:
    result = _infer_product(call, ctx)
    if len(call.args) > RESULT:
        dtype = str(_tensor(call, RESULT).dtype)
        if dtype != str(result.dtype):
            raise EncodingError(f"{MATMUL}: the initial accumulator is {dtype}, expected {result.dtype}")
        _check_broadcast(call, RESULT, result)
    return result


def _infer_elementwise(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    expression = Expression.parse(call.attrs.expression)
    if expression.num_operands > len(call.args):
        raise EncodingError(f"{ELEMENTWISE}: {expression} needs {expression.num_operands} operands")
    first = _tensor(call, 0)
    encoding = Encoding.parse(call.attrs.encoding)
    _check_encoded(call, first, encoding, "operand 0")
    _check_layout(call, encoding)
    for index in range(1, len(call.args)):
        _check_broadcast(call, index, first)
    dtype = expression.dtype([str(_tensor(call, i).dtype) for i in range(len(call.args))])
    if not dtype:
        raise EncodingError(f"{ELEMENTWISE}: {expression} is made of numbers alone, expected one of operands")
    return relax.TensorType(first.shape, dtype, first.vdevice, first.ndim if first.shape is None else -1)


def _named(name: str, attrs: type, counts: range, infer: Infer) -> Infer:
    """`infer` for calls that have the right attributes and number of operands; its messages begin with the op."""

    def checked(call: relax.Call, ctx: relax.BlockBuilder) -> relax.TensorType:
        check_attrs(call, attrs)
        if len(call.args) not in counts:
            expected = counts[0] if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            raise EncodingError(f"{name}: found {len(call.args)} operands, expected {expected}")
        try:
            return infer(call, ctx)
        except EncodingError as error:
            if str(error).startswith(f"{name}: "):
                raise
            raise EncodingError(f"{name}: {error}") from error

    return checked


_MANY = 1 << 10


def register_encoded_ops() -> None:
    """Make TVM and TVMScript know the operators."""
    for name, function, attrs, counts, infer in (
        (SET, set_encoding, EncodingAttrs, range(1, 2), _infer_same),
        (UNSET, unset_encoding, EncodingAttrs, range(1, 2), _infer_same),
        (RELAYOUT, relayout, RelayoutAttrs, range(1, 2), _infer_same),
        (PREPACKED, prepacked, PrepackedAttrs, range(1, 2), _infer_prepacked),
        (MATMUL, matmul, EncodedMatmulAttrs, range(2, 4), _infer_matmul),
        (CONV, conv, EncodedConvAttrs, range(2, 3), _infer_product),
        (ELEMENTWISE, elementwise, EncodedElementwiseAttrs, range(1, _MANY), _infer_elementwise),
    ):
        register_op(name, function, _named(name, attrs, counts, infer))
