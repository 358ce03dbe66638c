"""Long native work in threads, so that the caller can be interrupted.

Python handles Ctrl-C only in the main thread and between bytecode instructions, hence not while LLVM compiles there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

_POLL_SECONDS = 0.1
"""Interval of returns to the interpreter: a signal that another thread receives does not interrupt a wait."""


def run_in_threads(
    tasks: Sequence[Callable[[], T]],
    workers: int,  # maximum number of threads
    name: str,  # name of the threads
    on_done: Callable[[int], None] | None = None,  # called in this thread with the index of each completed task
) -> list[T]:
    """Run tasks in threads; returns their results in order.

    An exception in the waiting caller, such as KeyboardInterrupt, ends the wait at once: running tasks complete in the
    background, the others are cancelled. Raises the exception of the first task, in order, that failed, after
    all tasks have ended.
    """
    if not tasks:
        return []
    pool = ThreadPoolExecutor(max(1, min(workers, len(tasks))), thread_name_prefix=name)
    try:
        futures = {pool.submit(task): index for index, task in enumerate(tasks)}
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
            for future in done:
                if on_done is not None:
                    on_done(futures[future])
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
