"""Operators of encoded tensors: ``relax.hetero.*``, in TVMScript ``R.hetero.*``.

Tensor types stay logical until materialization. The attributes of the op that makes an encoded tensor hold its role
(`Encoding`, as text) and, once specialized, its storage (`PackedLayout`, as text).

============================================================  =========================================================
``set_encoding(x, encoding, layout)``                         pack a plain tensor
``unset_encoding(x, encoding, layout)``                       back to row-major; encoding and layout are the operand's
``relayout(x, encoding, layout, from_layout)``                from one layout to another
``prepacked(data, shape, encoding, layout)``                  packed data as an encoded tensor of logical `shape`
``matmul(lhs, rhs, init?, encoding, layout, kernel)``         product of encoded tensors (encoding: the result's)
``conv(data, weight, encoding, layout, kernel)``              convolution of encoded tensors (encoding: the result's)
``elementwise(x0, x1, ..., expression, encoding, layout)``    elementwise on encoded x0; plain operands broadcast
============================================================  =========================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from ..encoding.encoding import LHS, RESULT, RHS, Encoding
from ..encoding.expression import Expression
from ..encoding.packed_layout import PackedLayout, unsupported_reason
from ..errors import EncodingError
from ..target.element_types import stored_type
from .definition import Infer, check_attrs, differ, is_one, make_call, number, register_op

SET, UNSET, RELAYOUT, PREPACKED, MATMUL, CONV, ELEMENTWISE = (
    f"relax.hetero.{name}"
    for name in ("set_encoding", "unset_encoding", "relayout", "prepacked", "matmul", "conv", "elementwise")
)
ENCODED_OPS = (SET, UNSET, RELAYOUT, PREPACKED, MATMUL, CONV, ELEMENTWISE)
PRODUCTS = (MATMUL, CONV)  # encoded ops that sum products of two encoded operands; their kernels compute epilogues

EncodingLike = Encoding | str
LayoutLike = PackedLayout | str


# Attributes and calls.


@tvm_ffi.dataclasses.py_class("relax_hetero.EncodingAttrs")
class EncodingAttrs(tvm.ir.Attrs):
    """Attributes of set_encoding and unset_encoding; `layout` is empty before SpecializeEncodings."""

    encoding: str
    layout: str


@tvm_ffi.dataclasses.py_class("relax_hetero.RelayoutAttrs")
class RelayoutAttrs(tvm.ir.Attrs):
    """Attributes of relayout: encoding and layout of its result, layout of its operand."""

    encoding: str
    layout: str
    from_layout: str


@tvm_ffi.dataclasses.py_class("relax_hetero.PrepackedAttrs")
class PrepackedAttrs(tvm.ir.Attrs):
    """Attributes of prepacked: the logical shape ("5x3"), and encoding and layout of the stored operand."""

    shape: str
    encoding: str
    layout: str


@tvm_ffi.dataclasses.py_class("relax_hetero.EncodedProductAttrs")
class EncodedProductAttrs(tvm.ir.Attrs):
    """Attributes of matmul and conv: encoding and layout of the result; `kernel` is set by SpecializeEncodings."""

    encoding: str
    layout: str
    kernel: str


@tvm_ffi.dataclasses.py_class("relax_hetero.EncodedElementwiseAttrs")
class EncodedElementwiseAttrs(tvm.ir.Attrs):
    """Attributes of elementwise: the expression over operands x0, x1, ..., encoding and layout of the result."""

    expression: str
    encoding: str
    layout: str


def set_encoding(x: relax.Expr, encoding: EncodingLike, layout: LayoutLike = "") -> relax.Call:
    """Pack a tensor for the role that `encoding` describes; its type stays the logical one.

    Parameters
    ----------
    x : relax.Expr
        A plain tensor.
    encoding : Encoding or str
        Role of the tensor: the op and the operand.
    layout : PackedLayout or str
        Storage of the tensor; empty until SpecializeEncodings asks the device's resolver.

    Raises
    ------
    EncodingError
        If text is not an encoding or a layout, or the tensor's type differs from the encoding's.
    """
    return make_call(SET, [x], EncodingAttrs(_encoding(encoding), _layout(layout)))


def unset_encoding(x: relax.Expr, encoding: EncodingLike, layout: LayoutLike = "") -> relax.Call:
    """Unpack an encoded tensor to a plain one. It raises the errors of `set_encoding`.

    Parameters
    ----------
    x : relax.Expr
        Encoded tensor.
    encoding, layout
        Encoding and layout of `x`.
    """
    return make_call(UNSET, [x], EncodingAttrs(_encoding(encoding), _layout(layout)))


def relayout(x: relax.Expr, encoding: EncodingLike, layout: LayoutLike, from_layout: LayoutLike) -> relax.Call:
    """Convert an encoded tensor from one layout to another, for `encoding`.

    Parameters
    ----------
    x : relax.Expr
        Encoded tensor.
    encoding : EncodingLike
        Encoding of the result.
    layout, from_layout : LayoutLike
        Layouts of the result and of `x`.
    """
    return make_call(RELAYOUT, [x], RelayoutAttrs(_encoding(encoding), _layout(layout), _layout(from_layout)))


def prepacked(data: relax.Expr, shape: Sequence[int] | str, encoding: EncodingLike, layout: LayoutLike) -> relax.Call:
    """Use data that is already packed under `layout` as an encoded tensor of logical `shape`.

    Parameters
    ----------
    data : relax.Expr
        Tensor of the packed shape.
    shape : sequence of int or str
        Logical extents, also as text, ``64x128``.
    encoding, layout
        Encoding and layout of the tensor, also as text.
    """
    text = shape if isinstance(shape, str) else "x".join(str(int(extent)) for extent in shape)
    attrs = PrepackedAttrs(text, _encoding(encoding), _layout(layout))
    return make_call(PREPACKED, [data], attrs)


def matmul(
    lhs: relax.Expr,
    rhs: relax.Expr,
    init: relax.Expr | None = None,
    *,
    encoding: EncodingLike,
    layout: LayoutLike = "",
    kernel: str = "",
) -> relax.Call:
    """The product of encoded tensors, ``init + lhs * rhs`` where an initial accumulator is given.

    Parameters
    ----------
    lhs, rhs : relax.Expr
        Encoded as operands 0 and 1 of the same op.
    init : relax.Expr, optional
        Initial value of the accumulator, of its type; encoded as operand 2, or plain and broadcast against the result.
    encoding : Encoding or str
        Encoding of the result (operand 2).
    layout, kernel : str
        Layout of the result and name of the kernel variant; empty until SpecializeEncodings.
    """
    operands = [lhs, rhs] if init is None else [lhs, rhs, init]
    return make_call(MATMUL, operands, EncodedProductAttrs(_encoding(encoding), _layout(layout), kernel))


def conv(
    data: relax.Expr, weight: relax.Expr, *, encoding: EncodingLike, layout: LayoutLike = "", kernel: str = ""
) -> relax.Call:
    """The convolution of encoded tensors, of one to three spatial dimensions.

    Parameters
    ----------
    data, weight : relax.Expr
        Encoded as operands 0 and 1 of the same op; logical shapes are NCHW and OIHW.
    encoding : Encoding or str
        Encoding of the result (operand 2), with strides, padding, dilation and groups.
    layout, kernel : str
        See `matmul`.
    """
    return make_call(CONV, [data, weight], EncodedProductAttrs(_encoding(encoding), _layout(layout), kernel))


def elementwise(
    *operands: relax.Expr, expression: Expression | str, encoding: EncodingLike, layout: LayoutLike = ""
) -> relax.Call:
    """An elementwise expression on encoded tensors.

    Parameters
    ----------
    operands : relax.Expr
        The first is encoded and has the result's shape; further ones have its encoding, or are plain and broadcast.
    expression : Expression or str
        Function of ``x0``, ``x1``, ...
    encoding, layout
        Encoding and layout of the result.
    """
    text = str(expression if isinstance(expression, Expression) else Expression.parse(expression))
    return make_call(ELEMENTWISE, list(operands), EncodedElementwiseAttrs(text, _encoding(encoding), _layout(layout)))


def encoded_op(expr: relax.Expr) -> str | None:
    """The name of the encoded op that `expr` calls; None for any other expression."""
    if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name in ENCODED_OPS:
        return expr.op.name
    return None


def _encoding(encoding: EncodingLike) -> str:
    return str(encoding if isinstance(encoding, Encoding) else Encoding.parse(encoding))


def _layout(layout: LayoutLike) -> str:
    return str(layout if isinstance(layout, PackedLayout) or layout == "" else PackedLayout.parse(layout))


# Type inference: the logical type of a result, or an error for the first mistake in a call.


def _tensor(call: relax.Call, index: int) -> relax.TensorType:
    ty = call.args[index].ty
    if not isinstance(ty, relax.TensorType):
        raise EncodingError(f"{call.op.name}: operand {index} is a {ty}, expected a tensor")
    return ty


def _extents(ty: relax.TensorType) -> list[Any] | None:
    return list(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else None


def _check_encoded(call: relax.Call, ty: relax.TensorType, encoding: Encoding, subject: str) -> None:
    if ty.ndim not in (-1, len(encoding.index_map)):
        raise EncodingError(f"{call.op.name}: {subject} has {ty.ndim} dimensions, encoding {encoding} is for others")
    for extent, name, size in zip(_extents(ty) or [], encoding.index_map, encoding.shape(), strict=False):
        if isinstance(extent, tvm.tirx.IntImm) and size >= 0 and int(extent) != size:
            raise EncodingError(
                f"{call.op.name}: {subject} has {name} = {int(extent)}, encoding {encoding} says {size}"
            )


def _check_layout(call: relax.Call, encoding: Encoding) -> None:
    for text in (call.attrs.layout, getattr(call.attrs, "from_layout", "")):
        reason = unsupported_reason(PackedLayout.parse(text), encoding) if text else ""
        if reason:
            raise EncodingError(f"{call.op.name}: layout {reason}: encoding {encoding}")


def _check_broadcast(call: relax.Call, index: int, result: relax.TensorType) -> None:
    """Refuse an operand that certainly does not broadcast to the shape of the result."""
    ty, result_shape = _tensor(call, index), _extents(result)
    shape = _extents(ty)
    if result.ndim >= 0 and ty.ndim > result.ndim:
        raise EncodingError(f"{call.op.name}: operand {index} has {ty.ndim} dimensions, the result {result.ndim}")
    if shape is None or result_shape is None:
        return
    for extent, size in zip(reversed(shape), reversed(result_shape), strict=False):
        if not is_one(extent) and differ(extent, size):
            raise EncodingError(
                f"{call.op.name}: operand {index} has shape {_shape_text(shape)}, expected one that broadcasts to "
                f"{_shape_text(result_shape)}"
            )


def _shape_text(extents: list[Any]) -> str:
    return f"({', '.join(str(number(extent)) for extent in extents)})"


def _infer_operand_type(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    ty = _tensor(call, 0)
    encoding = Encoding.parse(call.attrs.encoding)
    _check_encoded(call, ty, encoding, "the operand")
    _check_layout(call, encoding)
    # A tensor with the result's encoding may have another type: a residual, or the result after elementwise work.
    if encoding.operand_index != RESULT and str(ty.dtype) not in ("", stored_type(encoding.element_type)):
        raise EncodingError(f"{call.op.name}: the operand is {ty.dtype}, encoding {encoding} is for others")
    return ty


def _infer_prepacked(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    ty = _tensor(call, 0)
    attrs = call.attrs
    if not re.fullmatch("[0-9]{1,18}(x[0-9]{1,18})*", attrs.shape):
        raise EncodingError(f"{PREPACKED}: found shape {attrs.shape!r}, expected extents like '5x3'")
    logical_shape = [int(extent) for extent in attrs.shape.split("x")]
    packed_shape = PackedLayout.parse(attrs.layout).packed_shape(logical_shape)
    extents = _extents(ty)
    operand_shape = None if extents is None else tuple(map(number, extents))
    if operand_shape != packed_shape:
        raise EncodingError(
            f"{PREPACKED}: the operand has shape {operand_shape}, expected {packed_shape}: {tuple(logical_shape)} "
            f"packed as {attrs.layout}"
        )
    logical = relax.TensorType(logical_shape, ty.dtype, ty.vdevice)
    _check_encoded(call, logical, Encoding.parse(attrs.encoding), "the stored tensor")
    return logical


def _infer_product(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """Type of matmul and conv: the result's extents follow from the operands and the encoding."""
    name, encoding = call.op.name, Encoding.parse(call.attrs.encoding)
    if encoding.operand_index != RESULT:
        raise EncodingError(
            f"{name}: takes the encoding of its result, found {encoding}, the encoding of {encoding.operand_name}"
        )
    if (encoding.conv is not None) != (name == CONV):
        raise EncodingError(f"{name}: found {encoding}, the encoding of another op")
    _check_layout(call, encoding)
    extents: dict[str, Any] = {"1": tvm.tirx.IntImm("int64", 1)}
    for index in (LHS, RHS):
        ty, operand = _tensor(call, index), encoding.of(index)
        _check_encoded(call, ty, operand, f"operand {index}")
        if str(ty.dtype) != stored_type(operand.element_type):
            raise EncodingError(f"{name}: operand {index} is {ty.dtype}, its encoding is for {operand.element_type}")
        for dim, extent in zip(operand.index_map, _extents(ty) or [], strict=False):
            expected = extents.setdefault(dim, extent)
            if dim != "1" and differ(expected, extent):
                raise EncodingError(
                    f"{name}: {dim} is {number(expected)} in one operand and {number(extent)} in another"
                )
    _add_output_extents(encoding, extents)
    vdevice = _tensor(call, LHS).vdevice or _tensor(call, RHS).vdevice
    names = encoding.index_map
    if any(dim not in extents for dim in names):
        return relax.TensorType(None, encoding.element_type, vdevice, len(names))
    return relax.TensorType([extents[dim] for dim in names], encoding.element_type, vdevice)


