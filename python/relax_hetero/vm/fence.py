"""What `VirtualMachine.submit` returns: the promise of a result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

from ..errors import HeteroError


class _Here(threading.local):
    """Whether this thread runs work of queues, and so must never wait for it."""

    is_worker = False


here = _Here()


class Fence(Future[Any]):
    """A call that goes through the queues of a machine; a `concurrent.futures.Future`, and awaitable.

    ``result(timeout=None)`` waits and returns what a plain call would, or raises what went wrong, as `HeteroError`;
    ``done()``, ``exception()``, ``add_done_callback(f)`` and ``cancel()`` are those of futures: a call can be cancelled
    until its first step begins. A fence may be given as an argument of a later call, which then waits for it.
    """

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
        self._check_may_wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return what `result` would raise, None for a result."""
        self._check_may_wait()
        return super().exception(timeout)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()

    def _check_may_wait(self) -> None:
        if here.is_worker and not self.done():
            raise HeteroError(
                "a callback waits for a fence in a thread that runs queues, and would wait for itself; expected it to "
                "hand the waiting to another thread, or to give the fence to a later call as an argument"
            )
