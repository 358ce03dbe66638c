"""The memory plan of a module that is not compiled."""

from __future__ import annotations

import tvm

from ..artifact.memory_plan import MemoryPlan
from ..artifact.metadata import Metadata
from ..target.vdevice import host_vdevice, vdevice_index, vdevices_of
from ..transform.lower.lower_to_vm import LowerToVM
from ..transform.lower.note_memory import memory_of
from ..transform.partition.form_schedules import schedules_of
from ..transform.record.region_attrs import kernels_of
from .commands.command_metadata import regions_as_linked
from .compile import device_spec
from .link.lift_constants import lift_constants
from .signatures import function_signatures


def memory_plan_of(mod: tvm.IRModule) -> MemoryPlan:
    """What calls of a module would take, as `rh.compile` plans it.

    Parameters
    ----------
    mod: With dispatches formed, command buffers and schedules where they are wanted; lowered or not.
    """
    lowered = LowerToVM()(mod)
    vdevices = vdevices_of(lowered)
    host = host_vdevice(vdevices)
    metadata = Metadata(
        devices=tuple(device_spec(vdevice, default=i == 0) for i, vdevice in enumerate(vdevices)),
        host_index=vdevice_index(host, vdevices) if host is not None else -1,
        signatures=function_signatures(lowered, set()),
        constants=tuple(lift_constants(lowered).specs),
        regions=tuple(regions_as_linked(lowered)),
        kernels=kernels_of(lowered),
        schedules=tuple(schedules_of(lowered)),
        memory=memory_of(lowered),
    )
    return MemoryPlan(metadata)
