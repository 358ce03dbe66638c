"""Launches of CUDA graphs whose kernels wait for those of other GPUs, by a thread of each GPU.

The driver queues a graph's kernels one by one if there are events or host functions between them. A launch then returns
only when the rest fits into the GPU's queue, so when kernels of the graph have ended. If these wait for another GPU,
whose graph the same thread launches next, both wait forever, as NCCL's guide says ("Using NCCL with CUDA Graphs").
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue

from .cuda_driver import CudaError
from .cuda_library import CudaLibrary
from .cuda_streams import Stream, check_wait

_POLL_SECONDS = 0.002
"""Interval between checks of a GPU while a thread waits for a launch."""


class GraphLaunch:
    """A launch of a graph by the thread of its GPU, after those that came before.

    Parameters
    ----------
    then : callable
        Function that the waiting thread calls after the launch.
    """

    def __init__(self, library: CudaLibrary, graph: int, stream: Stream, then: Callable[[], None]) -> None:
        self._library, self._graph, self._stream, self._then = library, graph, stream, then
        self._done = threading.Event()
        self._error: CudaError | None = None
        _launches_of(stream.gpu).put(self)

    def wait(self) -> None:
        """Wait until the graph is launched; CudaError if it could not be, or an error of `wait_checks`."""
        begin = time.monotonic()
        while not self._done.wait(_POLL_SECONDS):
            check_wait(self._stream.gpu, time.monotonic() - begin)
        if self._error is not None:
            raise self._error
        self._then()

    def run(self) -> None:
        """Launch the graph, in the thread of its GPU."""
        try:
            self._library.use(self._stream.gpu)
            self._library.call("cuGraphLaunch", self._graph, self._stream.handle)
        except CudaError as error:
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
