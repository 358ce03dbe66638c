"""Launches of CUDA graphs whose kernels wait for those of other GPUs, by a thread of each GPU.

The driver queues a graph's kernels one by one if there are events or host functions between them. A launch then returns
only when the rest fits into the GPU's queue, so when kernels of the graph have ended. If these wait for another GPU,
whose graph the same thread launches next, both wait forever, as NCCL's guide says ("Using NCCL with CUDA Graphs").

A caller that is interrupted, or whose wait ends with an error, leaves its launches to the threads: later ones follow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue

from .cuda_streams import check_wait

_POLL_SECONDS = 0.002  # interval between checks of a GPU while a thread waits for a launch

_beginning = threading.Lock()  # a GPU has one thread, also if several ask for it at once


class GraphLaunch:
    """A launch of a graph by the thread of its GPU, after those that came before.

    `gpu`: index of the GPU. `launch`: function that makes the GPU the thread's current one and launches the graph.
    """

    def __init__(self, gpu: int, launch: Callable[[], None]) -> None:
        self._gpu, self._launch = gpu, launch
        self._done = threading.Event()
        self._error: Exception | None = None
        with _beginning:
            _launches_of(gpu).put(self)

    def wait(self) -> None:
        """Wait until the function has returned; errors are its own, or those of `wait_checks`."""
        begin = time.monotonic()
        while not self._done.wait(_POLL_SECONDS):
            check_wait(self._gpu, time.monotonic() - begin)
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Call the function, in the thread of its GPU."""
        try:
            self._launch()
        except Exception as error:  # raised where the caller waits; the thread goes on
            self._error = error
        finally:
            self._done.set()


@cache
def _launches_of(gpu: int) -> SimpleQueue[GraphLaunch]:
    launches: SimpleQueue[GraphLaunch] = SimpleQueue()

    def work() -> None:
        while True:
            launches.get().run()

    threading.Thread(target=work, name=f"relax_hetero launches on cuda:{gpu}", daemon=True).start()
    return launches
