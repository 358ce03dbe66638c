"""LowerTransfers: `to_vdevice` becomes a call of the run time's own `to_device`.

Before::

    y: R.Tensor((4,), "float32", "cuda:0") = R.to_vdevice(x, "cuda:0")

After::

    buffer: R.Tensor((4,), "float32", "cuda:0") = R.builtin.alloc_tensor(R.shape([4]), "float32", 1, "global")
    y: R.Tensor((4,), "float32", "cuda:0") = R.call_packed("relax_hetero.to_device", x, 1, 0, buffer)

The operands are the value, the destination's index in the module's device list (the virtual machine maps it to a
physical device), and whether the result must be a new tensor even if the value is on that device already. It must be
in a module that writes in place, since the source may have other readers, and where the program asks
for a copy (`relax_hetero.op.copy`). A tensor of known shape gets a receive buffer from the machine's pool, whose pages
are mapped already; fresh memory costs a page fault each 4 KB. Between CPUs, which share their memory, and between a CPU
and a device in its memory, a result that need not be new gets no buffer: it may be an alias of its operand. A constant
that is copied to a GPU in each call (`R.hetero.stream`) becomes a call of ``relax_hetero.stream_to_device``, which
`OrderStreams` completes.

Assumes no dataflow blocks, purity checks removed, and memory that is not planned yet, so that receive buffers share
storage with other tensors. A second run changes nothing.
"""

from __future__ import annotations

import tvm
from tvm import relax

from ...op.copies import COPY
from ...op.streamed import STREAM
from ...target.backend import backend_of
from ...target.vdevice import is_cpu, vdevice_index, vdevices_of
from ..ir.declare import declare_pass
from ..ir.op_names import IN_PLACE, TRANSFERS
from ..ir.rewriting import (
    is_tensor_constant,
    map_bindings,
    op_name,
    relax_functions,
    walk_bindings,
    with_functions,
)

TO_DEVICE, STREAM_TO_DEVICE = "relax_hetero.to_device", "relax_hetero.stream_to_device"

STREAMED = "streamed"  # memory scope of the receive buffers of streamed constants, which lasts until OrderStreams


def lower_transfers(mod: tvm.IRModule, must_copy: bool | None = None) -> tvm.IRModule:
    """See the module's docstring.

    Parameters
    ----------
    mod : tvm.IRModule
    must_copy : bool, optional
        True if results must be new tensors; default: if the module writes in place, as seen before CallTIRRewrite.
    """
    if must_copy is None:
        must_copy = writes_in_place(mod)
    vdevices = vdevices_of(mod)

    def change(binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        value = binding.value
        if op_name(value) not in (*TRANSFERS, COPY):
            return binding
        is_copy = op_name(value) == COPY
        destination = binding.var.ty.vdevice
        index = 0 if destination is None else vdevice_index(destination, vdevices)
        must_be_new = must_copy or is_copy
        if is_streamed(value):
            buffer = _receive_buffer(binding.var, index, STREAMED)
            operands = [value.args[0], relax.prim_value(index), relax.prim_value(0), *(b.var for b in buffer)]
            return [*buffer, _call(STREAM_TO_DEVICE, operands, binding)]
        is_alias = not must_be_new and _share_memory(value.args[0].ty, binding.var.ty)
        buffer = [] if is_alias else _receive_buffer(binding.var, index)
        operands = [
            value.args[0],
            relax.prim_value(index),
            relax.prim_value(int(must_be_new)),
            *(b.var for b in buffer),
        ]
        return [*buffer, _call(TO_DEVICE, operands, binding)]

    return with_functions(mod, {gv: map_bindings(func, change) for gv, func in relax_functions(mod)})


LowerTransfers = declare_pass("LowerTransfers", lower_transfers)


def is_streamed(value: relax.Call) -> bool:
    """Return whether a call copies a constant of known size from a CPU to a device with pinned memory."""
    source = value.args[0]
    if op_name(value) != STREAM or not is_tensor_constant(source) or not _is_on_cpu(source.ty):
        return False
    vdevice = value.ty.vdevice
    return backend_of(vdevice.target).pins_memory and vdevice.memory_scope == "global"


def _call(function: str, operands: list[relax.Expr], binding: relax.Binding) -> relax.VarBinding:
    ty = binding.var.ty
    call = relax.Call(relax.ExternFunc(function), operands, None, [ty], binding.value.span, ret_ty=ty)
    return relax.VarBinding(binding.var, call, binding.span)


def _receive_buffer(result: relax.Var, index: int, scope: str = "global") -> list[relax.VarBinding]:
    """A binding that allocates a transfer's result; none if the shape is unknown or the memory is not "global"."""
    ty = result.ty
    is_known = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr) and ty.dtype is not None
    if not is_known or ty.vdevice.memory_scope != "global":
        return []
    alloc = relax.op.builtin.alloc_tensor(ty.shape, str(ty.dtype.dtype), index, scope)
    call = relax.Call(alloc.op, list(alloc.args), ret_ty=ty)
    return [relax.VarBinding(relax.Var(f"{result.name}_buffer", ty), call)]


def _is_on_cpu(ty: tvm.ir.Type) -> bool:
    """Return whether a type is a tensor in the "global" memory of a CPU."""
    vdevice = ty.vdevice if isinstance(ty, relax.TensorType) else None
    return vdevice is not None and vdevice.memory_scope == "global" and is_cpu(vdevice)


def _share_memory(source: tvm.ir.Type, result: tvm.ir.Type) -> bool:
    """Return whether a CPU and another device may use each other's tensor in place."""
    return (_is_on_cpu(result) and _may_be_shared(source)) or (_is_on_cpu(source) and _may_be_shared(result))


def _may_be_shared(ty: tvm.ir.Type) -> bool:
    vdevice = ty.vdevice if isinstance(ty, relax.TensorType) else None
    if vdevice is None or vdevice.memory_scope != "global":
        return False
    return is_cpu(vdevice) or backend_of(vdevice.target).may_share_memory(vdevice.target)


def is_lowered_transfer(value: relax.Expr) -> bool:
    """Return whether a value is a lowered transfer."""
    is_packed = isinstance(value, relax.Call) and isinstance(value.op, relax.ExternFunc)
    return is_packed and value.op.global_symbol in (TO_DEVICE, STREAM_TO_DEVICE)


def writes_in_place(mod: tvm.IRModule) -> bool:
    """Return whether any op writes into an operand, which may alias a transfer's result by views and calls."""
    return any(op_name(b.value) in IN_PLACE for _, func in relax_functions(mod) for b in walk_bindings(func))
