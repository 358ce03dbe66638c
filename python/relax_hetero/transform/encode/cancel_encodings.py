"""Cancellation of encodings: encoded ops become stock ops again where a device lacks a layout for them.

``R.hetero.matmul`` becomes permute_dims (where index maps are permuted), astype (where element types differ), matmul
and add (of an initial accumulator), ``R.hetero.conv`` the convolution; ``R.hetero.elementwise`` becomes the Relax ops
that its expression names.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, tirx

from ...encoding.encoding import LHS, RESULT, RHS, Encoding
from ...encoding.expression import Expression
from ..ir.relax_expressions import from_expression
from .encoded_convolutions import stock_convolution
from .encoded_values import extents_of
from .replaced_bindings import Replacement


def stock_product(encoding: Encoding, operands: Sequence[relax.Expr], out: Replacement) -> list[relax.Binding]:
    """Bindings that compute `out.var` as the product or convolution of plain operands; see `stock_matmul`."""
    return (stock_matmul if encoding.conv is None else stock_convolution)(encoding, operands, out)


def stock_matmul(
    encoding: Encoding,  # encoding of the op
    operands: Sequence[relax.Expr],  # lhs, rhs and perhaps the initial accumulator
    out: Replacement,  # writer of the bindings
) -> list[relax.Binding]:
    """Bindings that compute `out.var` as the product of plain operands."""
    vdevice = out.var.ty.vdevice
    batch = encoding.batch_dims
    lhs = _operand(encoding.of(LHS), operands[LHS], (*batch, "m", "k"), out)
    rhs = _operand(encoding.of(RHS), operands[RHS], (*batch, "k", "n"), out)
    lhs_type, rhs_type, accumulator = encoding.element_types
    if lhs_type != rhs_type or "int" in lhs_type and lhs_type != accumulator:
        lhs, rhs = (_cast(value, accumulator, name, out) for value, name in ((lhs, "lhs"), (rhs, "rhs")))
    out_dtype = accumulator if str(lhs.ty.dtype) != accumulator else None
    value = out.stock(relax.op.matmul(lhs, rhs, out_dtype=out_dtype), vdevice, "matmul")
    value = _as_result(value, (*batch, "m", "n"), encoding.index_maps[RESULT], out)
    if len(operands) > 2:
        value = out.stock(relax.op.add(operands[2], value), vdevice, "add")
    return out.finish(value)


def stock_elementwise(expression: Expression, operands: Sequence[relax.Expr], out: Replacement) -> list[relax.Binding]:
    """Bindings that compute `out.var` as an expression of plain operands."""

    def emit(call: relax.Expr, ty: relax.TensorType) -> relax.Expr:
        return out.bind(call, ty, str(call.op.name).rpartition(".")[2])

    return out.finish(from_expression(expression, operands, emit, out.var.ty.vdevice))


def _operand(encoding: Encoding, value: relax.Expr, dims: tuple[str, ...], out: Replacement) -> relax.Expr:
    """An operand in the form of stock matmul: dimensions in the order of `dims`, the batch aligned at the end."""
    names = encoding.index_map
    operand_name = "lhs" if encoding.operand_index == LHS else "rhs"
    ordered = [name for name in dims if name in names]
    if ordered != [name for name in names if name != "1"]:
        order = [i for i, name in enumerate(names) if name == "1"] + [names.index(name) for name in ordered]
        value = out.stock(relax.op.permute_dims(value, order), out.var.ty.vdevice, f"{operand_name}_permuted")
        names = tuple(names[i] for i in order)
    aligned = [name if name in names else "1" for name in dims]
    if _without_leading_ones(names) == _without_leading_ones(aligned):
        return value
    extents = dict(zip(names, extents_of(value.ty), strict=True))
    shape = [extents[name] if name != "1" else tirx.IntImm("int64", 1) for name in aligned]
    return out.stock(relax.op.reshape(value, shape), out.var.ty.vdevice, f"{operand_name}_reshaped")


def _without_leading_ones(names: Sequence[str]) -> list[str]:
    first = next((i for i, name in enumerate(names) if name != "1"), len(names))
    return list(names[first:])


def _cast(value: relax.Expr, dtype: str, operand_name: str, out: Replacement) -> relax.Expr:
    if str(value.ty.dtype) == dtype:
        return value
    return out.stock(relax.op.astype(value, dtype), out.var.ty.vdevice, f"{operand_name}_{dtype}")


def _as_result(
    value: relax.Expr, names: tuple[str, ...], result_names: tuple[str, ...], out: Replacement
) -> relax.Expr:
    """The product, whose dimensions are `names`, permuted and reshaped to the op's result."""
    ordered = [name for name in result_names if name != "1"]
    if list(names) != ordered:
        call = relax.op.permute_dims(value, [names.index(name) for name in ordered])
        value = out.stock(call, out.var.ty.vdevice, "permuted")
    if len(extents_of(value.ty)) != len(result_names):
        value = out.stock(relax.op.reshape(value, extents_of(out.var.ty)), out.var.ty.vdevice, "reshaped")
    return value
