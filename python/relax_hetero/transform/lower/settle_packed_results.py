"""SettlePackedResults: results of code outside of the module are checked, and moved to their device.

Before::

    y: R.Tensor((4,), "float32", "llvm:1") = R.call_packed("numpy_fft", x)

After::

    y_packed: R.Tensor((4,), "float32", "llvm:1") = R.call_packed("numpy_fft", x)
    _ = R.call_packed("relax_hetero.check_returned", y_packed, "packed function 'numpy_fft'", -1, 1, "float32", 4)
    y: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(y_packed, "llvm:1")

A packed function, or a callback argument, may return anything, and may allocate on any device, most often on the first
CPU. Unread results are not checked. Tuples are split and rebuilt. The virtual machine's and TVM's own functions are
left alone. The transfer copies nothing if the result is on its device already.

Assumes a placed module with purity checks removed. Runs once: a second run adds a second check.
"""

from __future__ import annotations

from functools import partial

import tvm
from tvm import relax, tirx

from ..ir.blocks import used_vars
from ..ir.declare import declare_pass
from ..ir.op_names import is_own_function
from ..ir.rewriting import copy_module, effect, map_bindings, relax_functions, tensor_types, typed, walk_bindings

CHECK_RETURNED = "relax_hetero.check_returned"


def is_foreign(value: relax.Expr) -> bool:
    """Return whether a value calls a packed function that belongs neither to TVM nor to this library."""
    is_call = isinstance(value, relax.Call) and isinstance(value.op, relax.ExternFunc)
    return is_call and not is_own_function(value.op.global_symbol)


def settle_packed_results(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    functions = dict(mod.functions.items())
    for gv, func in relax_functions(mod):
        read: set[relax.Var] = set()
        _add_read(func.body, read)
        functions[gv] = map_bindings(func, partial(_settle, read))
    return copy_module(mod, functions)


SettlePackedResults = declare_pass("SettlePackedResults", settle_packed_results)


def _add_read(expr: relax.Expr, read: set[relax.Var], is_result_read: bool = True) -> None:
    """Add the variables of a body, or of a branch, that are read to `read`."""
    if is_result_read:
        read.update(used_vars(expr.body if isinstance(expr, relax.SeqExpr) else expr))
    for binding in reversed(list(walk_bindings(expr, nested=False))):
        value = binding.value
        if isinstance(value, relax.If):
            read.update(used_vars(value.cond))
            for branch in (value.true_branch, value.false_branch):
                _add_read(branch, read, binding.var in read)
        else:
            read.update(used_vars(value))


def _settle(read: set[relax.Var], binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
    call, ty = binding.value, binding.var.ty
    is_callback = isinstance(call, relax.Call) and isinstance(call.op, relax.Var)
    if not (is_callback or is_foreign(call)) or binding.var not in read:
        return binding
    if all(tensor.vdevice is None for tensor in tensor_types(ty)):
        return binding
    origin = f"callback {call.op.name!r}" if is_callback else f"packed function {call.op.global_symbol!r}"
    returned = relax.Var(f"{binding.var.name}_packed", ty)
    return [relax.VarBinding(returned, call, binding.span), *_checked_move(returned, binding.var, origin)]


def _checked_move(value: relax.Var, result: relax.Var, origin: str) -> list[relax.Binding]:
    """Bindings of `result` to `value`, with each tensor checked and moved to the device of its type."""
    ty = value.ty
    if isinstance(ty, relax.TensorType) and ty.vdevice is not None:
        extents = ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else ()
        dims = [int(extent) if isinstance(extent, tirx.IntImm) else -1 for extent in extents]
        transfer = typed(relax.op.to_vdevice(value, ty.vdevice), ty)
        dtype = "" if ty.dtype is None else str(ty.dtype.dtype)
        return [_check(value, origin, -1, int(ty.ndim), dtype, *dims), relax.VarBinding(result, transfer)]
    if not isinstance(ty, tvm.ir.TupleType):
        return [relax.VarBinding(result, value)]
    bindings: list[relax.Binding] = [_check(value, origin, len(ty.fields))]
    fields = []
    for index, field_ty in enumerate(ty.fields):
        field, target = relax.Var(f"{value.name}_{index}", field_ty), relax.Var(f"{result.name}_{index}", field_ty)
        bindings += [relax.VarBinding(field, relax.TupleGetItem(value, index)), *_checked_move(field, target, origin)]
        fields.append(target)
    return [*bindings, relax.VarBinding(result, relax.Tuple(fields))]


def _check(value: relax.Var, origin: str, *form: int | str) -> relax.Binding:
    """A call that checks the form of a value: the number of fields, or for a tensor -1, rank, type and extents."""
    args = [tvm.ir.StringImm(arg) if isinstance(arg, str) else relax.prim_value(arg) for arg in (origin, *form)]
    return effect(CHECK_RETURNED, [value, *args])
