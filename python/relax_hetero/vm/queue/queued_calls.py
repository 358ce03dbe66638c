"""Calls that a machine takes without waiting for them: how many may be under way, and how each begins."""

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
from ..args.donated_arguments import exclusive_calls
from ..device.machine_lock import MachineLock
from .call import Prepare, QueuedCall
from .fence import Fence, check_may_wait, thread_state, when_all_done
from .plan import QueuePlan
from .queues import Queues
from .trace import Trace

CopyArguments: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any], bool], tuple[Sequence[Any], Mapping[str, Any]]]
"""Copies arguments, by position and by name; all that are not tensors of TVM, where they are read after it returns."""

MAX_IN_FLIGHT = 4
"""The default number of calls under way at once: two for each of two stages, so that neither stage waits."""


class CallsInFlight:
    """How many calls a machine has under way, and room for them.

    Parameters
    ----------
    limit : int
        How many there may be; further ones wait in the thread that submits them, or in line where that thread runs an
        event loop.

    Attributes
    ----------
    fences : set of Fence
        Fences of the calls under way, and of some that have just ended.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.RLock()  # a signal handler, or a finalizer, may submit while this thread holds it
        self._room = threading.Condition(self._lock)
        self._changed = threading.Condition(self._lock)
        self.fences: set[Fence] = set()
        # Calls that wait for room without a thread, each with a function that is told once there is some.
        self._line: dict[Fence, Callable[[], None]] = {}
        self._numbers = itertools.count(1)

    @property
    def is_idle(self) -> bool:
        """True if no call is under way."""
        return not self.fences or all(fence.done() for fence in tuple(self.fences))

    def enter(self) -> Fence | None:
        """The fence of another call, when there is room for it; a thread that runs queues does not wait for any.

        Nor does one that runs an event loop, which would stand still: None, where there is no room.
        """
        fence = Fence(self.leave)
        with self._lock:
            if (len(self.fences) >= self._limit or self._line) and not thread_state.is_worker:
                if events._get_running_loop() is not None:
                    return None
                try:
                    self._room.wait_for(lambda: len(self.fences) < self._limit)
                except BaseException:  # the room was perhaps announced to this thread alone
                    self._room.notify()
                    raise
            self.fences.add(fence)
        return fence

    def line_up(self, fence: Fence, on_room: Callable[[], None]) -> None:
        """Have `on_room` called when there is room for the call of `fence`, perhaps at once; the first come first."""
        with self._lock:
            self._line[fence] = on_room
        self._admit()

    def leave(self, fence: Fence) -> None:
        """A call has ended, whatever way, or waits no more; perhaps told more than once."""
        with self._lock:
            self.fences.discard(fence)
            self._line.pop(fence, None)
            self._room.notify()
            self._changed.notify_all()
        exclusive_calls.drop(fence)
        if self._line:
            self._admit()

    def _admit(self) -> None:
        while True:
            with self._lock:
                if not self._line or len(self.fences) >= self._limit:
                    return
                fence = next(iter(self._line))
                on_room = self._line.pop(fence)
                self.fences.add(fence)
            on_room()

    def next_number(self) -> int:
        """The number of another call."""
        return next(self._numbers)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the calls that are under way have ended; False after `timeout` seconds."""
        with self._lock:
            earlier = {*self.fences, *self._line}
            if earlier and timeout != 0:
                check_may_wait("calls")
            return self._changed.wait_for(lambda: earlier.isdisjoint({*self.fences, *self._line}), timeout)

    def lose(self, error: HeteroError) -> None:
        """In a process that was forked: the calls under way stayed behind."""
        for fence in {*self.fences, *self._line}:
            fence.lose(error)
        self._line.clear()


