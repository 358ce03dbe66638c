"""The submitter of a machine, which turns function calls into queued calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from tvm import runtime

from ...errors import HeteroError
from ..args.argument_binding import ArgumentBinder, BoundArguments
from ..args.argument_copies import copy_arguments
from ..args.donated_arguments import argument_memory, memory_in_flight
from ..args.results import check_out, fill, to_python
from ..device.constants import PlacedConstants
from ..device.forks import watch_forks
from ..device.machine_lock import MachineLock
from ..device.memory_limit import PoolWatch
from ..device.tensors import AddressRange, is_host
from ..device.threads import Threads, has_lost_threads
from ..file.executable import Executable
from .call import Prepared
from .fence import Fence
from .plan import QueuePlan, single_step_schedule
from .queued_calls import QueuedCalls
from .queues import Queues, overlapping


class Submitter:
    """Submits calls of a machine's functions to its queues.

    Parameters
    ----------
    machine : object
        Machine whose queues end with it. Calls in flight keep it alive; the submitter does not.
    devices : sequence of runtime.Device
        Devices by manifest index; the last is the host.
    lock : MachineLock
        Lock that is held while arguments are bound.
    max_in_flight : int
        Maximum number of calls in flight.
    make_queues : callable
        Called at the first submission; neither it nor its result may refer to the machine.

    Attributes
    ----------
    queued_functions
        Names of the functions whose plain calls go through the queues, too.
    is_cpu_only
        Whether all devices are CPUs.

    Raises
    ------
    BindingError
        A `max_in_flight` that is not a positive integer.
    """

    def __init__(
        self,
        machine: object,
        executable: Executable,
        devices: Sequence[runtime.Device],
        arguments: ArgumentBinder,
        lock: MachineLock,
        pool: PoolWatch,
        constants: PlacedConstants,
        max_in_flight: int,
        make_queues: Callable[[], Queues],
        threads: Threads,
    ) -> None:
        metadata = executable.metadata
        self.calls = QueuedCalls(machine, lock, max_in_flight, make_queues)
        self.queued_functions = set(executable.function_names) if has_lost_threads(threads) else overlapping(metadata)
        self.is_cpu_only = all(map(is_host, devices))
        self._devices = devices
        self._executable, self._arguments, self._lock = executable, arguments, lock
        self._pool, self._constants, self._threads = pool, constants, threads
        self._entries = range(len(devices) - 1)
        self._schedules = {schedule.function: schedule for schedule in metadata.schedules}
        self._plans: dict[str, QueuePlan] = {}
        memory_in_flight.is_needed |= any(signature.donated for signature in metadata.signatures.values())
        watch_forks(self)

    def submit(
        self,
        out: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        copy: bool,
        fence: Fence | None = None,
    ) -> Fence:
        """Submit function `name`; see `VirtualMachine.submit_into`."""
        signature = self._executable.signature(name)
        plan, prepare = partial(self._plan, name), partial(self._prepare, name, out)
        copy_now = partial(copy_arguments, signature, self._devices) if copy else None
        return self.calls.submit(signature, plan, prepare, args, kwargs, copy_now, fence)

    async def submit_async(
        self, out: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], copy: bool
    ) -> Fence:
        """Wait for capacity without blocking the event loop, then submit."""
        self._executable.signature(name)
        fence = await self.calls.reserve()
        try:
            return self.submit(out, name, args, kwargs, copy, fence)
        except BaseException:
            self.calls.abandon(fence)
            raise

    @contextmanager
    def when_idle(self) -> Iterator[None]:
        """Hold the lock while no call is in flight."""
        while True:
            self.calls.wait(None)
            with self._lock.held:
                if self.calls.wait(0):
                    yield
                    return

    @contextmanager
    def without_queues(self) -> Iterator[None]:
        """Hold the lock; with GPUs, whose graphs share arenas with queued calls, while no call is in flight."""
        with self._lock.held if self.is_cpu_only else self.when_idle():
            yield

    def _plan(self, name: str, queues: Queues) -> QueuePlan:
        plan = self._plans.get(name)
        if plan is None:
            schedule = self._schedules.get(name) or single_step_schedule(
                self._executable.signature(name), self._entries
            )
            plan = self._plans[name] = QueuePlan(schedule, queues)
        return plan

    def _prepare(self, name: str, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
        cache, ordered, call, tensors = self._arguments.find_cached(name, args, kwargs)
        if call is not None:
            bound = BoundArguments(call.values(tensors), call.dims, call.borrowed(tensors))
        else:
            bound = self._arguments.bind_uncached(name, cache, ordered, args, kwargs)
        values, dims, borrowed = bound
        if out is not None:
            check_out(out, self._executable.signature(name), dims.copy())
        extents = (name, *dims.values.values()) if dims.values else None
        memory = None
        if memory_in_flight.is_needed:
            signature = self._executable.signature(name)
            arguments = {**dict(zip(signature.input_names, args, strict=False)), **kwargs}
            memory = argument_memory(signature, values, arguments)
        return Prepared(values, dims.values, partial(self._finish, extents, borrowed, out), memory)

    def _finish(self, extents: Hashable, borrowed: list[AddressRange], out: Any, result: Any) -> Any:
        """Make the caller's result from the function's; runs in a queue's thread."""
        if extents is not None:
            self._pool.note(extents, (result,))
        return to_python(result, self._constants.ranges, borrowed) if out is None else fill(out, result)

    def after_fork(self) -> None:
        """Refuse calls in a process that was forked while the machine was in use; only `forks` calls this."""
        if self.calls.has_queues or not self._lock.is_free():
            message = (
                "this machine was at work when the process was forked, and its threads stayed behind; expected a "
                "VirtualMachine made from the Executable in the new process"
            )
            self._lock.refuse(message)
            self.calls.lose(HeteroError(message))
        elif has_lost_threads(self._threads):
            self.queued_functions = set(self._executable.function_names)
