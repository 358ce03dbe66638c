"""A task in a thread, whose result is taken when it is there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

_log = logging.getLogger("relax_hetero")

DELAY_SECONDS = 1.0  # time before a task begins, in which a first text need not share the interpreter with it
_POLL_SECONDS = 0.05
_awaited_work: list[None] = []  # an element for each `foreground` that runs


@contextmanager
def foreground() -> Iterator[None]:
    """Context of work that somebody waits for: no task begins meanwhile, unless its result is awaited, too."""
    _awaited_work.append(None)
    try:
        yield
    finally:
        _awaited_work.pop()


class BackgroundTask(Generic[T]):
    """A task in a thread, which begins after `DELAY_SECONDS` and `foreground`, or when its result is awaited.

    It ends early if it is cancelled, or with the main thread. An error is logged. `task`: function of the task. It
    calls its argument now and then, which raises an exception to end it.
    """

    def __init__(self, task: Callable[[Callable[[], None]], T]) -> None:
        self._future: Future[T | None] = Future()
        self._cancelled = False
        self._awaited = threading.Event()
        # Not a daemon: at the end of the process, the thread must not be inside of native code.
        threading.Thread(target=self._run, args=(task,), name="relax_hetero.llm.background").start()

    @property
    def done(self) -> bool:
        """True once the task has ended."""
        return self._future.done()

    def result(self) -> T | None:
        """Wait for the result; None if the task failed or was cancelled."""
        self._awaited.set()
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
            polls = round(DELAY_SECONDS / _POLL_SECONDS)
            while (polls > 0 or _awaited_work) and not self._awaited.wait(_POLL_SECONDS):
                self._check()
                polls -= 1
            result = task(self._check)
        except Exception as error:  # the model works without
            if not self._is_unwanted():
                _log.warning("functions of larger batches are not compiled: %s", error)
        finally:
            self._future.set_result(result)


class _CancelledError(Exception):
    pass
