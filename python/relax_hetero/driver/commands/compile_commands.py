"""Compilation of commands recorded by hand into one host function, in this process.

A fill and a dispatch become::

    def commands(table: T.int64, fixed: T.int64, parameter_0: T.int64) -> T.int32:  # addresses of two int64 tables
        fill.4(load(table) + 64, T.int32(0), 16)  # bytes of slot 0, whose address is the first entry of the table
        status = call.i64.i64(load(fixed), load(table), parameter_0)  # calls the kernel by address
        return status  # of the first kernel that fails, else 0

Addresses are integers here. `tir.commands.command_list` writes the commands; this module writes the address arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...artifact.commands import SLOT, Barrier, Command, Dispatch, Fill, KernelSpec, Reference
from ...artifact.dims import parse_dim
from ...artifact.signature import Dim
from ...errors import BuildError
from ...target.native_target import native
from ...tir.commands.command_list import CommandList, held_in_memory
from ...tir.core.builder import Expr, Function, as_type
from ...transform.ir.reasons import reason
from ...vm.command_buffer.operands import parameter_name, size_name
from ..link.address_table import llvm_scalar, thunk
from ..link.llvm_kernels import build_llvm

_NAME = "relax_hetero.commands"

HostFunction = Callable[..., int]
"""Function of the addresses of two tables (slots with sizes; directs and kernels), and of the parameters."""


@functools.lru_cache(maxsize=64)
def compile_commands(
    commands: tuple[Command, ...],  # commands to run in order
    slots: int,  # number of slots
    directs: int,  # number of direct buffers
    parameters: tuple[str, ...],  # element types of parameters
    kernels: tuple[KernelSpec, ...],  # kernels that the commands call
) -> HostFunction:
    """Compile commands to a function; cached, because it does not depend on the memory.

    The function returns the status of the first failing kernel, after which it stops, else 0. Raises BuildError if TVM
    refuses it.
    """
    target = native("llvm")
    try:
        func = _Writer(slots, directs, parameters, kernels).write(commands).with_attr("target", target)
        return build_llvm(target, tvm.IRModule({_NAME: func}))[_NAME]
    except Exception as error:  # TVM's exceptions here have no common class
        raise BuildError(f"a command buffer does not compile: {reason(error)}") from error


class _Writer:
    """Writer of the host function of commands."""

    def __init__(self, slots: int, directs: int, parameters: Sequence[str], kernels: Sequence[KernelSpec]) -> None:
        self._slots, self._directs = slots, directs
        self._kernels = {kernel.name: (number, kernel) for number, kernel in enumerate(kernels)}
        self._table, self._fixed = tirx.Var("table", "int64"), tirx.Var("fixed", "int64")
        self._params = [tirx.Var(parameter_name(i), dtype) for i, dtype in enumerate(parameters)]
        self._values: dict[str, Expr] = {str(param.name): param for param in self._params}
        self._list: CommandList

    def write(self, commands: Sequence[Command]) -> tirx.PrimFunc:
        """Write the PrimFunc of commands."""
        with Function(_NAME) as function:
            for param in (self._table, self._fixed, *self._params):
                T.arg(str(param.name), param)
            T.func_ret(tvm.ir.PrimType("int32"))
            self._list = CommandList()
            for command in commands:
                self._command(command)
            T.add_to_parent(tirx.stmt.Return(self._list.status))
        return self._list.with_texts(function.result)

    def _command(self, command: Command) -> None:
        if isinstance(command, Barrier):  # commands run in order
            return
        with self._list.command():
            if isinstance(command, Dispatch):
                self._dispatch(command)
                return
            target, nbytes = self._address(command.target), self._value(command.target.length)
            if isinstance(command, Fill):
                self._list.fill(target, bytes.fromhex(command.pattern), nbytes)
            else:
                self._list.copy(target, self._address(command.source), nbytes)

    def _dispatch(self, command: Dispatch) -> None:
        number, kernel = self._kernels[command.kernel]
        with ExitStack() as stack:
            if command.when is not None:
                self._only_if(stack, self._int32(self._address(command.when)) != 0)
            if command.unless is not None:
                self._only_if(stack, self._int32(self._address(command.unless)) == 0)
            counts = self._counts(command)
            for count in counts[kernel.workgroups :]:
                self._only_if(stack, count > 0)
            ones = [tirx.const(1, "int64")] * kernel.workgroups
            groups = stack.enter_context(self._list.repeated([*counts, *ones][: kernel.workgroups]))
            address = self._load(self._fixed, self._directs + number)
            operands = [self._address(operand) for operand in command.operands]
            scalars = [*(self._value(scalar) for scalar in command.scalars), *groups]
            typed = [as_type(v, s.dtype) for v, s in zip(scalars, kernel.scalars, strict=True)]
            types = [*["i64"] * len(operands), *(llvm_scalar(scalar.dtype) for scalar in kernel.scalars)]
            self._list.call_address(*thunk(types), [address, *operands, *typed])

    def _only_if(self, stack: ExitStack, condition: Expr) -> None:
        stack.enter_context(T.If(condition))
        stack.enter_context(T.Then())

    def _counts(self, command: Dispatch) -> list[Expr]:
        if command.count is None:
            return [self._value(count) for count in command.grid]
        first = self._address(command.count)
        return [self._int32(first + 4 * axis).astype("int64") for axis in range(len(command.grid))]

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
        return value if isinstance(value, tirx.Var) else held_in_memory(value)

    def _load(self, table: Expr, index: int) -> Expr:
        return self._list.load("int64", table + 8 * index)

    def _int32(self, address: Expr) -> Expr:
        return self._list.load("int32", address)
