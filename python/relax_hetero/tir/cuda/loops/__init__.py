"""Schedules for kernels of GPUs that no generator wrote.

A PrimFunc is read as stages and joined into nests, as for CPUs (`relax_hetero.tir.loops`). A nest is one launch: a map
(`map_code`) computes a few neighbouring elements a thread, a reduction (`reduction`) a result a thread or a block.
PrimFuncs of another form run statement after statement (`statements`), in parallel where that is proven, else in one
thread: slow, and right.
"""

from __future__ import annotations

from tvm import tirx

from ....target.gpu_target import GpuTarget
from ...loops.nests import form_nests
from ...loops.stages import NotStages, read_stages
from ...nms import NMS
from .launches import Launch, launches_of
from .nms import nms_kernel
from .statements import write_statements
from .wide_axes import with_wide_axes
from .write import write_function

__all__ = ["Launch", "launches_of", "schedule"]


def schedule(func: tirx.PrimFunc, gpu: GpuTarget) -> tirx.PrimFunc:
    """The function with its loops bound to blocks and threads.

    Parameters
    ----------
    func : PrimFunc
        Without thread bindings. What its launches hand on lies in buffers that its root block allocates.
    """
    if NMS in func.attrs:
        return nms_kernel(func)
    try:
        nests = form_nests(with_wide_axes(read_stages(func)), list(func.params), shares_storage=False)
    except NotStages:
        return write_statements(func, gpu)
    return write_function(func, nests, gpu)
