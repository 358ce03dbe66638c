"""Native work of seconds, done in threads so that the caller can be interrupted.

Python handles Ctrl-C in the main thread, and only between two instructions of its own: not while LLVM compiles there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

# A signal that the system gives to another thread interrupts no wait of this one: it looks by itself.
_POLL_SECONDS = 0.1


def run_in_threads(
    tasks: Sequence[Callable[[], T]], workers: int, name: str, on_done: Callable[[int], None] | None = None
) -> list[T]:
    """The results of tasks, in order.

    An exception that strikes the caller while it waits, such as KeyboardInterrupt, ends the wait at once: tasks that
    run come to their end unheard, the others are never begun.

    Parameters
    ----------
    workers : int
        How many threads, at most as many as there are tasks.
    name : str
        Name of the threads.
    on_done : callable, optional
        Called in this thread with the number of each task that has ended.

    Raises
    ------
    Exception
        The exception of the first task, in order, that raised one; all others have ended then.
    """
    if not tasks:
        return []
    pool = ThreadPoolExecutor(max(1, min(workers, len(tasks))), thread_name_prefix=name)
    try:
        futures = {pool.submit(task): number for number, task in enumerate(tasks)}
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
            for future in done:
                if on_done is not None:
                    on_done(futures[future])
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
