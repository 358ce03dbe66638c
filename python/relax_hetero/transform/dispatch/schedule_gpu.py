"""ScheduleGPU: kernels of GPUs get a schedule, blocks and threads.

Before::

    for i in range(4096):
        with T.sblock("exp"): y[i] = T.exp(x[i])

After::

    for block in T.thread_binding(4, thread="blockIdx.x"):
        for thread in T.thread_binding(1024, thread="threadIdx.x"):
            with T.sblock("exp"): ...

The rules are TVM's (``tvm.s_tir.dlight``). Kernels that bind threads already are left as written.

Assumes BindTargets. A second run changes nothing.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from ..ir.declare import declare_pass
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


ScheduleGPU = declare_pass("ScheduleGPU", schedule_gpu)
