"""Ties of kernels without a schedule: operands whose memory a result may take (`tir.core.ties`).

A kernel of legalization and FuseTIR, loops around stores, ties an operand if it is one nest of loops that reads the
operand at the index where it stores the result: such loops are correct in any order, and so is every schedule of them
that computes no element twice. Schedules of this library annotate their ties themselves (`tir.loops`), and kernels of
GPUs have no ties.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from ...tir.core.ties import TIED, with_ties
from ...tir.loops.nests import form_nests, tied_in
from ...tir.loops.stages import NotStages, has_schedule, read_stages
from ..ir.rewriting import copy_module


def annotate_ties(mod: tvm.IRModule) -> tvm.IRModule:
    """Annotate the ties of kernels that lack a schedule and an annotation."""
    functions = dict(mod.functions.items())
    for gv, func in mod.functions.items():
        if isinstance(func, tirx.PrimFunc) and TIED not in func.attrs and _is_cpu(func) and not has_schedule(func):
            functions[gv] = _annotated(func)
    return copy_module(mod, functions)


def _is_cpu(func: tirx.PrimFunc) -> bool:
    # In a CUDA graph a kernel reads the arena directly, without the binding table: ties need not pay there.
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
