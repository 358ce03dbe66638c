"""ScheduleCPU: kernels of llvm CPUs without a schedule get one, with vectors inside and threads outside.

Before::

    for i, j in T.grid(56, 256):                # two stages and a tensor between them
        with T.sblock("add"): t[i, j] = x[i, j] + b[j]
    for i, j in T.grid(56, 256):
        with T.sblock("exp"): y[i, j] = T.exp(t[i, j])

After::

    for task in T.parallel(2):                  # where the work is worth waking a thread
        for i in range(28 * task, 28 * (task + 1)):
            for j in range(8):
                for lane in T.vectorized(16): y[i * 256 + j * 32 + lane] = T.exp(x[...] + b[...])
                for lane in T.vectorized(16): ...

The rules are in `relax_hetero.tir.loops`. A kernel that matches no rule keeps TVM's loops: slower, still correct. A
missed-optimization remark names it.

Assumes BindTargets. A second run changes nothing.
"""

from __future__ import annotations

import logging

import tvm
from tvm import tirx
from tvm_ffi import StructuralKey

from ...target.cpu_target import cpu_target_of
from ...tir.loops import NotStages, has_schedule, schedule
from ...tir.recurrence import RECURRENCE, RecurrenceProblem, recurrence_kernel
from ..ir.declare import declare_pass
from ..ir.kernels import ops_of
from ..ir.remarks import record_missed
from ..ir.rewriting import copy_module

_log = logging.getLogger("relax_hetero")


def schedule_cpu(mod: tvm.IRModule) -> tvm.IRModule:
    """Schedule the kernels of CPUs that lack a schedule."""
    scheduled: dict[StructuralKey, tirx.PrimFunc] = {}
    functions = dict(mod.functions.items())
    for gv, func in mod.functions.items():
        if not isinstance(func, tirx.PrimFunc) or not _is_cpu(func.attrs.get("target")):
            continue
        if RECURRENCE not in func.attrs and has_schedule(func):
            continue
        key = StructuralKey(func)
        if key not in scheduled:
            scheduled[key] = _scheduled(gv.name_hint, func)
        functions[gv] = scheduled[key]
    return copy_module(mod, functions)


ScheduleCPU = declare_pass("ScheduleCPU", schedule_cpu)


def _is_cpu(target: tvm.target.Target | None) -> bool:
    return target is not None and target.kind.name == "llvm" and cpu_target_of(target).isa.vector_bytes > 0


def _scheduled(name: str, func: tirx.PrimFunc) -> tirx.PrimFunc:
    if RECURRENCE in func.attrs:
        kernel = recurrence_kernel(RecurrenceProblem.of(func), cpu_target_of(func.attrs["target"]))
        return kernel.without_attr("global_symbol").with_attrs(dict(func.without_attr(RECURRENCE).attrs))
    try:
        return schedule(func, cpu_target_of(func.attrs["target"]))
    except NotStages as reason:
        why = str(reason)
    except Exception as error:  # a rule that fails must not fail the model: the stock loops are correct
        why = f"{type(error).__name__}: {error}"
        _log.debug("kernel %s stays unscheduled", name, exc_info=True)
    record_missed(name, name, ", ".join(ops_of(func)) or name, f"no schedule for its loops: {why}")
    return func
