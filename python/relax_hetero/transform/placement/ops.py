"""Placement of single ops. An op without an entry here has all its tensors on one device."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from ...op.cached_attention import CACHED_ATTENTION, PAGES
from ...op.traits import ops_where
from ..ir.op_names import IN_PLACE

# Ops whose tensors the host reads at run time: shapes, messages, assertions.
HOST_READS = frozenset(
    {
        "relax.tensor_to_shape",
        "relax.print",
        "relax.assert_op",
        "vm.builtin.tensor_to_shape",
        "vm.builtin.read_if_cond",
    }
)

MADE_ON_HOST = frozenset({"relax.shape_to_tensor", "relax.run.shape_to_tensor"})  # ops whose result the host produces

# Packed functions that copy to the device in the annotation of their result.
CROSSING = frozenset({"relax_hetero.to_device", "vm.builtin.to_device"})

CALLS_OF_FIRST_ARGUMENT = ops_where(lambda traits: traits.takes_callee)

MAKE_CLOSURE = "relax.make_closure"
INVOKE_CLOSURE = frozenset({"relax.invoke_closure", "relax.invoke_pure_closure"})

_WRITING = frozenset({*IN_PLACE, "relax.call_builtin_with_ctx"})  # ops that may write to their operands


def callee_name(call: relax.Call) -> str | None:
    """The packed function that is called, directly or as the first argument of ``call_pure_packed`` etc., if any.

    Returns None for an op, a PrimFunc or a Relax function.
    """
    op = call.op
    if isinstance(op, relax.ExternFunc):
        return str(op.global_symbol)
    if isinstance(op, tvm.ir.Op) and op.name in CALLS_OF_FIRST_ARGUMENT and len(call.args) > 0:
        first = call.args[0]
        if isinstance(first, relax.ExternFunc):
            return str(first.global_symbol)
    return None


def written_operands(call: relax.Call, count: int) -> Sequence[int]:
    """Indices among a call's `count` operands that it may write to, so that earlier copies are stale."""
    op = call.op
    all_operands = range(count)
    if isinstance(op, tvm.ir.Op):
        if op.name == CACHED_ATTENTION:
            return [PAGES]
        return all_operands if op.name in _WRITING else ()
    if isinstance(op, relax.ExternFunc):
        return () if str(op.global_symbol) in HOST_READS | CROSSING else all_operands
    if isinstance(op, (tvm.ir.GlobalVar, relax.Var)):
        return all_operands if isinstance(op.ty, relax.FuncType) and not op.ty.purity else ()
    return all_operands
