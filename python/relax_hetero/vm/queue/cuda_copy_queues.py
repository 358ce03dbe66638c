"""Copies from and to the GPUs of a machine: queues for them, and the memory that they write to."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from tvm import runtime

from ..device.cuda_copies import begin_copy
from ..device.cuda_library import CUDA, CudaLibrary
from ..device.cuda_memory import DeviceBlock
from ..device.cuda_streams import Stream, shared_stream
from ..device.memory_pools import BlockPool, PinnedPool
from ..device.tensors import empty, is_host, map_tensors, same_device
from .stream_queue import StreamQueue

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
