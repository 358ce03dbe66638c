"""Why runs of kernels end where they do, and kernels stay outside of runs, in words."""

from __future__ import annotations

import tvm
from tvm import relax

from ...artifact.commands import SingleCall
from ..ir.blocks import Block
from ..ir.op_names import CALL_TIR_OPS, TRANSFER
from ..ir.rewriting import op_name
from .command_regions import MAX_CALLS, Run
from .kernel_calls import KernelCalls

_CALL_PACKED = ("relax.call_packed", "relax.call_pure_packed", "relax.invoke_closure")


def why_ended(block: Block, run: Run) -> str:
    """Description of the binding that ended a run, since it could neither join nor move: ``a transfer (lv3)``."""
    if run.ended_by is None:
        return "end of block"
    if len(run.calls) >= MAX_CALLS:
        return f"length ({MAX_CALLS} kernels)"
    binding = block.bindings[run.ended_by]
    return f"{_what(binding)} ({binding.var.name})"


def single_calls(function: str, block: Block, order: list[int | Run], calls: KernelCalls) -> list[SingleCall]:
    """The kernels of a block that no run took."""
    found: list[SingleCall] = []
    for item in order:
        binding = None if isinstance(item, Run) else block.bindings[item]
        if binding is not None and op_name(binding.value) in CALL_TIR_OPS:
            call = calls.of(binding)
            why = "no other kernel to run with" if call is not None else "it cannot be called as a plain function"
            if call is not None and call.over:
                why = "it works in place"
            found.append(SingleCall(function, binding.var.name, binding.value.args[0].name_hint, why))
    return found


def _what(binding: relax.Binding) -> str:
    value = binding.value
    if isinstance(binding, relax.MatchCast):
        return "check of shapes"
    if isinstance(value, (relax.If, relax.Function)):
        return "control flow" if isinstance(value, relax.If) else "function"
    if not isinstance(value, relax.Call):
        return type(value).__name__
    name = op_name(value)
    if name == TRANSFER:
        return "transfer"
    in_args = name in CALL_TIR_OPS or name in _CALL_PACKED
    callee = value.args[0] if in_args else value.op
    if name in CALL_TIR_OPS:
        return f"kernel {callee.name_hint}"
    if isinstance(callee, tvm.ir.GlobalVar):
        return f"call of {callee.name_hint}"
    if isinstance(callee, relax.ExternFunc):
        return f"call of {callee.global_symbol}"
    return str(name or "call of a closure")
