"""SettlePackedResults: what code outside of the module returns is checked, and moved to where the caller wants it.

Before::

    y: R.Tensor((4,), "float32", "llvm:1") = R.call_packed("numpy_fft", x)

After::

    y_packed: R.Tensor((4,), "float32", "llvm:1") = R.call_packed("numpy_fft", x)
    _ = R.call_packed("relax_hetero.check_returned", y_packed, "packed function 'numpy_fft'", -1, 1, "float32", 4)
    y: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(y_packed, "llvm:1")

A packed function, or a callback that the caller gave, may return anything, or nothing where nobody reads it; and it may
allocate where it likes, most often on the first CPU. Tuples are taken apart and made again. The virtual machine's and
TVM's own functions are left alone. LowerTransfers makes the transfer a check where the result is in place already.

Assumes a placed module with purity checks removed. Runs once: a second run adds a second check.
"""

from __future__ import annotations

from functools import partial

import tvm
from tvm import relax, tirx

from ..ir.blocks import used_vars
from ..ir.declare import declare_pass
from ..ir.op_names import is_own_function
from ..ir.rewriting import copy_module, map_bindings, relax_functions, tensor_types, walk_bindings

CHECK_RETURNED = "relax_hetero.check_returned"


def is_foreign(value: relax.Expr) -> bool:
    """Return whether this calls a packed function that neither the virtual machine nor TVM or this library brings."""
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
    """Add to `read` the variables of a body, or of a branch, that are read."""
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
    what = f"callback {call.op.name!r}" if is_callback else f"packed function {call.op.global_symbol!r}"
    returned = relax.Var(f"{binding.var.name}_packed", ty)
    return [relax.VarBinding(returned, call, binding.span), *_move(returned, binding.var, what)]


def _move(value: relax.Var, result: relax.Var, what: str) -> list[relax.Binding]:
    """Bindings that make `result` of `value`, each tensor in it checked and moved to where its type says."""
    ty = value.ty
    if isinstance(ty, relax.TensorType) and ty.vdevice is not None:
        extents = ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else ()
        dims = [int(extent) if isinstance(extent, tirx.IntImm) else -1 for extent in extents]
        moved = relax.op.to_vdevice(value, ty.vdevice)
        made = relax.Call(moved.op, list(moved.args), moved.attrs, ret_ty=ty)
        dtype = "" if ty.dtype is None else str(ty.dtype.dtype)
        return [_check(value, what, -1, int(ty.ndim), dtype, *dims), relax.VarBinding(result, made)]
    if not isinstance(ty, tvm.ir.TupleType):
        return [relax.VarBinding(result, value)]
    bindings: list[relax.Binding] = [_check(value, what, len(ty.fields))]
    fields = []
    for i, field_ty in enumerate(ty.fields):
        field, there = relax.Var(f"{value.name}_{i}", field_ty), relax.Var(f"{result.name}_{i}", field_ty)
        bindings += [relax.VarBinding(field, relax.TupleGetItem(value, i)), *_move(field, there, what)]
        fields.append(there)
    return [*bindings, relax.VarBinding(result, relax.Tuple(fields))]


def _check(value: relax.Var, what: str, *form: int | str) -> relax.Binding:
    """A call that refuses a value of another form: number of fields, or for a tensor -1, rank, type and extents."""
    texts = [tvm.ir.StringImm(each) if isinstance(each, str) else relax.prim_value(each) for each in (what, *form)]
    nothing = tvm.ir.TupleType([])
    call = relax.Call(relax.ExternFunc(CHECK_RETURNED), [value, *texts], None, [nothing], ret_ty=nothing)
    return relax.VarBinding(relax.Var("_", nothing), call)
