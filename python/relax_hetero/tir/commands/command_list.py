"""Lists of commands as host functions: kernels, fills and copies in order; nothing runs after a failure.

Two kinds of lists become functions with a `CommandList`:

- Command buffers of a model (`host_function`), over tensors, an arena and numbers. A kernel is called as a plain
  function (`raw_kernel`) that returns a status; the host function then fails with the kernel's own error.
- Command buffers recorded by hand (`driver.commands.compile_commands`), whose memory and kernels are addresses. TIR
  cannot read, fill, copy or call an address in an int64, so functions in LLVM IR do, which LLVM inlines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..core.builder import Expr, Function

_PREFIX = "relax_hetero.commands"
_FIRST = tirx.const(0, "int64")

ADDRESS = "relax_hetero.address_of"
ADDRESS_TEXT = (
    f"define linkonce_odr hidden i64 @{ADDRESS}(ptr %data) alwaysinline {{\n"
    "  %address = ptrtoint ptr %data to i64\n  ret i64 %address\n}\n"
)
"""LLVM IR of a function that returns the address of a tensor's memory as a number."""


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


class CommandList:
    """Commands that are being written into a PrimFunc; each runs where none before it has failed."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._status = T.alloc_buffer((1,), "int32", scope="global")
        self._set(tirx.const(0, "int32"))

    @property
    def status(self) -> Expr:
        """The status of the first kernel that failed, else 0."""
        return self._status[_FIRST]

    @contextmanager
    def command(self) -> Iterator[None]:
        """The context of a command, which is skipped after a failure."""
        with T.If(self.status == 0), T.Then():
            yield

    def call(self, result: Expr) -> None:
        """Call a kernel: `result` is the call, whose value is a status. Within `command`."""
        self._set(result)

    def call_address(self, name: str, text: str, arguments: Sequence[Expr]) -> None:
        """Call a kernel by its address, the first argument, with the function `name` that `text` defines for LLVM."""
        self.call(self._extern("int32", name, text, *arguments))

    @contextmanager
    def repeated(self, counts: Sequence[Expr]) -> Iterator[list[Expr]]:
        """The context of nested loops, the first one innermost, that end at a failure; it gives their variables."""
        with ExitStack() as stack:
            numbers: list[Expr] = []
            for count in reversed(counts):
                numbers.insert(0, stack.enter_context(T.serial(held_in_memory(count))))
                stack.enter_context(self.command())
            yield numbers

    def fill(self, target: Expr, pattern: bytes, nbytes: Expr) -> None:
        """Repeat a pattern of 1, 2, 4 or 8 bytes over `nbytes` bytes at an address."""
        width = len(pattern)
        value = tirx.const(int.from_bytes(pattern, "little", signed=True), f"int{8 * width}")
        count = tirx.floordiv(nbytes, tirx.const(width, "int64"))
        text = _FILL.format(width=width, type=f"i{8 * width}")
        T.evaluate(self._extern("int32", f"{_PREFIX}.fill.{width}", text, target, value, count))

    def copy(self, target: Expr, source: Expr, nbytes: Expr) -> None:
        """Copy `nbytes` bytes from one address to another; they may share bytes."""
        T.evaluate(self._extern("int32", f"{_PREFIX}.copy", _COPY, target, source, nbytes))

    def load(self, dtype: str, address: Expr) -> Expr:
        """The int32 or int64 at an address."""
        text = _LOAD.format(name=dtype, type=f"i{dtype[3:]}")
        return self._extern(dtype, f"{_PREFIX}.{dtype}", text, address)

    def with_texts(self, func: tirx.PrimFunc) -> tirx.PrimFunc:
        """The PrimFunc with the LLVM IR of the functions that its commands call."""
        body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", "".join(self._texts.values()), func.body)
        return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)

    def _extern(self, dtype: str, name: str, text: str, *arguments: Expr) -> Expr:
        self._texts[name] = text
        return tirx.call_extern(dtype, name, *arguments)

    def _set(self, status: Expr) -> None:
        T.buffer_store(self._status, status, [_FIRST])


def held_in_memory(value: Expr) -> Expr:
    """An int64 in memory, which passes do not look into: they would narrow one that they see to be small to int32."""
    slot = T.alloc_buffer((1,), "int64", scope="global")
    T.buffer_store(slot, value, [_FIRST])
    return slot[_FIRST]


def host_function(
    name: str,
    params: Sequence[Tensor | tirx.Var],  # parameters in order; variables are scalars
    calls: Sequence[Call],  # calls of private PrimFuncs in the same module that return an int32
    # Target of the kernels. GPU kernels return no status: a launch that fails ends the host function by itself.
    target: tvm.target.Target,
) -> tirx.PrimFunc:
    """A PrimFunc that makes the calls in order."""
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
                    T.evaluate(_kernel_call(buffers, call))
            else:
                is_untyped = target.kind.name != "c"
                commands = CommandList()
                for call in calls:
                    result = _kernel_call(buffers, call, is_untyped)
                    with commands.command():
                        commands.call(result)
                with T.If(commands.status != 0), T.Then():
                    T.evaluate(tvm.ir.Call("tirx.tvm_throw_last_error", [], ret_ty="int32"))
    return function.result.without_attr("global_symbol").with_attr("target", target)


def _kernel_call(buffers: Sequence[Any], call: Call, is_untyped: bool = True) -> Expr:
    pointers = [_pointer(buffers[operand.param], operand, is_untyped) for operand in call.operands]
    return tvm.ir.Call(call.kernel, [*pointers, *call.scalars], ret_ty="int32")


def _pointer(buffer: Any, operand: Address, is_untyped: bool) -> Expr:
    if isinstance(operand.offset, int) and operand.offset == 0 and str(buffer.dtype) == operand.dtype:
        return buffer.data
    ty = tvm.ir.PointerType(tvm.ir.PrimType(operand.dtype), "global")
    offset = tirx.const(operand.offset, "int64") if isinstance(operand.offset, int) else operand.offset
    if not is_untyped:  # In C an address has the type of its buffer's elements.
        size = tirx.const((tvm.DataType(operand.dtype).bits + 7) // 8, "int64")
        buffer = T.decl_buffer([tirx.floordiv(e, size) for e in buffer.shape], operand.dtype, data=buffer.data)
        offset = tirx.floordiv(offset, size)
    return tvm.ir.Call("tirx.address_of", [buffer[offset]], ret_ty=ty)


_LOAD = f"""define linkonce_odr hidden {{type}} @{_PREFIX}.{{name}}(i64 %address) alwaysinline {{{{
  %p = inttoptr i64 %address to ptr
  %v = load {{type}}, ptr %p, align 4
  ret {{type}} %v
}}}}
"""
_COPY = f"""declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)
define linkonce_odr hidden i32 @{_PREFIX}.copy(i64 %target, i64 %source, i64 %bytes) alwaysinline {{
  %t = inttoptr i64 %target to ptr
  %s = inttoptr i64 %source to ptr
  call void @llvm.memmove.p0.p0.i64(ptr %t, ptr %s, i64 %bytes, i1 false)
  ret i32 0
}}
"""
_FILL = f"""define linkonce_odr hidden i32 @{_PREFIX}.fill.{{width}}(i64 %target, {{type}} %pattern, i64 %count) {{{{
entry:
  %t = inttoptr i64 %target to ptr
  %some = icmp sgt i64 %count, 0
  br i1 %some, label %loop, label %done
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %p = getelementptr {{type}}, ptr %t, i64 %i
  store {{type}} %pattern, ptr %p, align {{width}}
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %loop, label %done
done:
  ret i32 0
}}}}
"""
