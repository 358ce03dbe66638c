"""PlanMemoryPerDevice: storage is reused within a device, never across devices.

Before::

    alloc = R.builtin.alloc_tensor(R.shape([4]), "float32", 0, "global")
    alloc1 = R.builtin.alloc_tensor(R.shape([4]), "float32", 1, "global")

After::

    storage = R.memory.alloc_storage(R.shape([16]), 0, "global", "float32")
    storage1 = R.memory.alloc_storage(R.shape([16]), 1, "global", "float32")

TVM's planner pools free storage by scope and type but not by device. So each device plans under a scope of its
own, taken off again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax

from .rewriting import copy_module, map_bindings, op_name, relax_functions

_MARK = "#device"


def PlanMemoryPerDevice() -> tvm.transform.Pass:
    """Plan static storage, one pool a device.

    Returns
    -------
    tvm.transform.Pass
    """

    @tvm.transform.module_pass(opt_level=0, name="PlanMemoryPerDevice")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return plan_memory_per_device(mod)

    return run


def plan_memory_per_device(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    mod = _change_scopes(mod, lambda scope, device: f"{scope}{_MARK}{device}")
    mod = relax.transform.StaticPlanBlockMemory()(mod)
    return _change_scopes(mod, lambda scope, _device: scope.split(_MARK)[0])


# Where the allocating ops keep their device index and their scope.
_OPERANDS = {"relax.builtin.alloc_tensor": (2, 3), "relax.memory.alloc_storage": (1, 2)}


def _change_scopes(mod: tvm.IRModule, rename: Callable[[str, int], str]) -> tvm.IRModule:
    def change(binding: relax.Binding) -> relax.Binding:
        value = binding.value
        operands = _OPERANDS.get(op_name(value) or "")
        if operands is None:
            return binding
        device, scope = operands
        args = list(value.args)
        args[scope] = tvm.ir.StringImm(rename(args[scope].value, int(args[device].value)))
        call = relax.Call(value.op, args, value.attrs, value.ty_args, value.span, ret_ty=value.ty)
        return relax.VarBinding(binding.var, call, binding.span)

    functions = dict(mod.functions.items())
    functions.update({gv: map_bindings(func, change) for gv, func in relax_functions(mod)})
    return copy_module(mod, functions)
