"""Kernels of a module: the kernel and device of a call, its fused ops, its arithmetic, the bytes of its tensors.

Ops and arithmetic are attributes of a kernel, which the executable keeps.
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
from .rewriting import op_name, vdevice_in, walk_bindings, with_functions


def called_prim_func(mod: tvm.IRModule, value: relax.Expr) -> tvm.ir.GlobalVar | None:
    """The PrimFunc that a Relax call runs, by call_tir and similar ops, or directly once outputs are explicit."""
    if not isinstance(value, relax.Call):
        return None
    callee = value.args[0] if op_name(value) in CALL_TIR_OPS else value.op
    if isinstance(callee, tvm.ir.GlobalVar) and isinstance(mod.functions.get(callee), tirx.PrimFunc):
        return callee
    return None


def call_vdevice(value: relax.Call) -> relax.VDevice | None:
    """The device that a call runs on: that of its result, else of its first tensor operand, in tuples as well."""
    types = (*value.ty_args, value.ty, *(arg.ty for arg in value.args))
    return next((vdevice for ty in types if (vdevice := vdevice_in(ty)) is not None), None)


OPS = "relax_hetero.ops"


def fused_ops(mod: tvm.IRModule) -> dict[str, list[str]]:
    """Ops by the name of the fused function, in order; for a module between FuseOps and FuseTIR."""
    ops: dict[str, list[str]] = {}
    for gv, func in mod.functions.items():
        if isinstance(func, relax.Function) and func.attrs.get("Primitive"):
            kernels = [called_prim_func(mod, binding.value) for binding in walk_bindings(func)]
            ops[gv.name_hint] = [_op_of(kernel.name_hint) for kernel in kernels if kernel is not None]
    return ops


def with_ops(mod: tvm.IRModule, fused: dict[str, list[str]]) -> tvm.IRModule:
    """Annotate kernels with their ops, unless they are annotated already."""
    functions = {
        gv: func.with_attr(OPS, fused.get(gv.name_hint, [_op_of(gv.name_hint)]))
        for gv, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc) and OPS not in func.attrs
    }
    return with_functions(mod, functions)


def ops_of(func: tirx.PrimFunc) -> tuple[str, ...]:
    """The ops of a kernel; empty for TVM's kernels that compute shapes."""
    return tuple(str(op) for op in func.attrs.get(OPS, ()))


def _op_of(kernel: str) -> str:
    # Legalization names the kernel of exp tir_exp, and numbers the kernels of one op.
    return re.sub(r"\d+$", "", kernel).removeprefix("tir_")


OPAQUE = 8
"""Value of a kernel's attribute ``op_pattern``, TVM's OpPatternKind, for kernels that FuseOps fuses with no other."""


def opaque_kernel(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel as a private function that FuseOps fuses with no other."""
    return kernel.without_attr("global_symbol").with_attr("op_pattern", OPAQUE)


OPERATIONS = "relax_hetero.operations"
PRECISION = "relax_hetero.precision"


def work_attributes(problem: Any) -> dict[str, int | str]:
    """The attributes of a kernel that solves a problem; empty if its arithmetic is not counted."""
    attributes: dict[str, int | str] = {OPERATIONS: operations(problem), PRECISION: precision(problem)}
    return {name: value for name, value in attributes.items() if value}


def operations_of(func: tirx.PrimFunc) -> int:
    """Multiplications and additions of the products in a kernel; 0 if they are unknown."""
    return int(func.attrs.get(OPERATIONS, 0))


def precision_of(func: tirx.PrimFunc, arguments: Iterable[str] | None = None) -> str:
    """The element types of a kernel's products, as `encoding.arithmetic` writes them, else those of its arguments.

    `arguments`: the element types of its tensors, if its parameters lack them.
    """
    if arguments is None:
        arguments = (str(param.dtype) for param in func.params if is_buffer_var(param))
    text = str(func.attrs.get(PRECISION, "")) or precision_of_arguments(arguments)
    return with_fp16_partial_sums(text, str(func.attrs[FP16_PARTIAL_SUMS])) if FP16_PARTIAL_SUMS in func.attrs else text


def bytes_of(func: tirx.PrimFunc) -> int:
    """Bytes of a kernel's arguments, each read or written once; 0 if an extent is symbolic."""
    buffers = [param for param in func.params if is_buffer_var(param)]
    if not all(isinstance(extent, tirx.IntImm) for buffer in buffers for extent in buffer.shape):
        return 0
    return sum(tensor_bytes(map(int, buffer.shape), buffer.dtype) for buffer in buffers)


def tensor_bytes(extents: Iterable[int], dtype: Any) -> int:
    """Bytes of a tensor of elements of a ``tvm.DataType``."""
    return (prod(extents) * dtype.bits * dtype.lanes + 7) // 8


def bytes_of_extents(extents: Iterable[Any], dtype: Any) -> Any:
    """`tensor_bytes` of extents that are ints or expressions; an int if all are ints."""
    # Numbers first: TVM folds a product by a known zero.
    return prod(sorted(extents, key=lambda extent: not isinstance(extent, int)), start=tensor_bytes((), dtype))