def _add_output_extents(encoding: Encoding, extents: dict[str, Any]) -> None:
    """Add the output extent of a convolution along each spatial dimension whose extents are known."""
    if encoding.conv is None:
        return
    spatial = len(encoding.conv.strides)
    for d in range(spatial):
        image, window = extents.get(f"x{d}"), extents.get(f"w{d}")
        if image is None or window is None:
            continue
        padding = encoding.conv.padding[d] + encoding.conv.padding[spatial + d]
        last_start = image + padding - ((window - 1) * encoding.conv.dilation[d] + 1)
        extents[f"y{d}"] = tvm.sym.Analyzer().simplify(tvm.tirx.floordiv(last_start, encoding.conv.strides[d]) + 1)


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
        raise EncodingError(f"{ELEMENTWISE}: {expression} has no operands, expected at least one")
    return relax.TensorType(first.shape, dtype, first.vdevice, first.ndim if first.shape is None else -1)


def _register(name: str, function: Callable[..., relax.Call], attrs: type, counts: range, infer: Infer) -> None:
    """Register an operator; `infer` sees only calls with the right attributes and number of operands."""

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

    register_op(name, function, checked)


_MAX_OPERANDS = 1 << 10

_register(SET, set_encoding, EncodingAttrs, range(1, 2), _infer_operand_type)
_register(UNSET, unset_encoding, EncodingAttrs, range(1, 2), _infer_operand_type)
_register(RELAYOUT, relayout, RelayoutAttrs, range(1, 2), _infer_operand_type)
_register(PREPACKED, prepacked, PrepackedAttrs, range(1, 2), _infer_prepacked)
_register(MATMUL, matmul, EncodedProductAttrs, range(2, 4), _infer_matmul)
_register(CONV, conv, EncodedProductAttrs, range(2, 3), _infer_product)
_register(ELEMENTWISE, elementwise, EncodedElementwiseAttrs, range(1, _MAX_OPERANDS), _infer_elementwise)
