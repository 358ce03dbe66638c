"""Queues of GPUs: their threads put work into streams without waiting for it.

Work becomes ready in two stages. It is *issued* when all of it is in the stream: GPU work that reads its result may be
issued from then on, in the same stream or in one that waits for its event. It has *ended* when the GPU has completed
it: then CPUs and the caller may read the result, and its memory is released. A second thread waits for the ends.

Kernels of a GPU use one stream for all virtual machines of the process, because TVM's memory pool reuses freed memory
at once, which is safe only in the order of one stream. Copies have streams of their own, one for each ordered pair of
devices, so that they overlap with kernels; they never write to memory from TVM's pool (`CopyQueues`). All these streams
synchronize with CUDA's default stream, which plain calls and other libraries use by default.
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
    """The event in a stream after which a value is complete."""

    stream: Stream
    event: Event


class StreamQueue(DeviceQueue):
    """A queue whose work is put into a stream. `name`: name of the threads, also in messages."""

    def __init__(self, name: str, stream: Stream) -> None:
        super().__init__(name, threads=Threads(1, True))
        self.stream = stream  # stream of the work
        # Queue whose thread waits for the ends of issued work, in the order of issue.
        self.ends = DeviceQueue(f"ends of {name}")
        self._end_numbers = itertools.count()

    def issue(self, work: Callable[[], Any], after: Iterable[Point]) -> tuple[Any, Point]:
        """Issue work, in the queue's thread.

        `work`: function that puts work into the stream, and returns its future results. `after`: points that the GPU
        must reach first. Returns the result of `work`, and the point that completes it.
        """
        for point in after:
            if point.stream is not self.stream:
                self.stream.wait(point.event)
        try:
            return work(), Point(self.stream, self.stream.record(sleeps=True))
        except BaseException:
            with suppress(CudaError):  # earlier launches may use memory that the failed call releases
                self.stream.synchronize()
            raise

    def at_end(self, work: Work) -> None:
        """Run `work` in a second thread, where it may wait for the end of the last issued work."""
        self.ends.push((next(self._end_numbers), 0), work)

    def close(self, timeout: float = 0) -> None:
        """End both threads; see `DeviceQueue.close`."""
        super().close(timeout)
        self.ends.close(timeout)


def follow_callers_streams(queues: Iterable[StreamQueue]) -> None:
    """Order later work of queues after the work on this thread's current streams.

    The default stream needs no event: all streams synchronize with it.
    """
    current: dict[int, Event | None] = {}
    for queue in queues:
        stream = queue.stream
        if stream.gpu not in current:
            callers_stream = stream.chosen()  # TVM's current stream of this thread
            current[stream.gpu] = callers_stream.record() if callers_stream.handle else None
        event = current[stream.gpu]
        if event is not None:
            stream.wait(event)


# Queues of copies from and to GPUs, and the memory that copies write to.

PINNED_BYTES = 1 << 30
"""Maximum bytes of host memory that a machine pins for tensors from GPUs; copies to other memory are synchronous."""

STAGING_BYTES = 4 << 30  # maximum bytes of each GPU's memory that a machine keeps for tensors that are copied to it


class CopyQueues:
    """A queue for each ordered pair of a machine's devices, at least one of them a GPU."""

    def __init__(self, library: CudaLibrary, gpus: Iterable[int]) -> None:
        self.queues: list[StreamQueue] = []  # queues that `between` has made
        self._library = library
        self._queues: dict[tuple[str, str], StreamQueue] = {}
        self._staging = {gpu: BlockPool(partial(DeviceBlock, library, gpu), STAGING_BYTES) for gpu in gpus}
        self._pinned = PinnedPool(library, min(self._staging), PINNED_BYTES)

    def between(self, source: runtime.Device, target: runtime.Device) -> StreamQueue | None:
        """The queue for copies between two devices; None unless one is a GPU and the other a GPU or a CPU.

        Not thread-safe.
        """
        hosts = [device for device in (source, target) if is_host(device)]
        # The source's GPU comes first: streams synchronize with its default stream, which may have made an argument.
        gpus = [device.index for device in (source, target) if device.dlpack_device_type() == CUDA]
        if not gpus or len(gpus) + len(hosts) < 2:
            return None
        pair = str(source), str(target)
        if pair not in self._queues:
            stream = shared_stream(self._library, gpus[0], f"copies from {source} to {target}")
            self._queues[pair] = StreamQueue(f"copies from {source} to {target}", stream)
            self.queues.append(self._queues[pair])
        return self._queues[pair]

    def copy(self, value: Any, device: runtime.Device, stream: Stream, is_result: bool) -> Any:
        """Issue copies to a device of all tensors in a value; thread-safe.

        `stream`: stream of a queue that `between` returned. `is_result`: whether the copies are results of the call.
        Results on a GPU do not come from the staging pool: the GPU may still work on them when the caller releases
        them. Returns the value on the device, once the copies have ended.
        """

        def copy_tensor(tensor: runtime.Tensor) -> runtime.Tensor:
            if same_device(tensor.device, device):
                return tensor
            target = self._allocate(tuple(tensor.shape), str(tensor.dtype), device, is_result)
            begin_copy(tensor, target, stream)
            return target

        return map_tensors(value, copy_tensor)

    def _allocate(self, shape: tuple[int, ...], dtype: str, device: runtime.Device, is_result: bool) -> runtime.Tensor:
        if is_host(device):
            return self._pinned.tensor(shape, dtype, device)
        return empty(shape, dtype, device) if is_result else self._staging[device.index].tensor(shape, dtype, device)
