"""LowerToVM: dispatches and transfers become what the virtual machine runs.

Output tensors are allocated explicitly and freed after their last use, storage is planned per device, shapes are
computed on the host. Assumes FormDispatches. A module that is lowered already is returned as it is.
"""

from __future__ import annotations

import tvm
from tvm import relax, s_tir, tirx

from ..vdevice import vdevices_of
from .lower_transfers import LowerTransfers
from .plan_memory import PlanMemoryPerDevice
from .rewriting import copy_module, relax_functions

LOWERED = "relax_hetero.lowered"
PUBLIC = "relax_hetero.public"


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
        if is_lowered(mod):
            return mod
        # Lowering gives private functions a symbol too; a caller may use those that have one now.
        public = [gv.name_hint for gv, func in relax_functions(mod) if "global_symbol" in func.attrs]
        return steps(with_root_blocks(mod)).with_attrs({LOWERED: len(vdevices_of(mod)), PUBLIC: public})

    return run


def with_root_blocks(mod: tvm.IRModule) -> tvm.IRModule:
    """Kernels written without blocks get the root block that RewriteDataflowReshape asserts (it crashes otherwise)."""
    functions = dict(mod.functions.items())
    for gv, func in functions.items():
        if isinstance(func, tirx.PrimFunc) and not isinstance(func.body, s_tir.SBlockRealize):
            root = s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", func.body))
            functions[gv] = func.with_body(root)
    return copy_module(mod, functions)


def is_lowered(mod: tvm.IRModule) -> bool:
    """Whether LowerToVM has been applied."""
    return bool(mod.attrs and LOWERED in mod.attrs)


def public_functions(mod: tvm.IRModule) -> list[str]:
    """Names of the functions of a lowered module that a caller may use."""
    return [str(name) for name in mod.attrs[PUBLIC]]


def device_count(mod: tvm.IRModule) -> int:
    """How many vdevices a lowered module has; 0 for any other module."""
    return int(mod.attrs[LOWERED]) if is_lowered(mod) else 0
