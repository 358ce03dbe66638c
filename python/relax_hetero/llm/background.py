"""A task in a thread, whose result is taken when it is there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")

_log = logging.getLogger("relax_hetero")


class BackgroundTask(Generic[T]):
    """A task in a thread. It ends early if it is cancelled, or with the main thread; an error is logged.

    Parameters
    ----------
    task : callable
        Function of the task. It calls its argument now and then, which raises an exception to end it.
    """

    def __init__(self, task: Callable[[Callable[[], None]], T]) -> None:
        self._future: Future[T | None] = Future()
        self._cancelled = False
        # Not a daemon: at the end of the process, the thread must not be inside of native code.
        threading.Thread(target=self._run, args=(task,), name="relax_hetero.llm.background").start()

    @property
    def done(self) -> bool:
        """Whether the task has ended."""
        return self._future.done()

    def result(self) -> T | None:
        """Wait for the result; None if the task failed or was cancelled."""
        return self._future.result()

    def cancel(self) -> None:
        """End the task at its next call of the function that it was given."""
        self._cancelled = True

    def _is_unwanted(self) -> bool:
        return self._cancelled or not threading.main_thread().is_alive()

    def _check(self) -> None:
        if self._is_unwanted():
            raise _CancelledError

    def _run(self, task: Callable[[Callable[[], None]], T]) -> None:
        result: T | None = None
        try:
            self._check()
            result = task(self._check)
        except Exception as error:  # the model works without
            if not self._is_unwanted():
                _log.warning("functions of larger batches are not compiled: %s", error)
        finally:
            self._future.set_result(result)


class _CancelledError(Exception):
    pass
