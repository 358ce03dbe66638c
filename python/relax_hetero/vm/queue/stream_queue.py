"""Queues of GPUs: their threads give work to streams, and do not wait for it.

Work has two moments here. It is *issued* when all of it is in the stream: what reads its result on a GPU may be issued
from then on, in the same stream or in another one that waits for the point. It has *ended* when the GPU is done with
it: then CPUs and the caller may read, and memory that it used goes back. A second thread waits for the ends.

Kernels of a GPU go to one stream for all machines of the process, as TVM's pool gives freed memory to whoever asks
next: in the order of one stream that is safe. Copies go to streams of their own, one for each two devices, so that they
run beside kernels; what they write to is never of that pool (`cuda_copy_queues`). All these streams are ordered with
CUDA's default stream, where plain calls and other libraries work unless told otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from ..device.cuda_driver import CudaError
from ..device.cuda_streams import Event, Stream
from ..device.threads import Threads
from .device_queue import DeviceQueue, Work


class Point(NamedTuple):
    """The point in a stream's work at which a value is made."""

    stream: Stream
    event: Event


class StreamQueue(DeviceQueue):
    """A queue whose work goes to a stream.

    Parameters
    ----------
    name : str
        Name of the threads, also in messages.

    Attributes
    ----------
    stream : Stream
        As given.
    ends : DeviceQueue
        Waits for the ends of work, in the order in which it was issued.
    """

    def __init__(self, name: str, stream: Stream) -> None:
        super().__init__(name, threads=Threads(1, True))
        self.stream = stream
        self.ends = DeviceQueue(f"ends of {name}")
        self._issued = itertools.count()

    def issue(self, work: Callable[[], Any], after: Iterable[Point]) -> tuple[Any, Point]:
        """Issue work, in the queue's thread.

        Parameters
        ----------
        work : callable
            Gives work to the stream, and returns what that will make.
        after : iterable of Point
            Points that must have ended on the GPU before.

        Returns
        -------
        tuple
            Result of `work`, and the point at which it has ended.
        """
        for point in after:
            if point.stream is not self.stream:
                self.stream.wait(point.event)
        try:
            return work(), Point(self.stream, self.stream.record(sleeps=True))
        except BaseException:
            with suppress(CudaError):  # what was launched before may use memory that the failed call gives back
                self.stream.synchronize()
            raise

    def at_end(self, work: Work) -> None:
        """Have `work` run, in another thread, which may wait for the end of what was issued last."""
        self.ends.push((next(self._issued), 0), work)

    def close(self, timeout: float = 0) -> None:
        """End both threads; see `DeviceQueue.close`."""
        super().close(timeout)
        self.ends.close(timeout)


def follow_callers_streams(queues: Iterable[StreamQueue]) -> None:
    """Have queues issue later work after the work on streams that this thread has chosen itself.

    CUDA's default stream needs no such care.
    """
    current: dict[int, Event | None] = {}
    for queue in queues:
        stream = queue.stream
        if stream.gpu not in current:
            own = stream.chosen()
            current[stream.gpu] = own.record() if own.handle else None
        event = current[stream.gpu]
        if event is not None:
            stream.wait(event)
