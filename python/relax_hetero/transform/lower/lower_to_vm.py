"""LowerToVM: dispatches and transfers become instructions of the virtual machine.

Before::

    lv: R.Tensor((4,), "float32", "llvm:0") = R.call_tir(cls.scale, (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
    gv: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(lv, "llvm:1")

After::

    storage = R.vm.alloc_storage(R.shape([16]), 0, "uint8", "global")
    alloc = R.vm.alloc_tensor(storage, 0, R.shape([4]), "float32", 0)
    cls.scale(x, alloc)
    gv = R.call_packed("relax_hetero.to_device", alloc, 1, 0)   # an alias between CPUs, else with a receive buffer
    R.vm.kill_object(storage)

Output tensors are allocated explicitly and freed after their last use, storage is planned per device, and shapes are
computed on the host. `lowering_steps` lists the passes, TVM's and ours. Before them, kernels get root blocks, callee
types lose their devices, and functions are annotated with the arguments that they write to; after them, kernels that
only kernels call lose their symbols (`keep_private_kernels`), and divisors of sizes are checked (`CheckSizeDivisors`).

Assumes FormDispatches. A lowered module is returned as it is.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from ...errors import BuildError
from ...target.vdevice import vdevices_of
from ...tir.core.walks import replaced
from ..ir.blocks import with_root_blocks
from ..ir.callee_devices import with_written_results, without_callee_devices
from ..ir.declare import declare_pass
from ..ir.module_attrs import is_lowered, mark_lowered
from ..ir.rewriting import (
    copy_module,
    fresh_global_var,
    global_vars_in,
    map_bindings,
    op_name,
    relax_functions,
    walk_bindings,
    with_functions,
)
from ..partition.written_arguments import annotate_written
from ..shard.exchange_by_nccl import check_collectives_in_graphs
from .annotate_memory import AnnotateMemory
from .check_size_divisors import check_size_divisors
from .launch_together import LaunchTogether
from .lower_loop_rows import LowerLoopRows
from .lower_pinned_storage import LowerPinnedStorage
from .lower_requirements import LowerRequirements
from .lower_transfers import LowerTransfers, writes_in_place
from .order_streams import OrderStreams
from .pin_transferred import PinTransferred
from .plan_memory import PlanMemoryPerDevice
from .settle_packed_results import SettlePackedResults, is_foreign


def lower_to_vm(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring.

    Raises
    ------
    BuildError
        When it runs: TVM's own planner has planned the memory of a module with several devices, or NCCL's collectives
        are outside of CUDA graphs.
    """
    if is_lowered(mod):
        return mod
    check_collectives_in_graphs(mod)
    if len(vdevices_of(mod)) > 1:
        _refuse_planned(mod)
    named = {gv.name_hint: func for gv, func in mod.functions.items() if "global_symbol" in func.attrs}
    public = [name for name, func in named.items() if isinstance(func, relax.Function)]
    kernels = [name for name, func in named.items() if isinstance(func, tirx.PrimFunc)]
    mod = annotate_written(with_root_blocks(without_callee_devices(with_written_results(mod))))
    lowered = tvm.transform.Sequential(lowering_steps(writes_in_place(mod)))(mod)
    lowered = check_size_divisors(with_registers(keep_private_kernels(lowered)))
    return mark_lowered(lowered, len(vdevices_of(mod)), public, kernels)


_STORAGES = ("relax.memory.alloc_storage", "relax.vm.alloc_storage")

LowerToVM = declare_pass("LowerToVM", lower_to_vm)


def _refuse_planned(mod: tvm.IRModule) -> None:
    """Refuse memory that stock StaticPlanBlockMemory planned: values of two devices may share a storage."""
    for gv, func in relax_functions(mod):
        for binding in walk_bindings(func):
            if op_name(binding.value) in _STORAGES:
                raise BuildError(
                    f"function {gv.name_hint!r} has memory that was planned before ({op_name(binding.value)} of "
                    f"{binding.var.name!r}), by a pass such as StaticPlanBlockMemory, which plans for one device, and "
                    f"this module has {len(vdevices_of(mod))} vdevices: expected a module without that pass, as "
                    "LowerToVM and rh.compile plan memory for each device"
                )


def lowering_steps(must_copy: bool) -> list[tvm.transform.Pass]:
    """The passes of LowerToVM, in order.

    `must_copy`: option of LowerTransfers: results of transfers must be new tensors.
    """
    return [
        # A reshape would become an alias, which an in-place kernel must not overwrite.
        *([] if must_copy else [relax.transform.RewriteDataflowReshape()]),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        LowerRequirements(),
        SettlePackedResults(),
        relax.transform.CallTIRRewrite(),
        LowerTransfers(must_copy),
        LowerLoopRows(),
        PinTransferred(),
        PlanMemoryPerDevice(),
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
        LaunchTogether(),
        AnnotateMemory(),
        LowerPinnedStorage(),
        OrderStreams(),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        relax.transform.VMShapeLower(),
        relax.transform.AttachGlobalSymbol(),
    ]


def with_registers(mod: tvm.IRModule) -> tvm.IRModule:
    """Give a register to results of calls even if they are empty tuples.

    A bytecode function always writes its result: the callee, or a function of this machine that a callback or a packed
    function calls.
    """

    def change(binding: relax.Binding) -> relax.Binding:
        call, ty = binding.value, binding.var.ty
        is_empty = isinstance(ty, tvm.ir.TupleType) and not ty.fields
        if not (is_empty and isinstance(call, relax.Call)):
            return binding
        is_function = isinstance(call.op, relax.Var) or isinstance(mod.functions.get(call.op), relax.Function)
        if not (is_function or is_foreign(call)):
            return binding
        call = relax.Call(call.op, list(call.args), call.attrs, call.ty_args, call.span, ret_ty=relax.AnyType())
        return relax.VarBinding(binding.var, call, binding.span)

    return with_functions(mod, {gv: map_bindings(func, change) for gv, func in relax_functions(mod)})


def keep_private_kernels(mod: tvm.IRModule) -> tvm.IRModule:
    """Remove the symbols of PrimFuncs that PrimFuncs call; those that Relax calls too get a private copy."""
    by_relax = _callees(mod, relax.Function)
    by_kernels = _callees(mod, tirx.PrimFunc)
    if not by_kernels:
        return mod
    functions = dict(mod.functions.items())
    used_names = {gv.name_hint for gv in functions}
    private: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
    for gv in by_kernels:
        private[gv] = fresh_global_var(f"{gv.name_hint}_private", gv.ty, used_names) if gv in by_relax else gv
        functions[private[gv]] = functions[gv].without_attr("global_symbol")
    for gv, func in functions.items():
        if isinstance(func, tirx.PrimFunc):
            functions[gv] = func.with_body(replaced(func.body, private, tvm.ir.GlobalVar))
    return copy_module(mod, functions)


def _callees(mod: tvm.IRModule, kind: type[Any]) -> dict[tvm.ir.GlobalVar, None]:
    """The PrimFuncs that functions of a kind refer to, in order."""
    functions = sorted(mod.functions.items(), key=lambda pair: pair[0].name_hint)
    callees = [gv for _, func in functions if isinstance(func, kind) for gv in global_vars_in(func.body)]
    return dict.fromkeys(gv for gv in callees if isinstance(mod.functions.get(gv), tirx.PrimFunc))
