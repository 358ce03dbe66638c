"""FormRows: softmax, norms and other work on rows become one op where the device has a kernel for it.

Before::

    m = R.mean(x, axis=[-1], keepdims=True)
    c = R.subtract(x, m)
    v = R.mean(R.multiply(c, c), axis=[-1], keepdims=True)
    y = R.divide(c, R.sqrt(R.add(v, R.const(1e-5))))

After::

    y = R.hetero.rows(x, program="r0 = mean(x0); r1 = mean(multiply(subtract(x0, r0), subtract(x0, r0))); divide(...)")

What joins is said by `row_regions`: reductions along the last axes, softmax, layer and RMS norms, and the elementwise
ops before and behind them on the same rows. Work on the results of products that PropagateEncodings gave to their
kernels stays there. Reductions over several axes are left alone unless all of the row is normalized by them: images
lie channels last, and their means over height and width are not of rows.

Kernels compute in single precision. Programs of half-precision ops cast where the results of those ops are rounded,
so that a model gets the numbers that it gets op by op.

Assumes a placed module (RealizeVDevice); values of two devices never meet in a region. A second run changes nothing.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from ...encoding.encoding import Encoding
from ...encoding.problem import RowsProblem
from ...encoding.resolver import answers_of
from ...op.encoded import UNSET
from ...op.rows import rows
from ..ir.blocks import Block, Emitter, is_one, rewrite_function, same_shape, shape_of, tensor_type, with_regions
from ..ir.declare import declare_pass
from ..ir.remarks import record_missed
from ..ir.rewriting import op_name, relax_functions, with_functions
from ..ir.targets import target_of
from .row_regions import RowGrowth, RowRegion
from .row_terms import RowOp, is_wide, row_op

MIN_COLUMNS = 4
"""Shorter rows would fill a vector with little but padding."""


def form_rows(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; the very module where there is nothing to do."""
    return with_functions(
        mod, {gv: rewrite_function(func, _Former(gv.name_hint).rewrite) for gv, func in relax_functions(mod)}
    )


FormRows = declare_pass("FormRows", form_rows)


class _Former:
    """The regions of one function."""

    def __init__(self, function: str) -> None:
        self.function = function

    def rewrite(self, block: Block) -> list[relax.Binding] | None:
        regions: dict[int, RowRegion] = {}
        taken: set[int] = set()
        for index, binding in enumerate(block.bindings):
            op = row_op(binding.value) if index not in taken else None
            if op is None:
                self._missed(binding)
                continue
            region = self._region(block, index, op, taken)
            if region is not None:
                regions[region.end] = region
                taken.update([*region.inside, region.end])
        return with_regions(block, regions, _write)

    def _region(self, block: Block, index: int, op: RowOp, claimed: set[int]) -> RowRegion | None:
        var = block.bindings[index].var
        reason = _why_not(op, var)
        if reason:
            self._remark(var, op.call.op.name, reason)
            return None
        if reason is None:
            return None
        region = RowGrowth(block, index, op, claimed).region()
        if region is None:
            self._remark(var, op.call.op.name, "its operands do not broadcast along the rows")
        elif op.axes > 1 and (is_one(region.shape[-1]) or _is_image(block, op)):
            self._remark(var, op.call.op.name, f"reduces {op.axes} axes, expected one, or a norm of what is no image")
            return None
        return region

    def _missed(self, binding: relax.Binding) -> None:
        if is_wide(binding.value):
            self._remark(
                binding.var, binding.value.op.name, "its axes are not the last ones, or its type has no kernel"
            )

    def _remark(self, var: relax.Var, op: str, reason: str) -> None:
        record_missed(self.function, var.name, op.removeprefix("relax."), reason)


def _why_not(op: RowOp, var: relax.Var) -> str | None:
    """Why no region starts at an op; empty where one may, None where the device makes that clear."""
    if RowsProblem not in answers_of(target_of(var.ty.vdevice)).problems:
        return None
    shape = shape_of(op.call.args[0])
    if shape is None or shape_of(var) is None:
        return "its shape is not known"
    length = 1
    for extent in shape[len(shape) - op.axes :]:
        length = length * extent
    if isinstance(length, tirx.IntImm) and int(length) < MIN_COLUMNS:
        return f"its rows have {int(length)} elements, expected {MIN_COLUMNS} or more"
    if any(isinstance(extent, tirx.IntImm) and int(extent) == 0 for extent in shape):
        return "it has no elements"
    return ""


def _is_image(block: Block, op: RowOp) -> bool:
    """Return whether the rows come from a convolution, which stores them otherwise."""
    value = block.definition(op.call.args[0])
    return op_name(value) == UNSET and Encoding.parse(value.attrs.encoding).moves is not None


def _write(emitter: Emitter, region: RowRegion, var: relax.Var) -> None:
    operands = []
    for number, operand in enumerate(region.operands):
        value = operand.value
        if operand.shape is not None and not same_shape(operand.shape, shape_of(value) or []):
            ty = tensor_type(operand.shape, str(value.ty.dtype), value.ty)
            value = emitter.emit(relax.op.reshape(value, list(operand.shape)), ty, f"{var.name}_x{number}")
        operands.append(value)
    call = rows(*operands, program=region.program, ops=",".join(dict.fromkeys(region.ops)))
    if same_shape(region.shape, shape_of(var) or []):
        emitter.bind(var, relax.Call(call.op, list(call.args), call.attrs, ret_ty=var.ty))
        return
    result = emitter.emit(call, tensor_type(region.shape, str(var.ty.dtype), var.ty), f"{var.name}_rows")
    reshape = relax.op.reshape(result, shape_of(var))
    emitter.bind(var, relax.Call(reshape.op, list(reshape.args), reshape.attrs, ret_ty=var.ty))
