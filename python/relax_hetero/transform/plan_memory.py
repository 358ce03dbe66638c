"""PlanMemoryPerDevice: storage is reused within a device, never across devices.

Before::

    alloc = R.builtin.alloc_tensor(R.shape([4]), "float32", 0, "global")
    alloc1 = R.builtin.alloc_tensor(R.shape([4]), "float32", 1, "global")

After::

    storage = R.memory.alloc_storage(R.shape([16]), 0, "global", "float32")
    storage1 = R.memory.alloc_storage(R.shape([16]), 1, "global", "float32")

TVM's planner pools free storage by scope and type but not by device, and hands storage that one branch of an `If`
allocates to the other branch, where it does not exist. So each device, and each branch, plans under a scope of its
own, taken off again afterwards.

It also takes what a packed function reads for free after the call, while the user's may return an operand. So calls of
those are disguised as `call_pure_packed` while planning, whose operands the planner leaves to the machine's pool.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tvm
from tvm import relax

from .rewriting import BindingMap, copy_module, map_bindings, op_name, relax_functions, walk_bindings
from .settle_packed_results import is_foreign

_MARK = "#device"
_DISGUISE = tvm.ir.Op.get("relax.call_pure_packed")


def PlanMemoryPerDevice() -> tvm.transform.Pass:
    """Plan static storage, one pool for each device and branch.

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
    mod = _change_scopes(mod, lambda scope, device, branch: f"{scope}{_MARK}{device}.{branch}")
    mod = _map_module(relax.transform.StaticPlanBlockMemory()(_map_module(mod, _disguise)), _undisguise)
    return _change_scopes(mod, lambda scope, _device, _branch: scope.split(_MARK)[0])


def _map_module(mod: tvm.IRModule, change: BindingMap) -> tvm.IRModule:
    functions = dict(mod.functions.items())
    functions.update({gv: map_bindings(func, change) for gv, func in relax_functions(mod)})
    return copy_module(mod, functions)


def _disguise(binding: relax.Binding) -> relax.Binding:
    call = binding.value
    if not is_foreign(call):
        return binding
    disguised = relax.Call(_DISGUISE, [call.op, *call.args], call.attrs, call.ty_args, call.span, ret_ty=call.ty)
    return relax.VarBinding(binding.var, disguised, binding.span)


def _undisguise(binding: relax.Binding) -> relax.Binding:
    call = binding.value
    if op_name(call) != _DISGUISE.name:
        return binding
    plain = relax.Call(call.args[0], call.args[1:], call.attrs, call.ty_args, call.span, ret_ty=call.ty)
    return relax.VarBinding(binding.var, plain, binding.span)


# Where the allocating ops keep their device index and their scope.
_OPERANDS = {"relax.builtin.alloc_tensor": (2, 3), "relax.memory.alloc_storage": (1, 2)}


def _change_scopes(mod: tvm.IRModule, rename: Callable[[str, int, int], str]) -> tvm.IRModule:
    def change(branches: dict[relax.Var, int], binding: relax.Binding) -> relax.Binding:
        value = binding.value
        operands = _OPERANDS.get(op_name(value) or "")
        if operands is None:
            return binding
        device, scope = operands
        args = list(value.args)
        args[scope] = tvm.ir.StringImm(rename(args[scope].value, int(args[device].value), branches[binding.var]))
        call = relax.Call(value.op, args, value.attrs, value.ty_args, value.span, ret_ty=value.ty)
        return relax.VarBinding(binding.var, call, binding.span)

    functions = dict(mod.functions.items())
    functions.update({gv: map_bindings(func, partial(change, _branches(func))) for gv, func in relax_functions(mod)})
    return copy_module(mod, functions)


def _branches(func: relax.Function) -> dict[relax.Var, int]:
    """The branch each variable is bound in: 0 outside of any `If`, else a number of its own."""
    branches: dict[relax.Var, int] = {}
    pending = [(func.body, 0)]
    count = 0
    while pending:
        body, branch = pending.pop()
        for binding in walk_bindings(body, nested=False):
            branches[binding.var] = branch
            if isinstance(binding.value, relax.If):
                pending += [(binding.value.true_branch, count + 1), (binding.value.false_branch, count + 2)]
                count += 2
    return branches
