"""Fences: the futures that `VirtualMachine.submit` returns."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

from ...errors import HeteroError


class _ThreadState(threading.local):
    """Thread-local state: a queue's worker thread must never wait for queues."""

    is_worker = False


thread_state = _ThreadState()

_log = logging.getLogger(__name__)


def check_may_wait(what: str) -> None:
    """Refuse, with HeteroError, to wait in a thread that runs queues."""
    if thread_state.is_worker:
        raise HeteroError(
            f"a kernel or a callback waits for {what} in a thread that runs queues, and could wait for itself; "
            "expected it to hand the waiting to another thread, or to give the fence to a later call as an argument"
        )


class Fence(Future[Any]):
    """A call that goes through the queues of a machine; a `concurrent.futures.Future`, and awaitable.

    ``result(timeout=None)`` waits and returns what a plain call would, or raises what went wrong, as `HeteroError`;
    ``done()``, ``exception()``, ``add_done_callback(f)`` and ``cancel()`` are those of futures: a call can be cancelled
    until its first step begins. A fence may be given as an argument of a later call, which then waits for it.

    Callbacks run in the thread that ends the call, usually a queue's thread: a slow callback delays the queue.

    A subclass of the standard future rather than a wrapper, because `concurrent.futures.wait` and `as_completed`
    return the objects that they were given.

    Parameters
    ----------
    on_end : callable
        Called with the fence once it is done, before other callbacks.
    """

    def __init__(self, on_end: Callable[[Fence], None]) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._has_begun = False
        self._lost: HeteroError | None = None
        self.add_done_callback(on_end)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result.

        Parameters
        ----------
        timeout : float, optional
            Maximum wait in seconds; None: without limit.

        Raises
        ------
        HeteroError
            The call failed, or one that it depends on; or this wait is in a queue's thread (a callback of another
            fence), which would wait for itself.
        TimeoutError
            After `timeout` seconds.
        concurrent.futures.CancelledError
            The call was cancelled.
        """
        if self._lost is not None:
            raise self._lost
        if thread_state.is_worker and not self.done():
            check_may_wait("a fence")
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the exception that `result` would raise, or None.

        Parameters
        ----------
        timeout : float, optional
            Maximum wait in seconds; None: without limit.
        """
        if self._lost is not None:
            return self._lost
        if thread_state.is_worker and not self.done():
            check_may_wait("a fence")
        return super().exception(timeout)

    def done(self) -> bool:
        """Return whether the call has ended, or was cancelled."""
        return self._lost is not None or super().done()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` with this fence once it is done; in a queue's thread, even if other callbacks raise.

        Parameters
        ----------
        fn : callable
            Function of the fence; its errors are logged.
        """
        super().add_done_callback(partial(_call, fn))

    def cancel(self) -> bool:
        """Cancel the call if its first step has not begun; returns whether it was cancelled."""
        is_cancelled = super().cancel()
        if is_cancelled:
            self.begin()  # notifies `concurrent.futures.wait`, which ignores a future that is only cancelled
        return is_cancelled

    def begin(self) -> bool:
        """Mark the call as running, unless it was cancelled; returns whether it runs."""
        with self._lock:
            if not self._has_begun:
                self.set_running_or_notify_cancel()
                self._has_begun = True
            return self.running()

    def settle(self, result: Any, error: BaseException | None = None) -> None:
        """Give the fence a result or an error, unless it has one or was cancelled.

        Parameters
        ----------
        result : object
            Result of the call.
        error : BaseException, optional
            Error instead of a result.
        """
        if not self._has_begun:
            self.begin()
        with suppress(InvalidStateError):
            self.set_result(result) if error is None else self.set_exception(error)

    def fail_after_fork(self, error: HeteroError) -> None:
        """Give the fence an error in a forked process, where no thread serves it and locks may be held forever.

        Parameters
        ----------
        error : HeteroError
            Error that `result` raises from now on.
        """
        self._lost = error


def _call(fn: Callable[[Any], object], fence: Future[Any]) -> None:
    try:
        fn(fence)
    except Exception:
        raise  # the base class logs it
    except BaseException:
        if not thread_state.is_worker:  # Ctrl-C in a thread of the caller's
            raise
        _log.exception("exception calling callback for %r", fence)


def when_all_done(fences: Sequence[Fence], then: Callable[[], None]) -> None:
    """Call `then` once all fences are done; at once if there are none."""
    lock, left = threading.RLock(), set(fences)
    pending = [then]  # emptied, because futures keep their callbacks, and `then` may keep the fences: a cycle

    def on_done(fence: Any) -> None:
        with lock:
            left.discard(fence)
            call = pending.pop() if pending and not left else None
        if call is not None:
            call()

    if not fences:
        then()
    for fence in dict.fromkeys(fences):
        fence.add_done_callback(on_done)
