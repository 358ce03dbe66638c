"""SettlePackedResults: what a packed function returns is moved to where the caller wants it.

Before::

    y: R.Tensor((4,), "float32", "llvm:1") = R.call_packed("numpy_fft", x)

After::

    y_packed: R.Tensor((4,), "float32", "llvm:1") = R.call_packed("numpy_fft", x)
    y: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(y_packed, "llvm:1")

A packed function may allocate where it likes, most often on the first CPU. Tuples are taken apart and made again. The
virtual machine's and TVM's own functions are left alone. LowerTransfers makes the transfer a check where the result is
in place already.

Assumes a placed module with purity checks removed. Runs once: a second run adds a second check.
"""

from __future__ import annotations

import tvm
from tvm import relax

from ..ir.declare import declare_pass
from ..ir.rewriting import copy_module, map_bindings, relax_functions, tensor_types

_OWN = ("vm.", "relax.", "relax_hetero.", "runtime.")


def is_foreign(value: relax.Expr) -> bool:
    """Whether this calls a packed function that neither the virtual machine nor TVM or this library brings."""
    is_call = isinstance(value, relax.Call) and isinstance(value.op, relax.ExternFunc)
    return is_call and not value.op.global_symbol.startswith(_OWN)


def settle_packed_results(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    functions = dict(mod.functions.items())
    functions.update({gv: map_bindings(func, _settle) for gv, func in relax_functions(mod)})
    return copy_module(mod, functions)


SettlePackedResults = declare_pass("SettlePackedResults", settle_packed_results)


def _settle(binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
    call, ty = binding.value, binding.var.ty
    if not is_foreign(call) or all(tensor.vdevice is None for tensor in tensor_types(ty)):
        return binding
    returned = relax.Var(f"{binding.var.name}_packed", ty)
    return [relax.VarBinding(returned, call, binding.span), *_move(returned, binding.var)]


def _move(value: relax.Var, result: relax.Var) -> list[relax.Binding]:
    """Bindings that make `result` of `value`, each tensor in it moved to where its type says."""
    ty = value.ty
    if isinstance(ty, relax.TensorType) and ty.vdevice is not None:
        moved = relax.op.to_vdevice(value, ty.vdevice)
        return [relax.VarBinding(result, relax.Call(moved.op, list(moved.args), moved.attrs, ret_ty=ty))]
    if not isinstance(ty, tvm.ir.TupleType):
        return [relax.VarBinding(result, value)]
    bindings: list[relax.Binding] = []
    fields = []
    for i, field_ty in enumerate(ty.fields):
        field, there = relax.Var(f"{value.name}_{i}", field_ty), relax.Var(f"{result.name}_{i}", field_ty)
        bindings += [relax.VarBinding(field, relax.TupleGetItem(value, i)), *_move(field, there)]
        fields.append(there)
    return [*bindings, relax.VarBinding(result, relax.Tuple(fields))]
