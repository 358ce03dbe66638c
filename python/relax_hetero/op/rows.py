"""The operator of row programs: ``relax.hetero.rows``, in TVMScript ``R.hetero.rows``.

Its operands and result are plain row-major tensors. FormRows forms it where a device has a kernel for it;
MaterializeEncodings turns it into calls of kernels.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from ..encoding.row_program import RowProgram, operands_of
from ..errors import EncodingError
from .definition import check_attrs, differ, extents_of, is_one, make_call, number, register_op

ROWS = "relax.hetero.rows"


@tvm_ffi.dataclasses.py_class("relax_hetero.RowsAttrs")
class RowsAttrs(tvm.ir.Attrs):
    """Attributes of rows: the program over operands x0, x1, ..., and the ops that it replaces, separated by commas."""

    program: str
    ops: str


def rows(*operands: relax.Expr, program: RowProgram | str, ops: str = "") -> relax.Call:
    """Apply a program to every row along the last dimension.

    Parameters
    ----------
    operands : relax.Expr
        Tensors whose shapes broadcast together to the shape of the rows. An operand whose last extent is 1 has one
        value for a row.
    program : RowProgram or str
        Program, such as ``"r0 = max(x0); r1 = sum(exp(subtract(x0, r0))); ..."``. The result's last extent is 1 if its
        expression uses no operand that varies along a row.
    ops : str
        Names of the ops that the kernel computes, for profiles.

    Raises
    ------
    EncodingError
        If text is not a program, or an operand is not a Relax expression.
    """
    text = str(program if isinstance(program, RowProgram) else RowProgram.parse(program))
    return make_call(ROWS, operands, RowsAttrs(text, ops))


def infer_rows(call: relax.Call, _ctx: relax.BlockBuilder) -> relax.TensorType:
    """The type of `rows`; EncodingError for operands that do not fit its program, or each other."""
    check_attrs(call, RowsAttrs)
    program = RowProgram.parse(call.attrs.program)
    types = [arg.ty for arg in call.args]
    if len(types) != program.num_operands:
        raise EncodingError(f"{ROWS}: found {len(types)} operands, {program} has {program.num_operands}")
    shapes = [extents_of(call, index) for index in range(len(types))]
    row_shape = _broadcast(shapes)
    if not row_shape:
        raise EncodingError(f"{ROWS}: found scalars only, expected an operand of rows")
    used = [shapes[index] for index in operands_of(program.result) if index < program.num_operands]
    shape = row_shape[:-1] + [_broadcast([*used, [tvm.tirx.IntImm("int64", 1)]])[-1]]
    vdevice = next((ty.vdevice for ty in types if ty.vdevice is not None), None)
    return relax.TensorType(shape, program.dtype([str(ty.dtype) for ty in types]), vdevice)


def _broadcast(shapes: list[list[Any]]) -> list[Any]:
    """The common broadcast shape; EncodingError where two extents certainly differ."""
    result: list[Any] = [tvm.tirx.IntImm("int64", 1)] * max(map(len, shapes))
    for index, shape in enumerate(shapes):
        for axis, extent in enumerate(shape, len(result) - len(shape)):
            if is_one(result[axis]):
                result[axis] = extent
            elif not is_one(extent) and differ(extent, result[axis]):
                raise EncodingError(
                    f"{ROWS}: operand {index} has extent {number(extent)} where another has {number(result[axis])}; "
                    "expected 1 or that"
                )
    return result


register_op(ROWS, rows, infer_rows)