class QueuedCalls:
    """A machine's calls through its queues.

    Parameters
    ----------
    owner : object
        The machine; the queues end when it does.
    lock : MachineLock
        Held while arguments are bound and while the machine runs a plain call: neither begins during the other.
    make_queues : callable
        Called with the first submission; neither it nor its result may refer to the machine.

    Attributes
    ----------
    trace : Trace or None
        Trace that follows the calls that come.

    Raises
    ------
    BindingError
        A `max_in_flight` that is no positive integer.
    """

    def __init__(self, owner: object, lock: MachineLock, max_in_flight: int, make_queues: Callable[[], Queues]) -> None:
        if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int) or max_in_flight < 1:
            raise BindingError(f"max_in_flight is {max_in_flight!r}, expected a positive integer")
        self.limit = max_in_flight
        self.trace: Trace | None = None
        self._owner = weakref.ref(owner)
        self._make_queues = make_queues
        self._calls = CallsInFlight(max_in_flight)
        self._fences = self._calls.fences
        self._queues: Queues | None = None
        self._lock = lock

    @property
    def is_idle(self) -> bool:
        """True if no call is under way, and nobody watches for any."""
        return self.trace is None and (not self._fences or self._calls.is_idle)

    @property
    def has_queues(self) -> bool:
        """True if any call has been submitted."""
        return self._queues is not None

    def wait(self, timeout: float | None) -> bool:
        """Wait until the calls submitted so far have ended; False after `timeout` seconds without."""
        with self._lock.held:  # refused in a process that was forked
            calls = self._calls
        return calls.wait(timeout)

    def lose(self, error: HeteroError) -> None:
        """In a process that was forked: the calls under way fail."""
        self._calls.lose(error)

    @contextmanager
    def traced(self, trace: Trace) -> Iterator[Trace]:
        """Have `trace` follow the calls that come while this lasts; it ends when those have."""
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
        signature: FunctionSignature,
        plan: Callable[[Queues], QueuePlan],
        prepare: Prepare,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        copy_arguments: CopyArguments | None = None,
        fence: Fence | None = None,
    ) -> Fence:
        """Take a call, once there is room for it.

        Parameters
        ----------
        signature : FunctionSignature
            Signature of the function.
        plan : callable
            Gives the function's plan.
        prepare : Prepare
            Checks and places arguments; called under the machine's lock.
        args, kwargs
            The caller's. A `Fence` among them stands for its result.
        copy_arguments : CopyArguments, optional
            Copies what the caller may change while the call is under way; None where that is left to the caller.
        fence : Fence, optional
            Fence of `room`; None to wait for room here.
        """
        with self._lock.held:
            queues = self._started()
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
                then = begin if is_admitted else partial(self._calls.line_up, fence, begin)
                when_all_done(awaited, then)
            else:
                start(args, kwargs)
        except BaseException:
            self._calls.leave(fence)
            fence.cancel()  # nobody has it, but a trace may follow it
            raise
        return fence

    async def room(self) -> Fence:
        """Wait, without holding the event loop up, until another call may be under way; for `submit`, or `abandon`."""
        fence, loop = Fence(self._calls.leave), asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not granted.done():
                granted.set_result(None)

        def grant() -> None:
            try:
                loop.call_soon_threadsafe(tell)
            except RuntimeError:  # the loop was closed meanwhile
                self._calls.leave(fence)

        with self._lock.held:  # refused in a process that was forked
            self._calls.line_up(fence, grant)
        try:
            await granted
        except BaseException:
            self._calls.leave(fence)
            raise
        return fence

    def abandon(self, fence: Fence) -> None:
        """Leave the room that `room` gave, where there is no call."""
        self._calls.leave(fence)

    def _started(self) -> Queues:
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
            queues = self._started()
            prepared = prepare(args, kwargs)
            call = QueuedCall(plan(queues), number, prepared, fence, owner)
            if prepared.memory is not None:
                exclusive_calls.add(fence, prepared.memory, call.held)
            queues.follow_caller()
        call.begin()


class _LateStart:
    """The start of a call that waited for others, as queues run it: what goes wrong goes to the fence."""

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
        names = (*self._signature.input_names, *map(str, range(len(self._args))))  # too many are refused below
        try:
            args = [self._settled(value, name) for value, name in zip(self._args, names, strict=False)]
            self._start(args, {name: self._settled(value, name) for name, value in self._kwargs.items()})
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, HeteroError):
            kind = type(error).__name__
            error = HeteroError(f"function {self._signature.name!r} could not begin: {kind}: {error}")
        self._fence.settle(None, error.with_traceback(None))

    def _settled(self, value: Any, name: str) -> Any:
        """The result of a fence that is done; any other value itself."""
        if not isinstance(value, Fence):
            return value
        what = f"argument {name!r} of {self._signature.name!r} is the result of a call that"
        if value.cancelled():
            raise HeteroError(f"{what} was cancelled")
        error = value.exception()
        if error is not None:
            raise HeteroError(f"{what} failed: {error}")
        return value.result()
