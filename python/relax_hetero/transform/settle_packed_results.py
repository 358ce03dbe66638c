"""SettlePackedResults: what a packed function returns is moved to where the caller wants it.

Before::

    y: R.Tensor((4,), "float32", "llvm:1") = R.call_packed("numpy_fft", x)

After::

    y_packed: R.Tensor((4,), "float32", "llvm:1") = R.call_packed("numpy_fft", x)
    y: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(y_packed, "llvm:1")

A packed function may allocate where it likes, most often on the first CPU. The virtual machine's and TVM's own are
left alone. Assumes purity checks removed; LowerTransfers makes the transfer a check where the result is in place.
"""

from __future__ import annotations

import tvm
from tvm import relax

from .rewriting import copy_module, map_bindings, relax_functions

_OWN = ("vm.", "relax.", "relax_hetero.", "runtime.")


def SettlePackedResults() -> tvm.transform.Pass:
    """Move tensors that packed functions return to the device of the variable they are bound to.

    Returns
    -------
    tvm.transform.Pass
    """

    @tvm.transform.module_pass(opt_level=0, name="SettlePackedResults")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        functions = dict(mod.functions.items())
        functions.update({gv: map_bindings(func, _settle) for gv, func in relax_functions(mod)})
        return copy_module(mod, functions)

    return run


def _settle(binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
    call, ty = binding.value, binding.var.ty
    if not (isinstance(call, relax.Call) and isinstance(call.op, relax.ExternFunc)):
        return binding
    if call.op.global_symbol.startswith(_OWN) or not isinstance(ty, relax.TensorType) or ty.vdevice is None:
        return binding
    returned = relax.Var(f"{binding.var.name}_packed", ty)
    moved = relax.op.to_vdevice(returned, ty.vdevice)
    transfer = relax.Call(moved.op, list(moved.args), moved.attrs, ret_ty=ty)
    return [relax.VarBinding(returned, call, binding.span), relax.VarBinding(binding.var, transfer)]
