"""Schedules for kernels of CPUs that no generator wrote: vectors inside, threads outside.

A PrimFunc is read as *stages*: what is stored at every point (`stages`). Stages that compute at the same places become
one *nest*, cheap ones are computed where they are read (`nests`). A nest's domain is cut into *boxes* where conditions
on positions change (`boxes`), and in each box neighbouring loops that advance every access alike become one (`flat`).
Then a box is written: maps (`map_box`) in vectors along the results, reductions (`reduce_box`) with accumulators in
registers, along the results or along what is reduced; loops that take long are shared among the cores (`loop_code`).
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
        PrimFunc of te.compute form, as legalization and FuseTIR make them.

    Raises
    ------
    NotStages
        The function is of another form, and stays as it is.
    """
    return write_function(func, form_nests(read_stages(func), list(func.params)), cpu)
