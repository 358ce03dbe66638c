"""Lists of commands as host functions: kernels called one after the other, over tensors, an arena and numbers.

A kernel is called as a plain function (`raw_kernel`) and says whether it failed; what follows a failure is not run,
and the host function fails with the kernel's own error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..core.builder import Expr, Function


@dataclass(frozen=True)
class Tensor:
    """A tensor parameter of a host function."""

    name: str
    shape: Sequence[Expr]
    dtype: str


@dataclass(frozen=True)
class Address:
    """Memory that a command works on: byte `offset` of parameter number `param`, as elements of `dtype`."""

    param: int
    offset: Expr
    dtype: str


@dataclass(frozen=True)
class Call:
    """A kernel, the memory of its tensors and the values of its scalars."""

    kernel: tvm.ir.GlobalVar
    operands: Sequence[Address]
    scalars: Sequence[Expr]


def host_function(
    name: str, params: Sequence[Tensor | tirx.Var], calls: Sequence[Call], target: tvm.target.Target
) -> tirx.PrimFunc:
    """A PrimFunc that makes the calls in order.

    Parameters
    ----------
    name : str
    params : sequence of Tensor or tirx.Var
        In order; variables are scalars.
    calls : sequence of Call
        Of private PrimFuncs in the same module that return an int32.
    target : tvm.target.Target
        Of the kernels. Those of GPUs have no status: a launch that fails ends the host function by itself.
    """
    is_gpu = "gpu" in target.keys
    with Function(name) as function:
        buffers: list[Any] = []
        for param in params:
            if isinstance(param, Tensor):
                buffers.append(function.argument(param.name, param.shape, param.dtype))
            else:
                buffers.append(T.arg(param.name, param))
        with function.body():
            if is_gpu:
                for call in calls:
                    T.evaluate(_called(buffers, call))
            else:
                _write(buffers, calls, is_untyped=target.kind.name != "c")
    return function.result.without_attr("global_symbol").with_attr("target", target)


def _write(buffers: Sequence[Any], calls: Sequence[Call], is_untyped: bool) -> None:
    zero = tirx.const(0, "int64")
    status = T.alloc_buffer((1,), "int32", scope="global")
    T.buffer_store(status, tirx.const(0, "int32"), [zero])
    for call in calls:
        result = _called(buffers, call, is_untyped)
        with T.If(status[zero] == 0):
            with T.Then():
                T.buffer_store(status, result, [zero])
    with T.If(status[zero] != 0):
        with T.Then():
            T.evaluate(tvm.ir.Call("tirx.tvm_throw_last_error", [], ret_ty="int32"))


def _called(buffers: Sequence[Any], call: Call, is_untyped: bool = True) -> Expr:
    pointers = [_pointer(buffers[operand.param], operand, is_untyped) for operand in call.operands]
    return tvm.ir.Call(call.kernel, [*pointers, *call.scalars], ret_ty="int32")


def _pointer(buffer: Any, operand: Address, is_untyped: bool) -> Expr:
    if isinstance(operand.offset, int) and operand.offset == 0 and str(buffer.dtype) == operand.dtype:
        return buffer.data
    ty = tvm.ir.PointerType(tvm.ir.PrimType(operand.dtype), "global")
    offset = tirx.const(operand.offset, "int64") if isinstance(operand.offset, int) else operand.offset
    if not is_untyped:  # In C pointers have types, and that of an address is its buffer's.
        size = tirx.const((tvm.DataType(operand.dtype).bits + 7) // 8, "int64")
        buffer = T.decl_buffer([tirx.floordiv(e, size) for e in buffer.shape], operand.dtype, data=buffer.data)
        offset = tirx.floordiv(offset, size)
    return tvm.ir.Call("tirx.address_of", [buffer[offset]], ret_ty=ty)
