"""Memory of GPUs that the other GPUs of a mesh write to (`artifact.peer_layout`), one for each machine and mesh."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact.peer_layout import PEER_MEMORY, memory_bytes
from ...errors import HeteroError
from .builtins import current_machine
from .cuda_copies import enable_peer_access, has_peer_access
from .tensors import copy_into, empty, from_array

_memories: dict[tuple[int, int, tuple[int, ...]], _PeerMemory] = {}
_lock = threading.Lock()


class _PeerMemory:
    """Memory of all devices of a mesh, and on each of them the addresses of all.

    Parameters
    ----------
    devices : list of runtime.Device
    slot_bytes : int

    Raises
    ------
    HeteroError
        If a GPU cannot access the memory of another one.
    """

    def __init__(self, devices: list[runtime.Device], slot_bytes: int) -> None:
        if len({device.index for device in devices}) < len(devices):
            raise HeteroError(f"a mesh runs on {', '.join(map(str, devices))}, expected different GPUs")
        enable_peer_access(devices)
        for device in devices:
            for peer in devices:
                if device.index != peer.index and not has_peer_access(device.index, peer.index):
                    raise HeteroError(
                        f"{device} cannot access the memory of {peer}, which GPUs of a mesh need; expected GPUs with "
                        "NVLink, or PCIe peer access"
                    )
        nbytes = memory_bytes(len(devices), slot_bytes)
        self.memory = [empty((nbytes,), "uint8", device) for device in devices]
        zeros = from_array(np.zeros(nbytes, "uint8"))
        for tensor in self.memory:
            copy_into(zeros, tensor)
        bases = np.array([tensor.data_ptr() for tensor in self.memory], "int64")
        self.addresses = {device.index: empty((len(devices),), "int64", device) for device in devices}
        for addresses in self.addresses.values():
            copy_into(from_array(bases), addresses)


@tvm_ffi.register_global_func(PEER_MEMORY, override=True)
def peer_memory(index: int, slot_bytes: int, *mesh: int) -> Any:
    """Addresses of the memory of a mesh's devices, on the device of manifest entry `index`."""
    current = current_machine.devices_and_scopes
    if current is None:
        raise HeteroError("peer_memory is called outside of a machine")
    devices, key = current[0], (id(current[0]), slot_bytes, mesh)
    with _lock:
        memory = _memories.get(key)
        if memory is None:
            memory = _memories[key] = _PeerMemory([devices[position] for position in mesh], slot_bytes)
    return memory.addresses[devices[index].index]


def free_peer_memory(machine: int) -> None:
    """Free the memory of a machine, given the identity of its list of devices."""
    with _lock:
        for key in [key for key in _memories if key[0] == machine]:
            del _memories[key]
