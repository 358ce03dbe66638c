"""Operators of encoded tensors: ``relax.hetero.*``, in TVMScript ``R.hetero.*``.

Tensor types stay logical until materialization; what an encoded tensor is for (`Encoding`, as text) and, once
specialized, how it is stored (`PackedLayout`, as text) stands in the attributes of the op that makes it.

============================================================  =========================================================
``set_encoding(x, encoding, layout)``                         lay a plain tensor out
``unset_encoding(x, encoding, layout)``                       back to row-major; encoding and layout are the operand's
``relayout(x, encoding, layout, from_layout)``                from one layout to another
``prepacked(data, shape, encoding, layout)``                  stored bytes that are an encoded tensor of `shape` already
``matmul(lhs, rhs, init?, encoding, layout, kernel)``         product of encoded tensors (encoding: the result's)
``conv(data, weight, encoding, layout, kernel)``              convolution of encoded tensors (encoding: the result's)
``elementwise(x0, x1, ..., expression, encoding, layout)``    elementwise on encoded x0; plain operands broadcast
============================================================  =========================================================
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import relax

from ..encoding.encoding import Encoding
from ..encoding.expression import Expression
from ..encoding.packed_layout import PackedLayout
from .definition import make_call

SET, UNSET, RELAYOUT, PREPACKED, MATMUL, CONV, ELEMENTWISE = (
    f"relax.hetero.{name}"
    for name in ("set_encoding", "unset_encoding", "relayout", "prepacked", "matmul", "conv", "elementwise")
)
ENCODED_OPS = (SET, UNSET, RELAYOUT, PREPACKED, MATMUL, CONV, ELEMENTWISE)
PRODUCTS = (MATMUL, CONV)
"""Encoded ops that sum products of two encoded operands; their kernels take elementwise work along."""

EncodingLike = Encoding | str
LayoutLike = PackedLayout | str


@tvm_ffi.dataclasses.py_class("relax_hetero.EncodingAttrs")
class EncodingAttrs(tvm.ir.Attrs):
    """Of set_encoding and unset_encoding; `layout` is empty before SpecializeEncodings."""

    encoding: str
    layout: str


@tvm_ffi.dataclasses.py_class("relax_hetero.RelayoutAttrs")
class RelayoutAttrs(tvm.ir.Attrs):
    """Of relayout: encoding and layout of its result, layout of its operand."""

    encoding: str
    layout: str
    from_layout: str


@tvm_ffi.dataclasses.py_class("relax_hetero.PrepackedAttrs")
class PrepackedAttrs(tvm.ir.Attrs):
    """Of prepacked: the logical shape ("5x3"), and encoding and layout of the stored operand."""

    shape: str
    encoding: str
    layout: str


@tvm_ffi.dataclasses.py_class("relax_hetero.EncodedMatmulAttrs")
class EncodedMatmulAttrs(tvm.ir.Attrs):
    """Of matmul: encoding and layout of its result; `kernel`, its variant, is empty before SpecializeEncodings."""

    encoding: str
    layout: str
    kernel: str


@tvm_ffi.dataclasses.py_class("relax_hetero.EncodedConvAttrs")
class EncodedConvAttrs(tvm.ir.Attrs):
    """Of conv, as of matmul."""

    encoding: str
    layout: str
    kernel: str


@tvm_ffi.dataclasses.py_class("relax_hetero.EncodedElementwiseAttrs")
class EncodedElementwiseAttrs(tvm.ir.Attrs):
    """Of elementwise: the expression over operands x0, x1, ..., encoding and layout of the result."""

    expression: str
    encoding: str
    layout: str


def set_encoding(x: relax.Expr, encoding: EncodingLike, layout: LayoutLike = "") -> relax.Call:
    """Lay a tensor out for what `encoding` says; the type stays the logical one.

    Parameters
    ----------
    x : relax.Expr
        A plain tensor.
    encoding : Encoding or str
    layout : PackedLayout or str
        How it is stored; empty until SpecializeEncodings asks the device's resolver.

    Raises
    ------
    EncodingError
        If text is no encoding or layout, or the tensor's type is not the one the encoding is for.
    """
    return make_call(SET, [x], EncodingAttrs(_encoding(encoding), _layout(layout)))


def unset_encoding(x: relax.Expr, encoding: EncodingLike, layout: LayoutLike = "") -> relax.Call:
    """An encoded tensor as a plain one; `encoding` and `layout` are those of `x`. Raises as `set_encoding`."""
    return make_call(UNSET, [x], EncodingAttrs(_encoding(encoding), _layout(layout)))


def relayout(x: relax.Expr, encoding: EncodingLike, layout: LayoutLike, from_layout: LayoutLike) -> relax.Call:
    """An encoded tensor from one layout to another, for `encoding`."""
    return make_call(RELAYOUT, [x], RelayoutAttrs(_encoding(encoding), _layout(layout), _layout(from_layout)))


def prepacked(data: relax.Expr, shape: Sequence[int] | str, encoding: EncodingLike, layout: LayoutLike) -> relax.Call:
    """Bytes that are stored under `layout` already, as an encoded tensor of logical `shape`."""
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
        Of the accumulator's type; encoded as operand 2, or plain and broadcast against the result.
    encoding : Encoding or str
        The result's (operand 2).
    layout, kernel : str
        The result's layout and the name of the kernel's variant; empty until SpecializeEncodings.
    """
    operands = [lhs, rhs] if init is None else [lhs, rhs, init]
    return make_call(MATMUL, operands, EncodedMatmulAttrs(_encoding(encoding), _layout(layout), kernel))


def conv(
    data: relax.Expr, weight: relax.Expr, *, encoding: EncodingLike, layout: LayoutLike = "", kernel: str = ""
) -> relax.Call:
    """The convolution of encoded tensors, of one to three spatial dimensions.

    Parameters
    ----------
    data, weight : relax.Expr
        Encoded as operands 0 and 1 of the same op; logical shapes are those of NCHW and OIHW.
    encoding : Encoding or str
        The result's (operand 2), which says strides, padding, dilation and groups.
    layout, kernel : str
        As of `matmul`.
    """
    return make_call(CONV, [data, weight], EncodedConvAttrs(_encoding(encoding), _layout(layout), kernel))


def elementwise(
    *operands: relax.Expr, expression: Expression | str, encoding: EncodingLike, layout: LayoutLike = ""
) -> relax.Call:
    """An elementwise expression on encoded tensors.

    Parameters
    ----------
    operands : relax.Expr
        The first is encoded and has the result's shape; others are encoded alike, or plain and broadcast against it.
    expression : Expression or str
        Over ``x0``, ``x1``, ...
    encoding, layout
        The result's.
    """
    text = str(expression if isinstance(expression, Expression) else Expression.parse(expression))
    return make_call(ELEMENTWISE, list(operands), EncodedElementwiseAttrs(text, _encoding(encoding), _layout(layout)))


def encoded_op(expr: relax.Expr) -> str | None:
    """The name of the encoded op that `expr` calls, None for anything else."""
    if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name in ENCODED_OPS:
        return expr.op.name
    return None


def _encoding(encoding: EncodingLike) -> str:
    return str(encoding if isinstance(encoding, Encoding) else Encoding.parse(encoding))


def _layout(layout: LayoutLike) -> str:
    return str(layout if isinstance(layout, PackedLayout) or layout == "" else PackedLayout.parse(layout))
