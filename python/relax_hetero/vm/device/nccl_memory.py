"""Collectives of NCCL over the GPUs of a mesh: memory, communicators, and kernels as parts of CUDA graphs.

A function's first call runs each of its collectives once, and captures it on all GPUs together, as NCCL asks of a
thread that has several communicators. A command buffer whose launches are captured later gets the kernels of its GPU as
a child graph. NCCL's kernels wait for each other as those of `peer_memory` do, so the same rules hold for calls.

A communicator belongs to one machine at a time. It is never destroyed: NCCL would wait until nothing has its kernels
any more, at process exit forever.

NCCL's kernels wait for a lost GPU without limit. So threads that wait for a GPU look whether NCCL or a GPU of the mesh
has failed, and how long they have waited (`cuda_streams.wait_checks`). Then they abort the communicators, which ends
NCCL's kernels with undefined data: all waits for these GPUs raise an error until the machine is freed.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
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
from .cuda_graphs import captured, remove_events
from .cuda_library import CudaLibrary, cuda_library
from .cuda_streams import Stream, wait_checks
from .nccl import Nccl, load_nccl
from .peer_memory import addresses_on, devices_of_call, different_gpus, peer_call
from .tensors import empty

_log = logging.getLogger("relax_hetero")

_SET = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES

TIMEOUT_SECONDS = 60.0
"""Default time after which a thread ends its wait for collectives, as kernels that sum without NCCL do."""

Mesh = tuple[int, ...]


class Communicators:
    """NCCL's communicators of a machine for some GPUs.

    Parameters
    ----------
    gpus : tuple of int
        Indices of the GPUs.
    each : list of object
        NCCL's communicator of each GPU.
    limit : float
        Seconds that a thread waits for the GPUs.

    Attributes
    ----------
    problem : str
        Error after which the communicators were aborted; empty while they work.
    """

    def __init__(
        self, gpus: Mesh, each: list[Any], nccl: Nccl, library: CudaLibrary, limit: float = TIMEOUT_SECONDS
    ) -> None:
        self.gpus, self.each, self.nccl, self.library, self.problem = gpus, each, nccl, library, ""
        self._limit, self._lock = limit, threading.RLock()  # a garbage collection within may wait for a GPU
        self._streams = [Stream(library, gpu) for gpu in gpus]

    def check(self, seconds: float = 0) -> None:
        """Raise HeteroError after a failure; a thread that has waited for some seconds looks for a new one."""
        if seconds:
            with self._lock:  # no thread asks a communicator that another one aborts
                if not self.problem and (reason := self._failure(seconds)):
                    self._fail(reason)
        if self.problem:
            raise HeteroError(self.problem)

    def _fail(self, reason: str) -> None:
        if self.problem:
            return
        names = ", ".join(f"cuda:{gpu}" for gpu in self.gpus)
        self.problem = (
            f"NCCL's exchange between {names} failed: {reason}; its results are lost, and so is this machine: "
            "expected GPUs that nvidia-smi lists without errors, and a new VirtualMachine after this one is deleted"
        )
        for communicator in self.each:  # at once; the last abort waits until no graph has NCCL's kernels any more
            threading.Thread(target=self._abort, args=(communicator,), name="relax_hetero abort", daemon=True).start()

    def _abort(self, communicator: Any) -> None:
        try:
            self.nccl.abort(communicator)
        except Exception:  # of NCCL
            _log.debug("a communicator was not aborted", exc_info=True)

    def _failure(self, seconds: float) -> str:
        """The reason why exchanges will not end; empty if they may."""
        if seconds > self._limit:
            return f"it has not ended after {self._limit:g} s (collective_timeout=)"
        try:
            for stream in self._streams:  # a lost GPU is an error of all its streams
                stream.has_ended()
            for communicator in self.each:
                communicator.check_async_error()
        except Exception as error:  # of NCCL or the driver
            return f"{error}"
        return ""


class NcclMemory:
    """Memory on which NCCL works for a function, one buffer on each GPU, and graphs of its collectives.

    Raises HeteroError if a GPU does not answer in time.
    """

    def __init__(
        self,
        devices: list[runtime.Device],  # GPUs of the mesh
        collectives: Sequence[Collective],  # collectives of the function (`nccl_layout`)
        communicators: Communicators,  # NCCL's, which nothing else uses now
    ) -> None:
        self._devices, self.communicators, self._nccl = devices, communicators, communicators.nccl
        self._library = library = communicators.library
        self._buffers = [empty((buffer_bytes(collectives),), "uint8", device) for device in devices]
        self.addresses = addresses_on(devices, self._buffers)  # for each GPU, the addresses of all GPUs' buffers
        for device in devices:  # other functions may use the communicators
            for handle in (0, Stream.current(library, device).handle):
                Stream(library, device.index, handle).synchronize()
        streams = [Stream(library, device.index) for device in devices]
        self._graphs = [self._captured(each, streams) for each in collectives]

    def _run(self, collective: Collective, streams: Sequence[Stream]) -> None:
        nccl, addresses = self._nccl, [buffer.data_ptr() for buffer in self._buffers]
        nccl.start()
        try:
            if len(collective) == 1:
                for communicator, address, stream in zip(self.communicators.each, addresses, streams, strict=True):
                    communicator.allReduce(address, address, *collective, nccl.float32, nccl.sum, stream.handle)
                return
            for (source, target, nbytes), offset in zip(transfers(collective), offsets(collective), strict=True):
                for rank, peer, call in (source, target, "send"), (target, source, "recv"):
                    operation = getattr(self.communicators.each[rank], call)
                    operation(addresses[rank] + offset, nbytes, nccl.byte, peer, streams[rank].handle)
        finally:
            nccl.end()

    def _captured(self, collective: Collective, streams: Sequence[Stream]) -> list[int]:
        """Graphs of a collective, one for each GPU.

        By events NCCL orders graphs with work of the communicator outside of graphs (NCCL_GRAPH_MIXING_SUPPORT).
        Such work is done here only, and waited for, and without events each sum takes some microseconds less.
        """
        self._run_now(collective, streams)  # connects the GPUs
        graphs = captured(self._library, streams, lambda: self._run(collective, streams))
        for graph in graphs:
            remove_events(self._library, graph)
        self._run_now(collective, streams)  # after what NCCL has copied to GPUs for the graphs
        return graphs

    def _run_now(self, collective: Collective, streams: Sequence[Stream]) -> None:
        self._run(collective, streams)
        for stream in streams:
            stream.synchronize()

    def add(self, number: int, rank: int) -> None:
        """Add a collective to the graph that the current stream of a GPU captures."""
        add_child_graph(self._library, Stream.current(self._library, self._devices[rank]), self._graphs[number][rank])

    def free(self) -> None:
        """Destroy the graphs after all work of the GPUs; after a failure, which it raises, so that aborts end."""
        try:
            for device in self._devices:
                Stream(self._library, device.index, 0).synchronize()
        finally:
            for graph in (graph for graphs in self._graphs for graph in graphs):
                self._library.call("cuGraphDestroy", graph)


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


_unused: defaultdict[Mesh, list[list[Any]]] = defaultdict(list)  # communicators that no machine uses, by their GPUs
_communicators: dict[tuple[int, Mesh], Communicators] = {}  # communicators of machines
_limits: dict[int, float] = {}  # seconds that threads wait for the GPUs of a machine, if not `TIMEOUT_SECONDS`


def limit_waits(machine: int, seconds: float) -> None:
    """Set the limit of waits for the GPUs of a machine, given the identity of its list of devices."""
    _limits[machine] = seconds


def _communicators_of(
    machine: int, devices: Sequence[runtime.Device], nccl: Nccl, library: CudaLibrary
) -> Communicators:
    gpus = tuple(device.index for device in devices)
    if (machine, gpus) not in _communicators:
        if not _unused[gpus]:
            _unused[gpus].append(nccl.communicators(list(gpus)))
            for communicator in _unused[gpus][0]:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))
        limit = _limits.get(machine, TIMEOUT_SECONDS)
        _communicators[machine, gpus] = Communicators(gpus, _unused[gpus].pop(), nccl, library, limit)
        for gpu in gpus:
            wait_checks[gpu] = partial(_check, gpu)
    return _communicators[machine, gpus]


def _check(gpu: int, seconds: float) -> None:
    """Check all communicators of a GPU, whose machines share its streams."""
    for communicators in list(_communicators.values()):
        if gpu in communicators.gpus:
            communicators.check(seconds)


def _remove(machine: int, gpus: Mesh) -> Communicators | None:
    """Take the communicators from a machine, and end the checks of GPUs without others."""
    removed = _communicators.pop((machine, gpus), None)
    for gpu in gpus:
        if not any(gpu in others for _, others in list(_communicators)):
            wait_checks.pop(gpu, None)
    return removed


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
        return NcclMemory(gpus, collectives, _communicators_of(machine, gpus, nccl, library))
    except Exception as error:
        mesh = tuple(device.index for device in gpus)
        failed = _communicators.get((machine, mesh))
        if not any(memory.communicators is failed for memory in list(_memories.values())):
            _remove(machine, mesh)  # they are of no use
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
    memory.communicators.check()
    _call.memory[mesh] = memory
    peer_call.is_by_nccl = True
    return memory.addresses[devices[index].index]


@tvm_ffi.register_global_func(NCCL_COLLECTIVE, override=True)
def nccl_collective(number: int, rank: int, *mesh: int) -> None:
    """Add a collective of the function to the graph that the current stream of a GPU captures."""
    _call.memory[mesh].add(number, rank)


def free_nccl_memory(machine: int) -> None:
    """Free the memory of a machine, given the identity of its list of devices."""
    with _lock:
        freed = [_memories.pop(key) for key in [key for key in _memories if key[0] == machine]]
        _limits.pop(machine, None)
    has_failed = False
    for memory in freed:  # without the lock: another thread may have to launch what GPUs wait for
        try:
            memory.free()
        except Exception:  # a failed GPU, whose communicators are of no use
            _log.debug("memory of NCCL was not freed", exc_info=True)
            has_failed = True
    with _lock:
        for key in [key for key in _communicators if key[0] == machine]:
            communicators = _remove(*key)
            if communicators is not None and not has_failed:
                _unused[communicators.gpus].append(communicators.each)
