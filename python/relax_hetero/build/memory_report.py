"""The memory plan of a module that is not compiled."""

from __future__ import annotations

import tvm

from ..transform.command_report import kernels_of
from ..transform.lower_to_vm import LowerToVM
from ..transform.note_memory import memory_of
from ..vdevice import host_vdevice, vdevice_index, vdevices_of
from ..vm.memory_plan import MemoryPlan
from ..vm.metadata import Metadata
from .command_metadata import regions_as_linked
from .compile import device_spec
from .lift_constants import lift_constants
from .signatures import function_signatures


def memory_plan_of(mod: tvm.IRModule) -> MemoryPlan:
    """What calls of a module would take, as `rh.compile` plans it.

    Parameters
    ----------
    mod : tvm.IRModule
        With dispatches formed, and command buffers where they are wanted.
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
        memory=memory_of(lowered),
    )
    return MemoryPlan(metadata)
