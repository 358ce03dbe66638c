"""GPU schedules for PrimFuncs without a handwritten kernel generator.

A PrimFunc is read as stages and fused into nests, as on CPUs (`relax_hetero.tir.loops`). Each nest is one launch: in a
map (`write`), a thread computes a few neighbouring elements; in a reduction (`reduction`), a thread or a block computes
a result. Other PrimFuncs run one statement per launch (`statements`): in parallel where iterations are proven
independent, else in a single thread.
"""

from __future__ import annotations

from tvm import tirx

from ....target.gpu_target import GpuTarget
from ...delta_rule import DELTA_RULE
from ...loops.nests import form_nests
from ...loops.stages import NotStages, read_stages
from ...nms import NMS
from ...recurrence import RECURRENCE
from ...routing import ROUTING
from ..core.dialect import dialect_of
from .cuda_delta_rule import delta_rule_kernel
from .cuda_loops import write_function
from .cuda_nms import nms_kernel
from .cuda_recurrence import recurrence_kernel
from .cuda_routing import routing_kernel
from .launches import Launch, launches_of
from .statements import write_statements
from .wide_axes import with_wide_axes

__all__ = ["Launch", "launches_of", "schedule"]


def schedule(func: tirx.PrimFunc, gpu: GpuTarget) -> tirx.PrimFunc:
    """Bind the loops of a function to blocks and threads; its root block allocates buffers between launches.

    Parameters
    ----------
    func : PrimFunc
        A function without thread bindings.
    """
    with dialect_of(gpu):
        if NMS in func.attrs:
            return nms_kernel(func)
        if RECURRENCE in func.attrs:
            return recurrence_kernel(func)
        if ROUTING in func.attrs:
            return routing_kernel(func, gpu)
        if DELTA_RULE in func.attrs:
            return delta_rule_kernel(func)
        try:
            nests = form_nests(with_wide_axes(read_stages(func)), list(func.params), shares_storage=False)
        except NotStages:
            return write_statements(func, gpu)
        return write_function(func, nests, gpu)
