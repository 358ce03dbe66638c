"""Interpreter of commands: calls kernels by address, and copies and fills with the C library.

Command buffers run this way without the compiler, and under a profiler.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tvm_ffi

from ...artifact.commands import ARENA, SLOT, Barrier, Command, Copy, Dispatch, Fill, KernelSpec, Reference
from ...artifact.dims import parse_dim
from ...artifact.kernel_addresses import kernel_address
from ...artifact.messages import unknown_name
from ...artifact.metadata import CPU
from ...artifact.signature import Dim
from ...errors import BindingError
from ..file.executable import Executable

Values: TypeAlias = Mapping[str, Any]  # parameters by name

SCALARS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "int8": ctypes.c_int8,
    "int16": ctypes.c_int16,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "uint8": ctypes.c_uint8,
    "uint16": ctypes.c_uint16,
    "uint32": ctypes.c_uint32,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}
"""Element types that scalar arguments of kernels may have, with their C types."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of an executable, loaded in this process."""

    spec: KernelSpec
    # Address of a C function of pointers and scalars that returns an int32, 0 unless it failed. 0 for GPU kernels,
    # which the code launches.
    address: int
    code: Any = field(repr=False, compare=False)  # module that contains it, kept loaded

    @functools.cached_property
    def launch(self) -> Callable[..., Any]:
        """The launch of a GPU kernel as a function of addresses and scalars."""
        function = self.code.get_function(self.spec.symbol, True)
        tensors = len(self.spec.tensors)
        return lambda *args: function(*map(ctypes.c_void_p, args[:tensors]), *args[tensors:])

    @functools.cached_property
    def function(self) -> Callable[..., int]:
        """The C function as a Python function."""
        scalars = [SCALARS[scalar.dtype] for scalar in self.spec.scalars]
        return ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * len(self.spec.tensors), *scalars)(self.address)


def load_kernel(executable: Executable, name: str) -> Kernel:
    """A kernel of an executable; BindingError if it is absent, or cannot be called by hand."""
    spec = executable.metadata.kernels.get(name)
    if spec is None:
        raise unknown_name("kernel", name, executable.metadata.kernels, "the executable")
    if not spec.symbol:
        backend = executable.devices[spec.device].backend
        kind = backend.kind
        expected = "a PrimFunc that the module makes public" if backend.is_gpu else "one that has an address: 'llvm'"
        raise BindingError(f"kernel {name!r} is code of the kind {kind!r}, expected {expected}")
    code = executable.runnable_module()
    is_host = executable.devices[spec.device].device_type == CPU
    return Kernel(spec, kernel_address(code, spec.symbol) if is_host else 0, code)


@dataclass(frozen=True)
class Memory:
    """The addresses of memory for the commands of one submission."""

    # Addresses of bindings and of direct buffers.
    slots: Sequence[int]
    directs: Sequence[int]
    arena: int = 0  # address of transient values, if any

    def address(self, reference: Reference, values: Values) -> int:
        """The address of a reference's first byte."""
        if reference.space == ARENA:
            base = self.arena
        else:
            base = (self.slots if reference.space == SLOT else self.directs)[reference.index]
        return base + value_of(reference.offset, values)


def value_of(dim: Dim | float, values: Values) -> Any:
    """The value of a number, or of text over parameters."""
    if not isinstance(dim, str):
        return dim
    evaluate = parse_dim(dim).evaluate
    return values[dim] if evaluate is None else evaluate(values)


def walk(commands: Iterable[Command], kernels: Mapping[str, Kernel], memory: Memory, values: Values) -> None:
    """Run commands in order, up to a kernel that fails. Raises the exception of a failing kernel."""
    for command in commands:
        run_command(command, kernels, memory, values)


def run_command(command: Command, kernels: Mapping[str, Kernel], memory: Memory, values: Values) -> None:
    """Run one command; see `walk`."""
    if isinstance(command, Dispatch):
        _dispatch(command, kernels[command.kernel], memory, values)
    elif isinstance(command, Copy):
        length = value_of(command.target.length, values)
        ctypes.memmove(memory.address(command.target, values), memory.address(command.source, values), length)
    elif isinstance(command, Fill):
        _fill(memory.address(command.target, values), value_of(command.target.length, values), command.pattern)
    else:
        assert isinstance(command, Barrier), f"{type(command).__name__} is not a command"


def _dispatch(command: Dispatch, kernel: Kernel, memory: Memory, values: Values) -> None:
    def read(reference: Reference, count: int) -> Sequence[int]:
        return list((ctypes.c_int32 * count).from_address(memory.address(reference, values)))

    call = None
    for indices in workgroups(command, kernel, values, read):
        call = call or bound(command, kernel, memory, values)
        if call(*indices):
            raise_kernel_error()


def workgroups(
    command: Dispatch, kernel: Kernel, values: Values, read: Callable[[Reference, int], Sequence[int]]
) -> Iterator[tuple[int, ...]]:
    """Indices of the workgroups of a dispatch, x innermost; none if its predicates forbid it. `read`: reads int32s."""
    for predicate, runs in ((command.when, True), (command.unless, False)):
        if predicate is not None and bool(read(predicate, 1)[0]) != runs:
            return
    grid = command.grid
    counts = [value_of(n, values) for n in grid] if command.count is None else read(command.count, len(grid))
    if min(counts) > 0:
        counts = [*counts, *[1] * kernel.spec.workgroups][: kernel.spec.workgroups]
        yield from (numbers[::-1] for numbers in itertools.product(*map(range, reversed(counts))))


def bound(command: Dispatch, kernel: Kernel, memory: Memory, values: Values) -> Callable[..., int]:
    """The kernel with the addresses and scalars of a dispatch, as a function of the workgroup indices."""
    addresses = [memory.address(operand, values) for operand in command.operands]
    return functools.partial(kernel.function, *addresses, *converted_scalars(command, kernel, values))


def converted_scalars(command: Dispatch, kernel: Kernel, values: Values) -> list[Any]:
    """The scalars of a dispatch, without the workgroup indices, which come last."""
    dtypes = [scalar.dtype for scalar in kernel.spec.scalars]
    pairs = zip(command.scalars, dtypes, strict=False)
    return [_converted(value_of(scalar, values), dtype) for scalar, dtype in pairs]


def _converted(value: Any, dtype: str) -> Any:
    return float(value) if dtype.startswith("float") else value


def _fill(address: int, length: int, pattern: str) -> None:
    one = bytes.fromhex(pattern)
    if len(set(one)) == 1:
        ctypes.memset(address, one[0], length)
        return
    done = min(len(one), length)
    ctypes.memmove(address, one, done)
    while done < length:  # doubles the filled range each time
        count = min(done, length - done)
        ctypes.memmove(address + done, address, count)
        done += count


_SafeCall = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
# Returns failure without setting an error, so that the FFI raises the one that a kernel has set before.
_return_failure = _SafeCall(lambda _self, _args, _count, _result: -1)
_raise_pending = tvm_ffi.Function.__from_extern_c__(ctypes.cast(_return_failure, ctypes.c_void_p).value)


def raise_kernel_error() -> None:
    """Raise the error that a failing kernel, called by address in this thread, has set."""
    _raise_pending()
