"""LowerLoopRows: on CPUs, a kernel writes the row that an iteration of a loop collects.

Before, where `rows` has capacity for all iterations::

    more: R.Tensor(dtype="float32", ndim=2, vdevice="llvm:0") = R.call_packed("relax_hetero.write_row", rows, row, trip)

After::

    cls.write_row(rows, row, trip)
    more: R.Tensor(dtype="float32", ndim=2, vdevice="llvm:0") = R.call_packed("vm.builtin.copy", rows)

Before lowering, the write returns a new tensor, so that no pass has to know that it shares memory: only the next
iteration reads `rows`. The copy is that of a reference. On GPUs the packed function writes (`vm.device.builtins`).

Assumes no dataflow blocks and purity checks removed. A second run changes nothing.
"""

from __future__ import annotations

import tvm
from tvm import relax

from ...target.vdevice import is_cpu
from ...tir.write_row import write_row_kernel
from ..ir.declare import declare_pass
from ..ir.rewriting import copy_module, fresh_global_var, map_bindings, relax_functions, typed

WRITE_ROW = "relax_hetero.write_row"


def lower_loop_rows(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    used_names = {gv.name_hint for gv in mod.get_global_vars()}
    kernels: dict[tuple[int, str, str], tvm.ir.GlobalVar] = {}
    functions = dict(mod.functions.items())
    empty = tvm.ir.TupleType([])

    def kernel_for(row: relax.TensorType, vdevice: relax.VDevice) -> tvm.ir.GlobalVar:
        key = row.ndim, str(row.dtype.dtype), str(vdevice.target)
        if key not in kernels:
            kernel = write_row_kernel(row.ndim, key[1])
            gv = kernels[key] = fresh_global_var("write_row", kernel.ty, used_names)
            functions[gv] = kernel.with_attr({"global_symbol": gv.name_hint, "target": vdevice.target})
        return kernels[key]

    def change(binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        value, vdevice = binding.value, getattr(binding.var.ty, "vdevice", None)
        is_write = isinstance(value, relax.Call) and isinstance(value.op, relax.ExternFunc)
        if not is_write or value.op.global_symbol != WRITE_ROW or vdevice is None or not is_cpu(vdevice):
            return binding
        rows, row, trip = value.args
        write = typed(relax.Call(kernel_for(row.ty, vdevice), [rows, row, trip]), empty)
        ty = binding.var.ty
        alias = relax.Call(relax.ExternFunc("vm.builtin.copy"), [rows], None, [ty], ret_ty=ty)
        return [
            relax.VarBinding(relax.Var("_", empty), write, binding.span),
            relax.VarBinding(binding.var, alias, binding.span),
        ]

    changed = {gv: map_bindings(func, change) for gv, func in relax_functions(mod)}
    return copy_module(mod, {**functions, **changed})


LowerLoopRows = declare_pass("LowerLoopRows", lower_loop_rows)
