"""LowerToVM: dispatches and transfers become what the virtual machine runs.

Output tensors are allocated explicitly and freed after their last use, storage is planned per device, shapes are
computed on the host. Assumes FormDispatches. A module that is lowered already is returned as it is.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_map

from ...target.vdevice import vdevices_of
from ..ir.module_attrs import is_lowered, mark_lowered
from ..ir.private_kernels import keep_private_kernels
from ..ir.rewriting import copy_module, relax_functions, typed
from ..ir.root_blocks import with_root_blocks
from ..partition.written_arguments import note_written
from .lower_pinned_storage import LowerPinnedStorage
from .lower_transfers import LowerTransfers, writes_in_place
from .note_memory import NoteMemory
from .pin_transferred import PinTransferred
from .plan_memory import PlanMemoryPerDevice
from .settle_packed_results import SettlePackedResults


def LowerToVM() -> tvm.transform.Pass:
    """Lower a module of dispatches to the virtual machine's form.

    Returns
    -------
    tvm.transform.Pass
    """

    def steps(must_copy: bool) -> tvm.transform.Pass:
        return tvm.transform.Sequential(
            [
                relax.transform.RewriteDataflowReshape(),
                relax.transform.ToNonDataflow(),
                relax.transform.RemovePurityChecking(),
                SettlePackedResults(),
                relax.transform.CallTIRRewrite(),
                LowerTransfers(must_copy),
                PinTransferred(),
                PlanMemoryPerDevice(),
                relax.transform.LowerAllocTensor(),
                relax.transform.KillAfterLastUse(),
                NoteMemory(),
                LowerPinnedStorage(),
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
        named = {gv.name_hint: func for gv, func in mod.functions.items() if "global_symbol" in func.attrs}
        public = [name for name, func in named.items() if isinstance(func, relax.Function)]
        kernels = [name for name, func in named.items() if isinstance(func, tirx.PrimFunc)]
        mod = note_written(with_root_blocks(without_callee_devices(mod)))
        lowered = keep_private_kernels(steps(writes_in_place(mod))(mod))
        return mark_lowered(lowered, len(vdevices_of(mod)), public, kernels)

    return run


def without_callee_devices(mod: tvm.IRModule) -> tvm.IRModule:
    """Take devices off the types by which functions are called; the functions' own parameters keep them.

    Lowered allocations have types without a device, and passing one to a function that wants one is a type error.
    """

    def plain(ty: relax.TensorType) -> relax.TensorType:
        if ty.vdevice is None:
            return ty
        ndim = -1 if ty.shape is not None else int(ty.ndim)
        return relax.TensorType(ty.shape, ty.dtype, None, ndim, ty.span)

    renamed: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
    for gv, _ in relax_functions(mod):
        if isinstance(gv.ty, relax.FuncType):
            ty = structural_map(gv.ty, (relax.TensorType, plain))
            renamed[gv] = typed(tvm.ir.GlobalVar(gv.name_hint), ty)
    if not renamed:
        return mod
    functions = {renamed.get(gv, gv): func for gv, func in mod.functions.items()}
    for gv, func in functions.items():
        if isinstance(func, relax.Function):
            functions[gv] = structural_map(func, (tvm.ir.GlobalVar, lambda old: renamed.get(old, old)))
    return copy_module(mod, functions)
