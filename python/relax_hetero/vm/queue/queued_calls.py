"""Submitted calls of a machine: the limit of calls in flight, and the start of each call."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from asyncio import events
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from ...artifact.signature import FunctionSignature
from ...errors import BindingError, HeteroError
from ..args.donated_arguments import memory_in_flight
from ..device.machine_lock import MachineLock
from .call import Prepare, QueuedCall
from .fence import Fence, check_may_wait, thread_state, when_all_done
from .plan import QueuePlan
from .queues import Queues
from .trace import Trace

CopyArguments: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any], bool], tuple[Sequence[Any], Mapping[str, Any]]]
"""Function that copies arguments; with True also those that are placed later. TVM tensors are not copied."""

MAX_IN_FLIGHT = 4
"""Default maximum number of calls in flight: two for each of two pipeline stages, so that neither stage waits."""


class CallsInFlight:
    """The calls that a machine has in flight, and those that wait for capacity.

    `limit`: maximum number of calls in flight. Further calls block the submitting thread, or, if that runs an event
    loop, are put on a waiting list.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.RLock()  # reentrant: a signal handler or a finalizer may submit
        self._freed = threading.Condition(self._lock)
        self._changed = threading.Condition(self._lock)
        self.fences: set[Fence] = set()  # fences of the calls in flight, and of some that have just ended
        # Calls that wait for capacity without blocking a thread, each with the function to call then.
        self._waiting: dict[Fence, Callable[[], None]] = {}
        self._numbers = itertools.count(1)

    @property
    def is_idle(self) -> bool:
        """True if no call is in flight."""
        return not self.fences or all(fence.done() for fence in tuple(self.fences))

    def enter(self) -> Fence | None:
        """Admit another call, if necessary after a wait; returns its fence.

        A queue's thread is admitted without a wait. A thread with an event loop gets None instead of a wait.
        """
        fence = Fence(self.leave)
        with self._lock:
            if (len(self.fences) >= self._limit or self._waiting) and not thread_state.is_worker:
                if events._get_running_loop() is not None:
                    return None
                try:
                    self._freed.wait_for(lambda: len(self.fences) < self._limit)
                except BaseException:  # perhaps only this thread was notified: pass it on
                    self._freed.notify()
                    raise
            self.fences.add(fence)
        return fence

    def enqueue(self, fence: Fence, on_admitted: Callable[[], None]) -> None:
        """Call `on_admitted` when the call of `fence` is admitted, perhaps at once; first come, first served."""
        with self._lock:
            self._waiting[fence] = on_admitted
        self._admit()

    def leave(self, fence: Fence) -> None:
        """Remove a call that has ended or no longer waits; idempotent."""
        with self._lock:
            self.fences.discard(fence)
            self._waiting.pop(fence, None)
            self._freed.notify()
            self._changed.notify_all()
        memory_in_flight.drop(fence)
        if self._waiting:
            self._admit()

    def _admit(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or len(self.fences) >= self._limit:
                    return
                fence = next(iter(self._waiting))
                on_admitted = self._waiting.pop(fence)
                self.fences.add(fence)
            on_admitted()

    def next_number(self) -> int:
        """The number of the next call."""
        return next(self._numbers)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the present calls have ended; False after `timeout` seconds."""
        with self._lock:
            earlier = {*self.fences, *self._waiting}
            if earlier and timeout != 0:
                check_may_wait("calls")
            return self._changed.wait_for(lambda: earlier.isdisjoint({*self.fences, *self._waiting}), timeout)

    def fail_after_fork(self, error: HeteroError) -> None:
        """Fail all calls in a forked process, where the threads that would run them do not exist."""
        for fence in {*self.fences, *self._waiting}:
            fence.fail_after_fork(error)
        self._waiting.clear()


class QueuedCalls:
    """A machine's calls through its queues. Raises BindingError unless `max_in_flight` is a positive integer."""

    def __init__(
        self,
        owner: object,  # the machine; the queues end when it does
        lock: MachineLock,  # lock that is held while arguments are bound and while the machine runs a plain call
        max_in_flight: int,
        # Called at the first submission; neither it nor its result may refer to the machine.
        make_queues: Callable[[], Queues],
    ) -> None:
        if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int) or max_in_flight < 1:
            raise BindingError(f"max_in_flight is {max_in_flight!r}, expected a positive integer")
        self.limit = max_in_flight
        self.trace: Trace | None = None  # trace that records further calls
        self._owner = weakref.ref(owner)
        self._make_queues = make_queues
        self._calls = CallsInFlight(max_in_flight)
        self._fences = self._calls.fences
        self._queues: Queues | None = None
        self._lock = lock

    @property
    def is_idle(self) -> bool:
        """True if no call is in flight, and none is traced."""
        return self.trace is None and (not self._fences or self._calls.is_idle)

    @property
    def has_queues(self) -> bool:
        """True if any call has been submitted."""
        return self._queues is not None

    def wait(self, timeout: float | None) -> bool:
        """Wait until the calls submitted so far have ended; False after `timeout` seconds."""
        with self._lock.held:  # raises in a forked process
            calls = self._calls
        return calls.wait(timeout)

    def fail_after_fork(self, error: HeteroError) -> None:
        """Fail all calls in a forked process."""
        self._calls.fail_after_fork(error)

    @contextmanager
    def traced(self, trace: Trace) -> Iterator[Trace]:
        """Record calls in `trace` during a ``with`` block, whose end waits for them."""
        with self._lock.held:
            if self.trace is not None:
                raise HeteroError("this machine is being traced already; expected that trace to end first")
            self.trace = trace
        try:
            yield trace
        finally:
            self.trace = None
        trace.wait()

    def submit(
        self,
        signature: FunctionSignature,  # signature of the function
        plan: Callable[[Queues], QueuePlan],  # function that returns the plan
        prepare: Prepare,  # checks and places arguments; called with the machine's lock held
        # args, kwargs: the caller's arguments. A `Fence` among them stands for its result.
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        # Copies arguments that the caller may change during the call; None to borrow them all.
        copy_arguments: CopyArguments | None = None,
        fence: Fence | None = None,  # fence that `reserve` returned; None to wait for capacity here
    ) -> Fence:
        """Submit a call; waits for capacity as `CallsInFlight.enter` does."""
        with self._lock.held:
            queues = self._start_queues()
            number = self._calls.next_number()
        fence = fence or self._calls.enter()
        is_admitted = fence is not None
        fence = fence or Fence(self._calls.leave)
        trace = self.trace
        if trace is not None:
            plan, prepare = trace.follow(fence, plan, prepare)
        start = partial(self._start, plan, prepare, number, fence, self._owner())
        try:
            awaited = [value for value in (*args, *kwargs.values()) if isinstance(value, Fence)]
            if copy_arguments is not None:
                args, kwargs = copy_arguments(args, kwargs, bool(awaited) or not is_admitted)
            if awaited or not is_admitted:
                late = _LateStart(start, signature, args, kwargs, fence)
                begin = partial(queues.host.push, (number, -1), late)
                then = begin if is_admitted else partial(self._calls.enqueue, fence, begin)
                when_all_done(awaited, then)
            else:
                start(args, kwargs)
        except BaseException:
            self._calls.leave(fence)
            fence.cancel()  # a trace may still refer to it
            raise
        return fence

    async def reserve(self) -> Fence:
        """Wait for capacity without blocking the event loop; the fence is for `submit`, or `abandon`."""
        fence, loop = Fence(self._calls.leave), asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()

        def set_granted() -> None:
            if not granted.done():
                granted.set_result(None)

        def grant() -> None:
            try:
                loop.call_soon_threadsafe(set_granted)
            except RuntimeError:  # the loop was closed meanwhile
                self._calls.leave(fence)

        with self._lock.held:  # raises in a forked process
            self._calls.enqueue(fence, grant)
        try:
            await granted
        except BaseException:
            self._calls.leave(fence)
            raise
        return fence

    def abandon(self, fence: Fence) -> None:
        """Give back the capacity that `reserve` took, if no call follows."""
        self._calls.leave(fence)

    def _start_queues(self) -> Queues:
        if self._queues is None:
            self._queues = self._make_queues()
            weakref.finalize(self._owner(), self._queues.close).atexit = False
        return self._queues

    def _start(
        self,
        plan: Callable[[Queues], QueuePlan],
        prepare: Prepare,
        number: int,
        fence: Fence,
        owner: object,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        with self._lock.held:
            queues = self._start_queues()
            prepared = prepare(args, kwargs)
            call = QueuedCall(plan(queues), number, prepared, fence, owner)
            if prepared.memory is not None:
                memory_in_flight.add(fence, prepared.memory, call.live_values)
            queues.follow_caller()
        call.begin()


class _LateStart:
    """The start of a call that waited for fences or capacity, as work of a queue; errors go to the fence."""

    def __init__(
        self,
        start: Callable[[Sequence[Any], Mapping[str, Any]], None],
        signature: FunctionSignature,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        fence: Fence,
    ) -> None:
        self._start, self._signature, self._args, self._kwargs, self._fence = start, signature, args, kwargs, fence

    def run(self) -> None:
        if self._fence.cancelled():
            return
        names = (*self._signature.input_names, *map(str, range(len(self._args))))  # surplus arguments are refused later
        try:
            args = [self._resolve(value, name) for value, name in zip(self._args, names, strict=False)]
            self._start(args, {name: self._resolve(value, name) for name, value in self._kwargs.items()})
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, HeteroError):
            kind = type(error).__name__
            error = HeteroError(f"function {self._signature.name!r} could not begin: {kind}: {error}")
        self._fence.settle(None, error.with_traceback(None))

    def _resolve(self, value: Any, name: str) -> Any:
        """The result of a fence that is done; other values unchanged."""
        if not isinstance(value, Fence):
            return value
        what = f"argument {name!r} of {self._signature.name!r} is the result of a call that"
        if value.cancelled():
            raise HeteroError(f"{what} was cancelled")
        error = value.exception()
        if error is not None:
            raise HeteroError(f"{what} failed: {error}")
        return value.result()
