"""LowerToVM: dispatches and transfers become what the virtual machine runs.

Output tensors are allocated explicitly and freed after their last use, storage is planned per device, shapes are
computed on the host. Assumes FormDispatches. A module that is lowered already is returned as it is.
"""

from __future__ import annotations

import tvm
from tvm import relax

from ..vdevice import vdevices_of
from .lower_transfers import LowerTransfers
from .plan_memory import PlanMemoryPerDevice

LOWERED = "relax_hetero.lowered"


def LowerToVM() -> tvm.transform.Pass:
    """Lower a module of dispatches to the virtual machine's form.

    Returns
    -------
    tvm.transform.Pass
    """
    steps = tvm.transform.Sequential(
        [
            relax.transform.RewriteDataflowReshape(),
            relax.transform.ToNonDataflow(),
            relax.transform.RemovePurityChecking(),
            LowerTransfers(),
            relax.transform.CallTIRRewrite(),
            PlanMemoryPerDevice(),
            relax.transform.LowerAllocTensor(),
            relax.transform.KillAfterLastUse(),
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            relax.transform.AttachGlobalSymbol(),
        ]
    )

    @tvm.transform.module_pass(opt_level=0, name="LowerToVM")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return mod if is_lowered(mod) else steps(mod).with_attr(LOWERED, len(vdevices_of(mod)))

    return run


def is_lowered(mod: tvm.IRModule) -> bool:
    """Whether LowerToVM has been applied."""
    return bool(mod.attrs and LOWERED in mod.attrs)


def device_count(mod: tvm.IRModule) -> int:
    """How many vdevices a lowered module has; 0 for any other module."""
    return int(mod.attrs[LOWERED]) if is_lowered(mod) else 0
