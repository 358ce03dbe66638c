"""Fences: the futures that `VirtualMachine.submit` returns."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING, RUNNING
from operator import attrgetter
from typing import Any

from ...errors import HeteroError


class _Here(threading.local):
    """Whether this thread runs work of queues, and so must never wait for it."""

    is_worker = False


here = _Here()

_log = logging.getLogger(__name__)


def check_may_wait(what: str) -> None:
    """Refuse, with HeteroError, to wait in a thread that runs queues."""
    if here.is_worker:
        raise HeteroError(
            f"a kernel or a callback waits for {what} in a thread that runs queues, and could wait for itself; "
            "expected it to hand the waiting to another thread, or to give the fence to a later call as an argument"
        )


class _Condition(threading.Condition):
    """A condition that an exception raised in this thread from outside never leaves locked.

    The methods by which ``with`` enters the stock one are written in Python: interrupted there, nobody unlocks it.
    """

    __enter__ = property(attrgetter("_lock.__enter__"))  # type: ignore[assignment]
    __exit__ = property(attrgetter("_lock.__exit__"))  # type: ignore[assignment]


class Fence(Future[Any]):
    """A call that goes through the queues of a machine; a `concurrent.futures.Future`, and awaitable.

    ``result(timeout=None)`` waits and returns what a plain call would, or raises what went wrong, as `HeteroError`;
    ``done()``, ``exception()``, ``add_done_callback(f)`` and ``cancel()`` are those of futures: a call can be cancelled
    until its first step begins. A fence may be given as an argument of a later call, which then waits for it.

    Callbacks run in the thread that ends the call, mostly one that runs a queue: a slow callback holds the queue up.

    It is a future of the standard library and not a wrapper of one, as `concurrent.futures.wait` and `as_completed`
    return the very futures that they were given. It begins and ends by methods of its own (`begin`, `settle`): an
    exception that others raise in a queue's thread may interrupt them anywhere, and calling them again completes what
    they had begun, where the stock methods would refuse, or leave the condition locked.

    Parameters
    ----------
    on_end : callable
        Told once the fence is done, before callbacks are; perhaps more than once.
    """

    _done_callbacks: list[Callable[[Any], Any]]

    def __init__(self, on_end: Callable[[Fence], None]) -> None:
        super().__init__()
        self._condition = _Condition()
        self._on_end = on_end
        self._followers: list[Callable[[Fence], None]] = []

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result.

        Raises
        ------
        HeteroError
            What failed in the call or in one that it waited for; or a wait in a thread that runs queues (in a callback
            of another fence), which would wait for itself.
        TimeoutError
            After `timeout` seconds.
        concurrent.futures.CancelledError
            Where the call was cancelled.
        """
        if here.is_worker and not self.done():
            check_may_wait("a fence")
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return what `result` would raise, None for a result."""
        if here.is_worker and not self.done():
            check_may_wait("a fence")
        return super().exception(timeout)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()

    def cancel(self) -> bool:
        """Have the call not run, if its first step has not begun; whether it never will."""
        with self._condition:
            if self._state in (RUNNING, FINISHED):
                return False
            if self._state == PENDING:
                self._state = CANCELLED_AND_NOTIFIED
                for waiter in self._waiters:
                    waiter.add_cancelled(self)
                self._condition.notify_all()
        self._on_end(self)
        self._invoke_callbacks()
        return True

    def follow(self, follower: Callable[[Fence], None]) -> None:
        """Have `follower` called once the fence is done, before callbacks are; again, if that is interrupted."""
        with self._condition:
            if not super().done():
                self._followers.append(follower)
                return
        follower(self)

    def begin(self) -> bool:
        """Whether the call may run; it can no longer be cancelled then."""
        with self._condition:
            if self._state == PENDING:
                self._state = RUNNING
            return self._state == RUNNING

    def settle(self, result: Any, error: BaseException | None = None) -> None:
        """Give the fence a result or an error; what it has stays. Again, in the same thread, after an interruption."""
        with self._condition:
            if self._state == CANCELLED_AND_NOTIFIED:
                return
            if self._state != FINISHED:
                self._result, self._exception = result, error
                for waiter in self._waiters:
                    if self in waiter.finished_futures:  # told before the interruption
                        waiter.event.set()
                    elif error is None:
                        waiter.add_result(self)
                    else:
                        waiter.add_exception(self)
                self._state = FINISHED
        self._on_end(self)
        with self._condition:  # late: whom this wakes waits for the interpreter's lock, which this thread holds
            self._condition.notify_all()
        self._invoke_callbacks()

    def lose(self, error: HeteroError) -> None:
        """Give the fence an error in a process that was forked, where nobody else knows of it and locks may be held."""
        self._condition = _Condition()
        self._waiters.clear()
        self._done_callbacks.clear()
        self._followers.clear()
        self._exception, self._state = error, FINISHED

    def _invoke_callbacks(self) -> None:
        """Call each follower; then each callback, whatever the others raise; and forget them."""
        while followers := self._followers[:1]:
            followers[0](self)
            del self._followers[:1]
        interrupt: BaseException | None = None
        while next_one := self._done_callbacks[:1]:
            try:
                next_one[0](self)
            except BaseException as error:
                _log.exception("exception calling callback for %r", self)
                if not isinstance(error, Exception):
                    interrupt = error
            finally:
                del self._done_callbacks[:1]
        if interrupt is not None and not here.is_worker:  # Ctrl-C, in a thread of the caller's
            raise interrupt
