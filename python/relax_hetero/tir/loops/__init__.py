"""Schedules of stock CPU kernels: vectors inside, threads outside.

A PrimFunc is read as *stages*, the values stored at every point (`stages`). Stages over the same domain are fused into
one *nest*, and cheap ones are inlined (`nests`). A nest's iteration domain is split into *boxes* where conditions on
positions change (`boxes`), and in each box neighbouring loops are collapsed if every access allows it (`flat`). A box
becomes code: maps (`write`) in vectors along the results, reductions (`reduce_box`) with accumulators in registers,
along the results or along the reduced axis. Long loops are shared among the cores (`loop_code`).
"""

from __future__ import annotations

from tvm import tirx

from ...target.cpu_target import CpuTarget
from .nests import form_nests
from .stages import NotStages, has_schedule, read_stages
from .write import write_function

__all__ = ["NotStages", "has_schedule", "schedule"]


def schedule(func: tirx.PrimFunc, cpu: CpuTarget) -> tirx.PrimFunc:
    """The function with vector code and parallel loops.

    Parameters
    ----------
    func : PrimFunc
        PrimFunc in te.compute form, as from legalization and FuseTIR.

    Raises
    ------
    NotStages
        If the function has another form.
    """
    return write_function(func, form_nests(read_stages(func), list(func.params)), cpu)
