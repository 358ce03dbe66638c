"""Submitter of a machine: turns calls of its functions into queued calls."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from tvm import runtime

from ...errors import HeteroError
from ..args.argument_binding import ArgumentBinder
from ..args.argument_copies import copy_arguments
from ..args.donated_arguments import argument_memory, memory_in_flight
from ..args.results import check_out_buffers, fill_out_buffers, to_python
from ..device import threads
from ..device.constants import PlacedConstants
from ..device.machine_lock import MachineLock, hold_to_fork, release_after_fork
from ..device.memory_limit import PoolWatch
from ..device.tensors import AddressRange, is_host
from ..device.threads import Threads, has_lost_threads
from ..file.executable import Executable
from .call import PreparedCall
from .fence import Fence
from .plan import QueuePlan, single_step_schedule
from .queued_calls import QueuedCalls
from .queues import Queues, functions_to_queue


class Submitter:
    """Submits calls of a machine's functions to its queues.

    Raises BindingError for a `max_in_flight` that is not a positive integer.
    """

    def __init__(
        self,
        # The machine, which calls in flight keep alive. The submitter has only a weak reference to it, and ends the
        # queues when the machine is deleted.
        machine: object,
        executable: Executable,  # executable of the machine
        devices: Sequence[runtime.Device],  # devices by manifest index; the last is the host
        binder: ArgumentBinder,  # checks and places arguments
        lock: MachineLock,  # lock that is held while arguments are bound
        pool_watch: PoolWatch,  # watch of TVM's buffer pool, which is told about each call with symbolic extents
        constants: PlacedConstants,  # constants of the machine, whose memory results must not share
        max_in_flight: int,  # maximum number of calls in flight
        # Called at the first submission; neither it nor its result may refer to the machine.
        make_queues: Callable[[], Queues],
        threads: Threads,  # worker threads of the machine's kernels
    ) -> None:
        metadata = executable.metadata
        self.calls = QueuedCalls(machine, lock, max_in_flight, make_queues)
        # Functions whose plain calls (those that wait for the result) also go through the queues.
        self.queued_functions = (
            set(executable.function_names)
            if has_lost_threads(threads)
            else functions_to_queue(metadata, is_bound=bool(threads.cpus))
        )
        self.is_cpu_only = all(map(is_host, devices))  # whether all devices are CPUs
        self._devices = devices
        self._executable, self._binder, self._lock = executable, binder, lock
        self._pool_watch, self._constants, self._threads = pool_watch, constants, threads
        self._device_indices = range(len(devices) - 1)  # without the host
        self._schedules = {schedule.function: schedule for schedule in metadata.schedules}
        self._plans: dict[str, QueuePlan] = {}
        memory_in_flight.is_enabled |= any(signature.donated for signature in metadata.signatures.values())
        _submitters.add(self)

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
    def plain_call(self) -> Iterator[None]:
        """Hold the lock for a plain call; with GPUs, whose graphs share arenas, only while no call is in flight."""
        with self._lock.held if self.is_cpu_only else self.when_idle():
            yield

    def _plan(self, name: str, queues: Queues) -> QueuePlan:
        plan = self._plans.get(name)
        if plan is None:
            signature = self._executable.signature(name)
            schedule = self._schedules.get(name) or single_step_schedule(signature, self._device_indices)
            plan = self._plans[name] = QueuePlan(schedule, queues)
        return plan

    def _prepare(self, name: str, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PreparedCall:
        signature = self._executable.signature(name)
        cache, positional, cached_call, tensors = self._binder.find_cached(name, args, kwargs)
        if cached_call is not None:
            values, dims, borrowed = cached_call.values(tensors), cached_call.dims, cached_call.borrowed(tensors)
        else:
            values, dims, borrowed = self._binder.bind_uncached(name, cache, positional, args, kwargs)
        if out is not None:
            check_out_buffers(out, signature, dims.copy())
        extents = (name, *dims.values.values()) if dims.values else None
        memory = None
        if memory_in_flight.is_enabled:
            arguments = {**dict(zip(signature.input_names, args, strict=False)), **kwargs}
            memory = argument_memory(signature, values, arguments)
        return PreparedCall(values, dims.values, partial(self._finish, extents, borrowed, out), memory)

    def _finish(self, extents: Hashable, borrowed: list[AddressRange], out: Any, result: Any) -> Any:
        """Make the caller's result from the function's; runs in a queue's thread.

        `extents` has the function's name and its symbolic extents, None without any.
        """
        if extents is not None:
            self._pool_watch.note(extents, (result,))
        return to_python(result, self._constants.ranges, borrowed) if out is None else fill_out_buffers(out, result)

    def after_fork(self) -> None:
        """Called in a forked child, which has only the thread that forked.

        A machine that was in use refuses all calls, and its pending fences fail. If TVM's thread pool of the forking
        thread was lost, plain calls go through queues, whose threads start in the child and have pools of their own.
        """
        if self.calls.has_queues or not self._lock.is_free():
            message = (
                "this machine was in use when the process was forked, and its threads do not exist in the child; "
                "expected a VirtualMachine made from the Executable in the child"
            )
            self._lock.refuse(message)
            self.calls.fail_after_fork(HeteroError(message))
        elif has_lost_threads(self._threads):
            self.queued_functions = set(self._executable.function_names)


_submitters: weakref.WeakSet[Submitter] = weakref.WeakSet()


def _after_fork() -> None:
    release_after_fork()
    threads.after_fork()  # first, because machines ask whether threads were lost
    for submitter in list(_submitters):
        submitter.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=hold_to_fork, after_in_parent=release_after_fork, after_in_child=_after_fork)
