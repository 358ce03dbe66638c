"""Memory of GPUs that the other GPUs of a mesh write to (`artifact.peer_layout`), one for each machine and mesh.

A kernel that waits for other GPUs occupies its GPU until the host has launched theirs. Meanwhile the host must not wait
for the first GPU, as it may when it loads code or makes graphs. So a call of a function over GPUs of a mesh launches
nothing until all its command buffers are graphs (`run_over_peers`). Nor does Python collect garbage during it: a
machine that is freed waits for its GPUs.

A call that ends halfway, with an error or to be repeated, may leave words that no kernel has read, or let the next
kernel begin with the slot that the last one used. So the memory is cleared before the next call.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact.peer_layout import AWAIT_LAUNCHES, PEER_MEMORY, initial_zeros, memory_bytes
from ...errors import HeteroError
from .builtins import current_machine
from .cuda_copies import enable_peer_access, has_peer_access
from .cuda_library import CUDA, cuda_library
from .cuda_streams import Stream
from .graph_launches import GraphLaunch
from .tensors import copy_into, empty, from_array, part_of


class _PeerCall(threading.local):
    """The call on this thread; its flags begin as False."""

    uses_peers = False  # whether it is one of a function over GPUs of a mesh
    is_incomplete = False  # whether command buffers have become graphs that were not launched
    missing = ""  # command buffer that became a graph last, and its device
    waits = False  # whether the host waits for each kernel, so that no kernel can wait for one of another GPU
    is_repeated = False  # whether it is the second call of compiled code, after one that made graphs
    has_lock = False  # whether this thread launches kernels of GPUs of a mesh, and no other thread does (`_launching`)
    collects_later = False  # whether Python collects garbage again after the call
    is_by_nccl = False  # whether its graphs have kernels of NCCL
    launches: Sequence[GraphLaunch] = ()  # those that threads of the GPUs make, and that nothing has waited for


peer_call = _PeerCall()


@contextmanager
def waiting_for_kernels() -> Iterator[None]:
    """Context of calls on this thread in which the host waits for each kernel: they refuse meshes of GPUs."""
    outer, peer_call.waits = peer_call.waits, True
    try:
        yield
    finally:
        peer_call.waits = outer


def run_over_peers(
    function: Callable[..., Any],  # compiled function
    values: Sequence[Any],  # its arguments
    devices: Sequence[runtime.Device],  # devices of the machine
) -> Any:
    """Call compiled code; a second time, if the first one only made graphs."""
    call = peer_call
    flags = vars(call)
    outer = dict(flags)  # those of a call that this one is nested in
    flags.clear()
    call.waits = outer.get("waits", False)
    try:
        result = function(*values)
        if call.uses_peers and call.is_incomplete:
            call.is_incomplete, call.is_repeated = False, True
            del result
            _clear_memory(devices)
            result = function(*values)
            if call.is_incomplete:
                raise HeteroError(
                    f"command buffer {call.missing} made its graph in a repeated call; expected the graphs of all "
                    "GPUs of the mesh after the first"
                )
        await_launches()
    except BaseException:
        if call.uses_peers:
            _unfinished.add(id(devices))
        raise
    finally:
        if call.collects_later:
            gc.enable()
        if call.has_lock:
            _launching.release()
        flags.clear()
        flags.update(outer)
    return result


@tvm_ffi.register_global_func(AWAIT_LAUNCHES, override=True)
def await_launches() -> None:
    """Wait for the launches of this thread's call; errors are those of `GraphLaunch.wait`."""
    launches, peer_call.launches = peer_call.launches, ()
    for launch in launches:
        launch.wait()


_launching = threading.RLock()  # kernels of two machines begin in the same order on all GPUs
_memories: dict[tuple[int, int, tuple[int, ...]], _PeerMemory] = {}
_unfinished: set[int] = set()  # identities of machines' lists of devices whose last call ended with an error
_lock = threading.RLock()  # a garbage collection within may free memory


