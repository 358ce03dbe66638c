"""Kernels of a module: which one a call runs and where, the ops that were fused into it, its work.

`tensor_bytes` and `bytes_of_extents` say how much memory its tensors take. Ops and work are attributes of a kernel,
which last to the executable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.tirx.buffer import is_buffer_var

from ...encoding.arithmetic import (
    FP16_PARTIAL_SUMS,
    operations,
    precision,
    precision_of_arguments,
    with_fp16_partial_sums,
)
from .op_names import CALL_TIR_OPS
from .rewriting import copy_module, op_name, tensor_types, walk_bindings


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


OPS = "relax_hetero.ops"


def fused_ops(mod: tvm.IRModule) -> dict[str, list[str]]:
    """Between FuseOps and FuseTIR: function name to the kernels inside, in order."""
    found: dict[str, list[str]] = {}
    for gv, func in mod.functions.items():
        if isinstance(func, relax.Function) and func.attrs.get("Primitive"):
            kernels = [called_prim_func(mod, binding.value) for binding in walk_bindings(func)]
            found[gv.name_hint] = [_plain(kernel.name_hint) for kernel in kernels if kernel is not None]
    return found


def with_ops(mod: tvm.IRModule, fused: dict[str, list[str]]) -> tvm.IRModule:
    """Note on every kernel what it computes; kernels that are noted already keep it."""
    functions = {
        gv: func.with_attr(OPS, fused.get(gv.name_hint, [_plain(gv.name_hint)]))
        if isinstance(func, tirx.PrimFunc) and OPS not in func.attrs
        else func
        for gv, func in mod.functions.items()
    }
    return copy_module(mod, functions)


def ops_of(func: tirx.PrimFunc) -> tuple[str, ...]:
    """The ops of a kernel; none for those that TVM adds, which compute shapes."""
    return tuple(str(op) for op in func.attrs.get(OPS, ()))


def _plain(kernel: str) -> str:
    # Legalization writes tir_exp for exp, and numbers the kernels of one op.
    return re.sub(r"\d+$", "", kernel).removeprefix("tir_")


OPERATIONS = "relax_hetero.operations"
PRECISION = "relax_hetero.precision"


def work_attributes(problem: Any) -> dict[str, int | str]:
    """The attributes of a kernel that solves a problem; none where its arithmetic is not counted."""
    attributes: dict[str, int | str] = {OPERATIONS: operations(problem), PRECISION: precision(problem)}
    return {name: value for name, value in attributes.items() if value}


def operations_of(func: tirx.PrimFunc) -> int:
    """Multiplications and additions of the products in a kernel; 0 where they are not known."""
    return int(func.attrs.get(OPERATIONS, 0))


def precision_of(func: tirx.PrimFunc, arguments: Iterable[str] | None = None) -> str:
    """The element types of a kernel's products, as `encoding.arithmetic` writes them, else those of its arguments.

    Parameters
    ----------
    func : tirx.PrimFunc
    arguments : iterable of str, optional
        The element types of its tensors, where its parameters do not say them any more.
    """
    if arguments is None:
        arguments = (str(param.dtype) for param in func.params if is_buffer_var(param))
    text = str(func.attrs.get(PRECISION, "")) or precision_of_arguments(arguments)
    return with_fp16_partial_sums(text, str(func.attrs[FP16_PARTIAL_SUMS])) if FP16_PARTIAL_SUMS in func.attrs else text


def bytes_of(func: tirx.PrimFunc) -> int:
    """Bytes of a kernel's arguments, each read or written once; 0 where an extent is symbolic."""
    return sum(_bytes(param) for param in func.params if is_buffer_var(param)) if _static(func) else 0


def _static(func: tirx.PrimFunc) -> bool:
    buffers = [param for param in func.params if is_buffer_var(param)]
    return all(isinstance(extent, tirx.IntImm) for buffer in buffers for extent in buffer.shape)


def _bytes(buffer: tirx.Buffer) -> int:
    return tensor_bytes([int(extent) for extent in buffer.shape], buffer.dtype)


def tensor_bytes(extents: Iterable[int], dtype: Any) -> int:
    """Bytes of a tensor of elements of a ``tvm.DataType``."""
    return (prod(extents) * dtype.bits * dtype.lanes + 7) // 8


def bytes_of_extents(extents: Iterable[Any], dtype: Any) -> Any:
    """`tensor_bytes` of extents that are ints or expressions: an int where all are."""
    count: Any = tensor_bytes((), dtype)
    # Numbers first, as an expression cannot be told from zero.
    for extent in sorted(extents, key=lambda extent: not isinstance(extent, int)):
        count = count * extent
    return count
