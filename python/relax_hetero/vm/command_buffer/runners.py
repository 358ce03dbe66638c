"""Runners, which submit a recording to a device and run it there."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tvm import base

from ...artifact.messages import explain_failure
from ...errors import BindingError, HeteroError
from ...providers import provided
from ...target.backend import backends
from ..device.threads import enter_call, leave_call
from ..machine import VirtualMachine
from ..region.walk_commands import Memory, raise_kernel_error, walk
from .binding_table import BindingTable
from .operands import parameter_name
from .recorder import Recording


class Submission:
    """Submitted work of a device; made by `CommandBuffer.submit`.

    Parameters
    ----------
    fence : object, optional
        Object with ``wait()`` and ``done()``; None for work that has ended.
    """

    __slots__ = ("_fence",)

    def __init__(self, fence: Any = None) -> None:
        self._fence = fence

    def __repr__(self) -> str:
        return f"<Submission, {'done' if self.done() else 'running'}>"

    def wait(self) -> None:
        """Wait until the work has ended."""
        if self._fence is not None:
            self._fence.wait()

    def done(self) -> bool:
        """Return whether the work has ended."""
        return self._fence is None or bool(self._fence.done())


ENDED = Submission()  # submission whose work has ended


class Runner(ABC):
    """Runs a recording on one device; thread-safe and reentrant.

    Each kind of device has a class of its own (`runner_for`). Callers have checked tables and numbers.
    """

    runs: str  # how commands run, as in `RegionSpec.runs`

    def __init__(self, machine: VirtualMachine) -> None:
        self._metadata = machine.executable.metadata

    def __call__(self, table: BindingTable, numbers: tuple[int | float, ...]) -> Submission:
        """Submit with a table and the parameters' values."""
        try:
            return self._submit(table, numbers)
        except HeteroError:
            raise
        except Exception as error:  # a kernel may raise anything
            raise explain_failure("a command buffer", error, self._metadata) from error

    @abstractmethod
    def _submit(self, table: BindingTable, numbers: tuple[int | float, ...]) -> Submission:
        """See `__call__`; work that outlasts the call keeps the table alive until then."""


def runner_for(machine: VirtualMachine, recording: Recording, compiled: bool) -> Runner:
    """The runner of a recording on its device.

    `compiled`: whether to compile it to machine code if the compiler is available; otherwise commands are interpreted.
    Raises BindingError if the kind of device does not support command buffers recorded by hand.
    """
    check_device_kind(machine, recording.device)
    backend = machine.executable.devices[recording.device].backend
    runner: Runner = backend.runner(machine, recording, compiled and not base._RUNTIME_ONLY)
    return runner


def check_device_kind(machine: VirtualMachine, device: int) -> None:
    """Require a kind of device with a runner; BindingError otherwise."""
    spec = machine.executable.devices[device]
    if not spec.backend.records_by_hand:
        kinds = " or ".join(repr(backend.kind) for backend in backends() if backend.records_by_hand)
        raise BindingError(f"a command buffer needs a device of the kind {kinds}, found {spec.kind!r}")


class HostRunner(Runner):
    """Runs a recording on a CPU, in the calling thread."""

    def __init__(self, machine: VirtualMachine, recording: Recording, compiled: bool) -> None:
        super().__init__(machine)
        self._threads = machine._threads
        self.runs = "host function" if compiled else "walked commands"
        self._run_commands = _compiled_function(recording) if compiled else _interpreting_function(recording)

    def _submit(self, table: BindingTable, numbers: tuple[int | float, ...]) -> Submission:
        pool = enter_call(self._threads)
        try:
            self._run_commands(table, numbers)
        finally:
            leave_call(pool)
        return ENDED


_RunCommands = Callable[[BindingTable, tuple[int | float, ...]], None]


def _interpreting_function(recording: Recording) -> _RunCommands:
    names = [parameter_name(index) for index in range(len(recording.parameters))]
    directs = [buffer.address for buffer in recording.directs]

    def run(table: BindingTable, numbers: tuple[int | float, ...]) -> None:
        values: dict[str, Any] = {**table.values, **dict(zip(names, numbers, strict=True))}
        walk(recording.commands, recording.kernels, Memory(table.addresses, directs), values)

    return run


def _compiled_function(recording: Recording) -> _RunCommands:
    kernels = list(recording.kernels.values())
    addresses = [*(buffer.address for buffer in recording.directs), *(kernel.address for kernel in kernels)]
    address_table = (ctypes.c_int64 * max(1, len(addresses)))(*addresses)
    table_pointer = ctypes.addressof(address_table)
    host_function = provided("compile_commands")(
        recording.commands, len(recording.slots), len(recording.directs), recording.parameters,
        tuple(kernel.spec for kernel in kernels),
    )  # fmt: skip

    def run(table: BindingTable, numbers: tuple[int | float, ...], _keep_alive: object = address_table) -> None:
        if host_function(table.pointer, table_pointer, *numbers):
            raise_kernel_error()

    return run