class _PeerMemory:
    """Memory of all devices of a mesh, and on each of them the addresses of all.

    Raises HeteroError if a GPU cannot access the memory of another one.
    """

    def __init__(self, devices: list[runtime.Device], slot_bytes: int) -> None:
        different_gpus(devices)
        enable_peer_access(devices)
        for device in devices:
            for peer in devices:
                if device.index != peer.index and not has_peer_access(device.index, peer.index):
                    raise HeteroError(
                        f"{device} cannot access the memory of {peer}, which this code for GPUs of a mesh needs; "
                        "expected GPUs with NVLink or PCIe peer access, or code that was compiled with "
                        'allreduce_strategy="nccl"'
                    )
        nbytes = memory_bytes(len(devices), slot_bytes)
        self._zeros = initial_zeros(len(devices), slot_bytes)
        self.memory = [empty((nbytes,), "uint8", device) for device in devices]
        self.clear()
        self.addresses = addresses_on(devices, self.memory)

    def clear(self) -> None:
        """Set the memory to its initial state; no kernel may use it meanwhile."""
        for begin, nbytes in self._zeros:
            zeros = from_array(np.zeros(nbytes, "uint8"))
            for tensor in self.memory:
                copy_into(zeros, part_of(tensor, (nbytes,), "uint8", begin))


def _clear_memory(devices: Sequence[runtime.Device]) -> None:
    """Wait for a machine's devices, and clear the memory of its meshes; errors are those of `Event.synchronize`."""
    library = cuda_library()
    for device in devices:
        if library is not None and device.dlpack_device_type() == CUDA:
            GraphLaunch(device.index, lambda: None).wait()  # after launches that an interrupted call has left
            Stream(library, device.index, 0).synchronize()  # NCCL's kernels may wait for ones that were not launched
        else:
            device.sync()
    with _lock:
        for key, memory in _memories.items():
            if key[0] == id(devices):
                memory.clear()
    _unfinished.discard(id(devices))


def different_gpus(devices: Sequence[runtime.Device]) -> None:
    """Require that the devices of a mesh are different GPUs; HeteroError otherwise."""
    if len({device.index for device in devices}) < len(devices):
        raise HeteroError(f"a mesh runs on {', '.join(map(str, devices))}, expected different GPUs")


def addresses_on(devices: Sequence[runtime.Device], tensors: Sequence[runtime.Tensor]) -> dict[int, runtime.Tensor]:
    """Make a tensor on each GPU with the addresses of all tensors."""
    bases = np.array([tensor.data_ptr() for tensor in tensors], "int64")
    addresses = {device.index: empty((len(devices),), "int64", device) for device in devices}
    for target in addresses.values():
        copy_into(from_array(bases), target)
    return addresses


def devices_of_call() -> Sequence[runtime.Device]:
    """Devices of the machine that runs on this thread, whose kernels now wait for those of other GPUs."""
    current = current_machine.devices_and_scopes
    if current is None:
        raise HeteroError("memory of a mesh is asked for outside of a machine")
    if peer_call.waits:
        raise HeteroError(
            "this function's kernels wait for those of other GPUs, so that they cannot be measured one by one; "
            "expected a file of this version, whose profiles measure them by events: compile it again"
        )
    if not peer_call.uses_peers:
        _launching.acquire()
        peer_call.uses_peers = peer_call.has_lock = True
        peer_call.collects_later = gc.isenabled()
        gc.disable()
        if id(current[0]) in _unfinished:  # before the first launch of a kernel that waits
            _clear_memory(current[0])
    return current[0]


@tvm_ffi.register_global_func(PEER_MEMORY, override=True)
def peer_memory(index: int, slot_bytes: int, *mesh: int) -> Any:
    """Addresses of the memory of a mesh's devices, on the device of manifest entry `index`."""
    devices = devices_of_call()
    key = (id(devices), slot_bytes, mesh)
    with _lock:
        memory = _memories.get(key)
        if memory is None:
            memory = _memories[key] = _PeerMemory([devices[position] for position in mesh], slot_bytes)
    return memory.addresses[devices[index].index]


def free_peer_memory(machine: int) -> None:
    """Free the memory of a machine, given the identity of its list of devices."""
    _unfinished.discard(machine)
    with _lock:
        for key in [key for key in _memories if key[0] == machine]:
            del _memories[key]
