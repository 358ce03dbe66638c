"""Calls of kernels: which PrimFunc a call runs, and on which device."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from .op_names import CALL_TIR_OPS
from .rewriting import op_name, tensor_types


def called_prim_func(mod: tvm.IRModule, value: relax.Expr) -> tvm.ir.GlobalVar | None:
    """The PrimFunc a Relax call runs: by call_tir and its kin, or directly once output tensors are explicit."""
    if not isinstance(value, relax.Call):
        return None
    callee = value.args[0] if op_name(value) in CALL_TIR_OPS else value.op
    if isinstance(callee, tvm.ir.GlobalVar) and isinstance(mod.functions.get(callee), tirx.PrimFunc):
        return callee
    return None


def call_vdevice(value: relax.Call) -> relax.VDevice | None:
    """The device a call runs on: of its result, else of its first tensor operand, nested tuples included."""
    for ty in (*value.ty_args, value.ty, *(arg.ty for arg in value.args)):
        for tensor in tensor_types(ty):
            if tensor.vdevice is not None:
                return tensor.vdevice
    return None
