"""Collectives of NCCL over the GPUs of a mesh: memory, communicators, and kernels as parts of CUDA graphs.

A function's first call runs each of its collectives once, and captures it on all GPUs together, as NCCL asks of a
thread that has several communicators. A command buffer whose launches are captured later gets the kernels of its GPU as
a child graph. NCCL's kernels wait for each other as those of `peer_memory` do, so the same rules hold for calls.

A communicator belongs to one machine at a time. It is never destroyed: NCCL would wait until nothing has its kernels
any more, at process exit forever.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi
from tvm import runtime

from ...artifact.nccl_layout import (
    NCCL_COLLECTIVE,
    NCCL_MEMORY,
    Collective,
    buffer_bytes,
    from_numbers,
    offsets,
    transfers,
)
from ...errors import HeteroError
from .cuda_library import CudaLibrary, cuda_library
from .cuda_streams import Stream
from .nccl import Nccl, load_nccl
from .peer_memory import addresses_on, devices_of_call, different_gpus
from .tensors import empty

_log = logging.getLogger("relax_hetero")

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_SET = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES

Mesh = tuple[int, ...]


class NcclMemory:
    """Memory on which NCCL works for a function, one buffer on each GPU, and graphs of its collectives.

    Parameters
    ----------
    devices : list of runtime.Device
        GPUs of the mesh.
    collectives : sequence of tuple of int
        Collectives of the function (`nccl_layout`).
    communicators : sequence of object
        NCCL's, one for each GPU, which nothing else uses now.
    nccl : Nccl
    library : CudaLibrary

    Attributes
    ----------
    addresses : dict of int to runtime.Tensor
        For each GPU, the addresses of all GPUs' buffers.
    """

    def __init__(
        self,
        devices: list[runtime.Device],
        collectives: Sequence[Collective],
        communicators: Sequence[Any],
        nccl: Nccl,
        library: CudaLibrary,
    ) -> None:
        self._devices, self._communicators, self._nccl, self._library = devices, communicators, nccl, library
        self._buffers = [empty((buffer_bytes(collectives),), "uint8", device) for device in devices]
        self.addresses = addresses_on(devices, self._buffers)
        for device in devices:  # other functions may use the communicators
            device.sync()
        streams = [Stream(library, device.index) for device in devices]
        self._graphs = [self._captured(each, streams) for each in collectives]

    def _run(self, collective: Collective, streams: Sequence[Stream]) -> None:
        nccl, addresses = self._nccl, [buffer.data_ptr() for buffer in self._buffers]
        nccl.start()
        try:
            if len(collective) == 1:
                for communicator, address, stream in zip(self._communicators, addresses, streams, strict=True):
                    communicator.allReduce(address, address, *collective, nccl.float32, nccl.sum, stream.handle)
                return
            for (source, target, nbytes), offset in zip(transfers(collective), offsets(collective), strict=True):
                for rank, peer, call in (source, target, "send"), (target, source, "recv"):
                    operation = getattr(self._communicators[rank], call)
                    operation(addresses[rank] + offset, nbytes, nccl.byte, peer, streams[rank].handle)
        finally:
            nccl.end()

    def _captured(self, collective: Collective, streams: Sequence[Stream]) -> list[int]:
        """Graphs of a collective, one for each GPU."""
        self._run(collective, streams)  # connects the GPUs
        for stream in streams:
            stream.synchronize()
        return captured(self._library, streams, lambda: self._run(collective, streams))

    def add(self, number: int, rank: int) -> None:
        """Add a collective to the graph that the current stream of a GPU captures."""
        add_child_graph(self._library, Stream.current(self._library, self._devices[rank]), self._graphs[number][rank])

    def free(self) -> None:
        """Destroy the graphs after all work of the GPUs."""
        for device in self._devices:
            device.sync()
        for graph in (graph for graphs in self._graphs for graph in graphs):
            self._library.call("cuGraphDestroy", graph)


def captured(library: CudaLibrary, streams: Sequence[Stream], launch: Callable[[], None]) -> list[int]:
    """Capture what a function launches on streams; returns a graph for each."""
    begun, graphs = [], []
    try:
        for stream in streams:
            library.use(stream.gpu)
            library.call("cuStreamBeginCapture_v2", stream.handle, _RELAXED)
            begun.append(stream)
        launch()
    finally:
        for stream in begun:
            library.use(stream.gpu)
            graph = ctypes.c_void_p()
            status = library.status("cuStreamEndCapture", stream.handle, ctypes.byref(graph))
            graphs.append((status, graph.value or 0))
    for status, _ in graphs:
        if status:
            raise library.error("capturing a collective of NCCL", status)
    return [graph for _, graph in graphs]


def add_child_graph(library: CudaLibrary, stream: Stream, graph: int) -> None:
    """Add a copy of a graph to the one that a stream captures, in order with the stream."""
    status, capture_id, parent = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    before, count, node = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_void_p()
    results = (status, capture_id, parent, before, count)
    library.call("cuStreamGetCaptureInfo_v2", stream.handle, *map(ctypes.byref, results))
    if not parent.value:
        raise HeteroError(
            "a collective of NCCL is launched outside of a CUDA graph; expected a command buffer of a mesh's GPU"
        )
    library.call("cuGraphAddChildGraphNode", ctypes.byref(node), parent, before, count, graph)
    library.call("cuStreamUpdateCaptureDependencies", stream.handle, ctypes.byref(node), 1, _SET)


_unused: defaultdict[tuple[int, ...], list[list[Any]]] = defaultdict(list)
"""Communicators that no machine uses, by their GPUs."""
_communicators: dict[tuple[int, tuple[int, ...]], list[Any]] = {}
"""Communicators of machines."""


def _communicators_of(machine: int, devices: Sequence[runtime.Device], nccl: Nccl) -> list[Any]:
    gpus = tuple(device.index for device in devices)
    if (machine, gpus) not in _communicators:
        if not _unused[gpus]:
            _unused[gpus].append(nccl.communicators(list(gpus)))
            for communicator in _unused[gpus][0]:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))
        _communicators[machine, gpus] = _unused[gpus].pop()
    return _communicators[machine, gpus]


class _Call(threading.local):
    """Memory that the call on this thread has asked for last, by the positions of a mesh's devices."""

    def __init__(self) -> None:
        self.memory: weakref.WeakValueDictionary[Mesh, NcclMemory] = weakref.WeakValueDictionary()


