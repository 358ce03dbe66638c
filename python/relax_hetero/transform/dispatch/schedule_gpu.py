"""ScheduleGPU: PrimFuncs with a GPU target get a GPU schedule.

Assumes BindTargets. Functions that already bind threads are left as written.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from ..ir.rewriting import copy_module


def schedule_gpu(mod: tvm.IRModule) -> tvm.IRModule:
    """Apply TVM's rule-based schedules, matrix products and reductions first, to the module's GPU functions."""
    gpu = {
        gv: func
        for gv, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc) and "gpu" in getattr(func.attrs.get("target"), "keys", ())
    }
    if not gpu:
        return mod
    from tvm.s_tir import dlight  # slow to import, and only GPU modules need it

    rules = dlight.gpu
    scheduled = dlight.ApplyDefaultSchedule(
        rules.Matmul(), rules.GEMV(), rules.Reduction(), rules.GeneralReduction(), rules.Fallback()
    )(tvm.IRModule(gpu))
    by_name = {gv.name_hint: func for gv, func in scheduled.functions.items()}
    return copy_module(mod, {gv: by_name[gv.name_hint] if gv in gpu else f for gv, f in mod.functions.items()})


def ScheduleGPU() -> tvm.transform.Pass:
    """Schedule the PrimFuncs of GPU devices.

    Returns
    -------
    tvm.transform.Pass
    """

    @tvm.transform.module_pass(opt_level=0, name="ScheduleGPU")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return schedule_gpu(mod)

    return run
