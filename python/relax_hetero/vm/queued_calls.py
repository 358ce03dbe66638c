"""The half of a machine that takes calls without waiting for them."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import BindingError, HeteroError
from .calls_in_flight import Call, CallsInFlight
from .fence import Fence
from .queues import Plan, Queues

MAX_IN_FLIGHT = 4
"""How many calls a machine has under way at once unless it is told: two for each of two stages, so that none waits."""


@dataclass(frozen=True)
class Prepared:
    """A call whose arguments fit.

    Attributes
    ----------
    values : sequence
        What the function takes.
    sizes : mapping of str to int
        The values of its symbolic dimensions.
    finish : callable
        Makes the result for the caller of what the function returned.
    """

    values: Sequence[Any]
    sizes: Mapping[str, int]
    finish: Callable[[Any], Any]


Prepare = Callable[[Sequence[Any], Mapping[str, Any]], Prepared]


class QueuedCalls:
    """A machine's calls through its queues.

    Parameters
    ----------
    owner : object
        The machine; the queues end when it does.
    lock : threading.RLock
        Held while arguments are bound and while the machine runs a plain call: neither begins during the other.
    max_in_flight : int
    make_queues : callable
        Called with the first submission; its result must not refer to the machine.

    Raises
    ------
    BindingError
        A `max_in_flight` that is no positive integer.
    """

    def __init__(self, owner: object, lock: Any, max_in_flight: int, make_queues: Callable[[], Queues]) -> None:
        if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int) or max_in_flight < 1:
            raise BindingError(f"max_in_flight is {max_in_flight!r}, expected a positive integer")
        self.limit = max_in_flight
        self._owner = weakref.ref(owner)
        self._make_queues = make_queues
        self._calls = CallsInFlight(max_in_flight)
        self._queues: Queues | None = None
        self._process = os.getpid()
        self._lock = lock

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""
        return self._calls.is_idle

    def wait(self, timeout: float | None) -> bool:
        """Wait until the calls submitted so far have ended; False after `timeout` seconds without."""
        return self._calls.wait(timeout)

    def submit(self, plan: Callable[[Queues], Plan], prepare: Prepare, args: Sequence[Any], kwargs: Any) -> Fence:
        """Take a call, once there is room for it.

        Parameters
        ----------
        plan : callable
            Gives the function's plan.
        prepare : callable
            Checks and places arguments; called under the machine's lock.
        args, kwargs
            The caller's. A `Fence` among them stands for its result.
        """
        if os.getpid() != self._process:
            raise HeteroError(
                "this machine was made before the process was forked, and its queues stayed behind; expected a "
                "VirtualMachine made from the Executable in each process"
            )
        fence = Fence()
        has_room = self._calls.enter()
        try:
            awaited = [value for value in (*args, *kwargs.values()) if isinstance(value, Fence)]
            if awaited:
                _When(awaited, partial(self._start_late, plan, prepare, args, kwargs, fence, has_room))
            else:
                self._start(plan, prepare, args, kwargs, fence, has_room)
        except BaseException:
            self._calls.leave(has_room)
            raise
        return fence

    def _start(
        self, plan: Any, prepare: Prepare, args: Sequence[Any], kwargs: Any, fence: Fence, has_room: bool
    ) -> None:
        with self._lock:
            if self._queues is None:
                self._queues = self._make_queues()
                owner = self._owner()
                assert owner is not None, "a machine submits while it lives"
                weakref.finalize(owner, self._queues.close)
            prepared = prepare(args, kwargs)
            route = plan(self._queues)
            self._queues.follow_caller()
            number = self._calls.begin()
        end = partial(self._calls.end, has_room)
        Call(route, number, prepared.values, prepared.sizes, fence, prepared.finish, end).begin()

    def _start_late(
        self, plan: Any, prepare: Prepare, args: Sequence[Any], kwargs: Any, fence: Fence, has_room: bool
    ) -> None:
        """`_start`, when all fences among the arguments are done; what goes wrong goes to the fence."""
        try:
            values = [_settled(value, f"argument {index}") for index, value in enumerate(args)]
            named = {name: _settled(value, f"argument {name!r}") for name, value in kwargs.items()}
            self._start(plan, prepare, values, named, fence, has_room)
        except BaseException as error:
            self._calls.leave(has_room)
            if fence.set_running_or_notify_cancel():
                fence.set_exception(error)


class _When:
    """Calls a function when all of some fences are done."""

    def __init__(self, fences: Sequence[Fence], then: Callable[[], None]) -> None:
        self._left = len(fences)
        self._lock = threading.Lock()
        self._then = then
        for fence in fences:
            fence.add_done_callback(self._on_done)

    def _on_done(self, _fence: Any) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._then()


def _settled(value: Any, where: str) -> Any:
    """The result of a fence that is done; any other value itself."""
    if not isinstance(value, Fence):
        return value
    if value.cancelled():
        raise HeteroError(f"{where} is the result of a call that was cancelled")
    return value.result()