_call = _Call()
_memories: dict[tuple[int, Mesh, tuple[Collective, ...]], NcclMemory] = {}
_lock = threading.RLock()  # a garbage collection within may free memory


def _new_memory(machine: int, gpus: list[runtime.Device], collectives: Sequence[Collective]) -> NcclMemory:
    nccl, library = load_nccl(), cuda_library()
    if isinstance(nccl, str) or library is None:
        raise HeteroError(f"exchanges of a mesh's GPUs need NCCL: {nccl if library else 'CUDA does not work'}")
    different_gpus(gpus)
    try:
        return NcclMemory(gpus, collectives, _communicators_of(machine, gpus, nccl), nccl, library)
    except Exception as error:
        _communicators.pop((machine, tuple(device.index for device in gpus)), None)  # they are of no use
        if isinstance(error, HeteroError):
            raise
        raise HeteroError(
            f"NCCL failed between {', '.join(map(str, gpus))}: {error}; NCCL_DEBUG=INFO in the environment shows why"
        ) from error


@tvm_ffi.register_global_func(NCCL_MEMORY, override=True)
def nccl_memory(index: int, ranks: int, *numbers: int) -> Any:
    """Addresses of the memory of a mesh's devices, on the device of manifest entry `index`."""
    devices, mesh, collectives = devices_of_call(), tuple(numbers[:ranks]), from_numbers(numbers[ranks:])
    key = (id(devices), mesh, collectives)
    with _lock:
        memory = _memories.get(key)
        if memory is None:
            gpus = [devices[position] for position in mesh]
            memory = _memories[key] = _new_memory(id(devices), gpus, collectives)
    _call.memory[mesh] = memory
    return memory.addresses[devices[index].index]


@tvm_ffi.register_global_func(NCCL_COLLECTIVE, override=True)
def nccl_collective(number: int, rank: int, *mesh: int) -> None:
    """Add a collective of the function to the graph that the current stream of a GPU captures."""
    _call.memory[mesh].add(number, rank)


def free_nccl_memory(machine: int) -> None:
    """Free the memory of a machine, given the identity of its list of devices."""
    with _lock:
        freed = [_memories.pop(key) for key in [key for key in _memories if key[0] == machine]]
        held = {key[1]: _communicators.pop(key) for key in [key for key in _communicators if key[0] == machine]}
        try:
            for memory in freed:
                memory.free()
        except Exception:  # a failed GPU, whose communicators are of no use
            _log.debug("memory of NCCL was not freed", exc_info=True)
            return
        for gpus, communicators in held.items():
            _unused[gpus].append(communicators)
