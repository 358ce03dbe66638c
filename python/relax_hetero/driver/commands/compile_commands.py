"""Commands recorded by hand become one host function, compiled in this process.

Made of a fill and the dispatch of a kernel::

    def commands(table: T.int64, fixed: T.int64, parameter_0: T.int64) -> T.int32:  # where two tables of int64 lie
        fill.4(load(table) + 64, T.int32(0), 16)  # bytes of slot 0, whose address is the first entry of the table
        status = call.i64.i64(load(fixed), load(table), parameter_0)  # the kernel by its address
        return status  # of the first kernel that fails, else 0

Memory is integers here: what reads, fills, copies and calls it are functions in LLVM's language, which LLVM inlines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...artifact.commands import SLOT, Barrier, Command, Copy, Dispatch, Fill, KernelSpec, Reference
from ...artifact.dims import parse_dim
from ...artifact.signature import Dim
from ...errors import BuildError
from ...target.native_target import native
from ...tir.core.builder import Expr, Function
from ...vm.command_buffer.operands import parameter_name, size_name
from ..link.address_table import llvm_scalar, thunk
from ..link.link import reason
from ..link.llvm_kernels import build_llvm

_NAME = "relax_hetero.commands"
_ZERO = tirx.const(0, "int32")

HostFunction = Callable[..., int]
"""Of the address of slots' addresses and sizes, that of directs' and kernels' addresses, and the parameters."""


@functools.lru_cache(maxsize=64)
def compile_commands(
    commands: tuple[Command, ...],
    slots: int,
    directs: int,
    parameters: tuple[str, ...],
    kernels: tuple[KernelSpec, ...],
) -> HostFunction:
    """A function that runs commands; equal commands, on whatever memory, share it.

    Parameters
    ----------
    commands : tuple of Command
    slots, directs : int
        How many there are.
    parameters : tuple of str
        Their element types.
    kernels : tuple of KernelSpec

    Returns
    -------
    callable
        Gives the status of the first kernel that failed, after which nothing ran, else 0.

    Raises
    ------
    BuildError
        TVM refuses the function.
    """
    target = native("llvm")
    try:
        func = _Writer(slots, directs, parameters, kernels).write(commands).with_attr("target", target)
        return build_llvm(target, tvm.IRModule({_NAME: func}))[_NAME]
    except Exception as error:  # what TVM raises has no common class
        raise BuildError(f"a command buffer does not compile: {reason(error)}") from error


