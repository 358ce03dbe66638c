"""NUMA placement of threads and memory.

A device that was made with ``rh.native("llvm", numa=1)`` is the CPUs of node 1: its queue's threads run there and
prefer its memory, and the weights of its kernels are moved there. Linux allocates pages by the policy of the thread
that first writes them, so results and intermediate values follow.

These are preferences: a full node falls back to another, and if the system calls are forbidden (as in Docker by
default), the system's own placement stays.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tvm import runtime

from ...artifact.metadata import CPU, DeviceSpec, Metadata
from ...errors import BindingError
from ...target.cpu_cores import cpus_of_nodes
from .tensors import AddressRange, address_range

# System call numbers of mbind, get_mempolicy and set_mempolicy.
_SYSCALLS = {"x86_64": (237, 239, 238), "aarch64": (235, 236, 237)}
_PREFERRED = 1  # MPOL_PREFERRED
_MOVE = 2  # MPOL_MF_MOVE: only pages that no other process has mapped
_NODE_OF_ADDRESS = 3  # MPOL_F_NODE | MPOL_F_ADDR
_MAX_NODES = 1024


def check_node(name: str, spec: DeviceSpec) -> None:
    """Require that this process has CPUs on the NUMA node of `spec` (called `name`); BindingError otherwise."""
    node = spec.numa_node
    if spec.device_type == CPU and node is not None and node not in (nodes := cpus_of_nodes()):
        available = ", ".join(map(str, nodes))
        raise BindingError(f"{name} was compiled for NUMA node {node}, found CPUs of node {available} in this process")


def check_one_node(names: Sequence[str], specs: Sequence[DeviceSpec], devices: Sequence[runtime.Device]) -> None:
    """BindingError if manifest entries of different nodes share a device, whose queue can be bound to one node only."""
    first: dict[tuple[int, int], tuple[str, int | None]] = {}
    for name, spec, device in zip(names, specs, devices, strict=True):
        other = first.setdefault((device.dlpack_device_type(), device.index), (name, spec.numa_node))
        if other[1] != spec.numa_node:
            nodes = " and ".join(
                f"{n} ({'any node' if node is None else f'NUMA node {node}'})"
                for n, node in (other, (name, spec.numa_node))
            )
            raise BindingError(f"{device} stands for {nodes}; expected a device for each, such as cpu:0 and cpu:1")


def prefer_node(node: int) -> bool:
    """Make the calling thread and its later children allocate memory on a node; False if Linux refuses."""
    return _syscall(2, ctypes.c_int(_PREFERRED), _node_mask(node), ctypes.c_ulong(_MAX_NODES)) == 0


def move_to_node(ranges: Iterable[AddressRange], node: int) -> None:
    """Set the preferred node of memory ranges and move their pages there; partly covered pages stay."""
    page = os.sysconf("SC_PAGE_SIZE")
    for begin, end in ranges:
        first, last = -(-begin // page) * page, end // page * page
        if first < last:
            size = ctypes.c_ulong(last - first)
            count, flags = ctypes.c_ulong(_MAX_NODES), ctypes.c_uint(_MOVE)
            _syscall(0, ctypes.c_void_p(first), size, ctypes.c_int(_PREFERRED), _node_mask(node), count, flags)


def move_constants_to_nodes(metadata: Metadata, constants: Sequence[Any]) -> None:
    """Move the constants of devices that are bound to a NUMA node to its memory.

    `constants`: tensors on their devices, in the order of ``metadata.constants``.
    """
    for constant, spec in zip(constants, metadata.constants, strict=True):
        node = metadata.devices[spec.device].numa_node if spec.device >= 0 else None
        if node is not None:
            move_to_node([address_range(constant)], node)


def node_of(address: int) -> int | None:
    """The node of the memory at an address, which is accessed; None if unknown."""
    node = ctypes.c_int(-1)
    pointer, flags = ctypes.c_void_p(address), ctypes.c_ulong(_NODE_OF_ADDRESS)
    status = _syscall(1, ctypes.byref(node), None, ctypes.c_ulong(0), pointer, flags)
    return node.value if status == 0 else None


def _node_mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    return mask


def _syscall(index: int, *arguments: object) -> int:
    """Make the system call of an index in `_SYSCALLS`; -1 if it is unsupported or refused."""
    numbers = _SYSCALLS.get(platform.machine()) if sys.platform == "linux" else None
    if numbers is None:
        return -1
    return int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(numbers[index]), *arguments))
