"""Which operands of a module's kernels may be the memory of a result (`tir.core.ties`), where no generator has said so.

Kernels as legalization and FuseTIR make them, loops around stores, tie an operand if all there is to compute is one
nest of loops that reads the operand where it stores the result: such loops are right in any order, and so is what a
schedule makes of them that computes no element twice. Schedules of this library note their ties
themselves (`tir.loops`), and kernels of GPUs tie nothing.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from ...tir.core.ties import TIED, with_ties
from ...tir.loops.nests import form_nests, tied_in
from ...tir.loops.stages import NotStages, has_schedule, read_stages
from ..ir.rewriting import copy_module


def annotate_ties(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with what kernels without a schedule tie noted on them; those that say so already keep it."""
    functions = dict(mod.functions.items())
    for gv, func in mod.functions.items():
        if isinstance(func, tirx.PrimFunc) and TIED not in func.attrs and _is_cpu(func) and not has_schedule(func):
            functions[gv] = _annotated(func)
    return copy_module(mod, functions)


def _is_cpu(func: tirx.PrimFunc) -> bool:
    # In a CUDA graph a kernel finds what the arena holds without the table, so that taking memory need not pay there.
    return "target" not in func.attrs or "gpu" not in func.attrs["target"].keys


def _annotated(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    try:
        nests = form_nests(read_stages(kernel), list(kernel.params))
    except NotStages:
        return kernel
    pairs = [pair for pair, _ in tied_in(nests, list(kernel.params))] if len(nests) == 1 else []
    if not pairs:
        return kernel
    numbers = {param: number for number, param in enumerate(kernel.params)}
    return with_ties(kernel, [(numbers[operand], numbers[result]) for operand, result in pairs])
