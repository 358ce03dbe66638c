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
from functools import partial
from typing import Any, NamedTuple

from tvm import runtime

from ..device.cuda_copies import begin_copy
from ..device.cuda_driver import CudaError
from ..device.cuda_library import CUDA, CudaLibrary
from ..device.cuda_memory import DeviceBlock
from ..device.cuda_streams import Event, Stream, shared_stream
from ..device.memory_pools import BlockPool, PinnedPool
from ..device.tensors import empty, is_host, map_tensors, same_device
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


# Copies from and to the GPUs of a machine: queues for them, and the memory that they write to.

PINNED_BYTES = 1 << 30
"""Maximum bytes of host memory that a machine pins for tensors from GPUs; beyond it copies wait for each other."""

ROOM_BYTES = 4 << 30
"""Maximum bytes of each GPU's memory that a machine keeps for tensors that come to it."""


class CopyQueues:
    """A queue for each two devices of a machine, of which one is a GPU, and each direction.

    Attributes
    ----------
    queues : list of StreamQueue
        Those that were asked for.
    """

    def __init__(self, library: CudaLibrary, gpus: Iterable[int]) -> None:
        self.queues: list[StreamQueue] = []
        self._library = library
        self._queues: dict[tuple[str, str], StreamQueue] = {}
        self._rooms = {gpu: BlockPool(partial(DeviceBlock, library, gpu), ROOM_BYTES) for gpu in gpus}
        self._pinned = PinnedPool(library, min(self._rooms), PINNED_BYTES)

    def between(self, source: runtime.Device, target: runtime.Device) -> StreamQueue | None:
        """The queue for copies from one device to another; None where neither, or another kind of device, is a GPU.

        Not to be called by two threads at once.
        """
        kinds = [is_host(source), is_host(target)]
        # A stream of the source, where that is a GPU: its default stream may have made an argument.
        gpus = [device.index for device in (source, target) if device.dlpack_device_type() == CUDA]
        if not gpus or len(gpus) + sum(kinds) < 2:
            return None
        pair = str(source), str(target)
        if pair not in self._queues:
            stream = shared_stream(self._library, gpus[0], f"copies from {source} to {target}")
            self._queues[pair] = StreamQueue(f"copies from {source} to {target}", stream)
            self.queues.append(self._queues[pair])
        return self._queues[pair]

    def copy(self, value: Any, device: runtime.Device, stream: Stream, leaves: bool) -> Any:
        """Issue copies of the tensors in a value, tuples opened, to a device; from any thread.

        Parameters
        ----------
        stream : Stream
            Stream of a queue that `between` gave.
        leaves : bool
            Whether the copies leave the call. On a GPU they get memory of their own then: others may have the GPU work
            on it when they give it back.

        Returns
        -------
        object : object
            The value as it will be there.
        """

        def copied(tensor: runtime.Tensor) -> runtime.Tensor:
            if same_device(tensor.device, device):
                return tensor
            room = self._room(tuple(tensor.shape), str(tensor.dtype), device, leaves)
            begin_copy(tensor, room, stream)
            return room

        return map_tensors(value, copied)

    def _room(self, shape: tuple[int, ...], dtype: str, device: runtime.Device, leaves: bool) -> runtime.Tensor:
        if is_host(device):
            return self._pinned.tensor(shape, dtype, device)
        return empty(shape, dtype, device) if leaves else self._rooms[device.index].tensor(shape, dtype, device)