class _Writer:
    """Writes the host function of a list of commands."""

    def __init__(self, slots: int, directs: int, parameters: Sequence[str], kernels: Sequence[KernelSpec]) -> None:
        self._slots, self._directs = slots, directs
        self._kernels = {kernel.name: (number, kernel) for number, kernel in enumerate(kernels)}
        self._texts: dict[str, str] = {}
        self._table, self._fixed = tirx.Var("table", "int64"), tirx.Var("fixed", "int64")
        self._params = [tirx.Var(parameter_name(i), dtype) for i, dtype in enumerate(parameters)]
        self._values: dict[str, Expr] = {str(param.name): param for param in self._params}
        self._status: Any = None

    def write(self, commands: Sequence[Command]) -> tirx.PrimFunc:
        """The PrimFunc, with functions of LLVM's language that it calls."""
        with Function(_NAME) as function:
            for param in (self._table, self._fixed, *self._params):
                T.arg(str(param.name), param)
            T.func_ret(tvm.ir.PrimType("int32"))
            self._status = T.alloc_buffer((1,), "int32", scope="global")
            self._set_status(_ZERO)
            for command in commands:
                self._command(command)
            T.add_to_parent(tirx.stmt.Return(self._status[0]))
        func = function.result
        body = tirx.AttrStmt(_ZERO, "pragma_import_llvm", "".join(self._texts.values()), func.body)
        return tirx.PrimFunc(func.params, body, func.ret_type, func.attrs)

    def _command(self, command: Command) -> None:
        if isinstance(command, Barrier):  # commands run in order
            return
        with ExitStack() as stack:
            self._if(stack, self._status[0] == 0)
            if isinstance(command, Fill):
                self._fill(command)
            elif isinstance(command, Copy):
                length = self._value(command.target.length)
                self._do("copy", _COPY, self._address(command.target), self._address(command.source), length)
            else:
                self._dispatch(command, stack)

    def _fill(self, command: Fill) -> None:
        data = bytes.fromhex(command.pattern)
        width = len(data)
        count = tirx.floordiv(self._value(command.target.length), tirx.const(width, "int64"))
        text = _FILL.format(width=width, type=f"i{8 * width}")
        pattern = tirx.const(int.from_bytes(data, "little", signed=True), f"int{8 * width}")
        self._do(f"fill.{width}", text, self._address(command.target), pattern, count)

    def _dispatch(self, command: Dispatch, stack: ExitStack) -> None:
        number, kernel = self._kernels[command.kernel]
        if command.when is not None:
            self._if(stack, self._int32(self._address(command.when)) != 0)
        if command.unless is not None:
            self._if(stack, self._int32(self._address(command.unless)) == 0)
        counts = self._counts(command)
        for count in counts[kernel.workgroups :]:
            self._if(stack, count > 0)
        groups: list[Expr] = []
        for count in reversed([*counts, *[tirx.const(1, "int64")] * kernel.workgroups][: kernel.workgroups]):
            groups.insert(0, stack.enter_context(T.serial(_held(count))))
            self._if(stack, self._status[0] == 0)
        address = self._load(self._fixed, self._directs + number)
        operands = [self._address(operand) for operand in command.operands]
        scalars = [*(self._value(scalar) for scalar in command.scalars), *groups]
        typed = [_as(v, s.dtype) for v, s in zip(scalars, kernel.scalars, strict=True)]
        types = [*["i64"] * len(operands), *(llvm_scalar(scalar.dtype) for scalar in kernel.scalars)]
        name, text = thunk(types)
        self._texts[name] = text
        self._set_status(tirx.call_extern("int32", name, address, *operands, *typed))

    def _counts(self, command: Dispatch) -> list[Expr]:
        if command.count is None:
            return [self._value(count) for count in command.grid]
        first = self._address(command.count)
        return [self._int32(first + 4 * axis).astype("int64") for axis in range(len(command.grid))]

    def _if(self, stack: ExitStack, condition: Expr) -> None:
        stack.enter_context(T.If(condition))
        stack.enter_context(T.Then())

    def _set_status(self, value: Expr) -> None:
        T.buffer_store(self._status, value, [tirx.const(0, "int64")])

    def _address(self, reference: Reference) -> Expr:
        table = self._table if reference.space == SLOT else self._fixed
        base = self._load(table, reference.index)
        return base if reference.offset == 0 else base + self._value(reference.offset)

    def _value(self, dim: Dim | float) -> Expr:
        if isinstance(dim, float):
            return tirx.const(dim, "float64")
        if isinstance(dim, int):
            return tirx.const(dim, "int64")
        evaluate: Any = parse_dim(dim).evaluate
        sizes = {size_name(slot): self._load(self._table, self._slots + slot) for slot in range(self._slots)}
        value = evaluate({**sizes, **self._values})
        return value if isinstance(value, tirx.Var) else _held(value)

    def _load(self, table: Expr, index: int) -> Expr:
        self._texts["load"] = _LOAD.format(name="load", type="i64")
        return tirx.call_extern("int64", f"{_NAME}.load", table + 8 * index)

    def _int32(self, address: Expr) -> Expr:
        self._texts["int32"] = _LOAD.format(name="int32", type="i32")
        return tirx.call_extern("int32", f"{_NAME}.int32", address)

    def _do(self, name: str, text: str, *args: Expr) -> None:
        self._texts[name] = text
        T.evaluate(tirx.call_extern("int32", f"{_NAME}.{name}", *args))


def _held(value: Expr) -> Expr:
    """An int64 that passes do not look into: where they see that it is small, they pass an int32 in its place."""
    slot = T.alloc_buffer((1,), "int64", scope="global")
    T.buffer_store(slot, value, [tirx.const(0, "int64")])
    return slot[tirx.const(0, "int64")]


def _as(value: Expr, dtype: str) -> Expr:
    return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)


_LOAD = f"""define linkonce_odr hidden {{type}} @{_NAME}.{{name}}(i64 %address) alwaysinline {{{{
  %p = inttoptr i64 %address to ptr
  %v = load {{type}}, ptr %p, align 4
  ret {{type}} %v
}}}}
"""
_COPY = f"""declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)
define linkonce_odr hidden i32 @{_NAME}.copy(i64 %target, i64 %source, i64 %bytes) alwaysinline {{
  %t = inttoptr i64 %target to ptr
  %s = inttoptr i64 %source to ptr
  call void @llvm.memmove.p0.p0.i64(ptr %t, ptr %s, i64 %bytes, i1 false)
  ret i32 0
}}
"""
_FILL = f"""define linkonce_odr hidden i32 @{_NAME}.fill.{{width}}(i64 %target, {{type}} %pattern, i64 %count) {{{{
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
