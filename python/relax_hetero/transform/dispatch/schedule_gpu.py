"""ScheduleGPU: kernels of GPUs that no generator wrote get blocks and threads.

Before::

    for i in range(4096):
        with T.sblock("exp"): y[i] = T.exp(x[i])

After::

    for block in T.thread_binding(16, thread="blockIdx.x"):
        for thread in T.thread_binding(64, thread="threadIdx.x"):
            x_vector[0:4] = x[block * 256 + thread * 4 : ...]     # 16 bytes at once
            for lane in T.unroll(4): y_vector[lane] = T.exp(x_vector[lane])
            y[block * 256 + thread * 4 : ...] = y_vector[0:4]

The device's back end schedules; the rules for GPUs are in `relax_hetero.tir.cuda.loops`. Kernels that bind threads
already are left as written. A kernel of a form that no rule reads runs statement by statement, in one thread where
nothing shows that iterations are independent: slower, still correct.

Assumes BindTargets. A second run changes nothing.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm_ffi import StructuralKey, VisitInterrupt, structural_walk

from ...target.backend import backend_of
from ...tir.cuda.loops.scatter import SEVERAL_LAUNCHES
from ..ir.declare import declare_pass
from ..ir.rewriting import copy_module
from .split_launches import split_launches


def schedule_gpu(mod: tvm.IRModule) -> tvm.IRModule:
    """Schedule the kernels of `mod` whose target is a GPU and that bind no threads yet."""
    done: dict[StructuralKey, tirx.PrimFunc] = {}
    functions = dict(mod.functions.items())
    scheduled: set[tvm.ir.GlobalVar] = set()
    for gv, func in mod.functions.items():
        if not isinstance(func, tirx.PrimFunc) or not _is_gpu(func):
            continue
        if SEVERAL_LAUNCHES in func.attrs:
            scheduled.add(gv)
            continue
        if _binds_threads(func.body):
            continue
        key = StructuralKey(func)
        if key not in done:
            done[key] = backend_of(func.attrs["target"]).schedule(func)
        functions[gv] = done[key]
        scheduled.add(gv)
    changed = copy_module(mod, functions) if done else mod
    return split_launches(changed, scheduled) if scheduled else mod


ScheduleGPU = declare_pass("ScheduleGPU", schedule_gpu)


def _is_gpu(func: tirx.PrimFunc) -> bool:
    return "gpu" in getattr(func.attrs.get("target"), "keys", ()) and "tirx.is_scheduled" not in func.attrs


def _binds_threads(body: tirx.Stmt) -> bool:
    def stop(loop: tirx.For) -> VisitInterrupt | None:
        return VisitInterrupt(loop) if loop.kind == tirx.ForKind.THREAD_BINDING else None

    def attribute(node: tirx.AttrStmt) -> VisitInterrupt | None:
        return VisitInterrupt(node) if node.attr_key == "thread_extent" else None

    return structural_walk(body, [(tirx.For, stop), (tirx.AttrStmt, attribute)]) is not None
