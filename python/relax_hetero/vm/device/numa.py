"""Memory near the CPUs that use it, on machines whose CPUs are in several NUMA nodes.

A device that was made with ``rh.native("llvm", numa=1)`` is the CPUs of node 1: its queue's threads run there, prefer
memory from there, and the weights that its kernels read are moved there. Linux places memory where it is first written
by the policy of the thread that writes, so results and intermediate values follow.

Every step is a preference, not a demand: a node without free memory takes it from another, and a container that
forbids these system calls (Docker does by default) leaves memory where the system puts it.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable, Sequence
from typing import Any

from tvm import runtime

from ...artifact.metadata import CPU, DeviceSpec, Metadata
from ...errors import BindingError
from ...target.cpu_cores import cpus_of_nodes
from .tensors import AddressRange, address_range

# Linux' numbers of mbind, get_mempolicy and set_mempolicy.
_CALLS = {"x86_64": (237, 239, 238), "aarch64": (235, 236, 237)}
_PREFERRED = 1  # MPOL_PREFERRED
_MOVE = 2  # MPOL_MF_MOVE: pages that this process alone has mapped
_OF_ADDRESS = 3  # MPOL_F_NODE | MPOL_F_ADDR
_MAX_NODES = 1024


def check_node(name: str, spec: DeviceSpec) -> None:
    """BindingError if `spec` (called `name`) is of a NUMA node on which this process has no CPUs."""
    node = spec.numa_node
    if spec.device_type == CPU and node is not None and node not in (nodes := cpus_of_nodes()):
        known = ", ".join(map(str, nodes))
        raise BindingError(f"{name} was compiled for NUMA node {node}, found CPUs of node {known} in this process")


def check_one_node(names: Sequence[str], specs: Sequence[DeviceSpec], devices: Sequence[runtime.Device]) -> None:
    """BindingError if one device stands for entries of the manifest of different nodes: its queue has one place."""
    first: dict[tuple[int, int], tuple[str, int | None]] = {}
    for name, spec, device in zip(names, specs, devices, strict=True):
        found = first.setdefault((device.dlpack_device_type(), device.index), (name, spec.numa_node))
        if found[1] != spec.numa_node:
            nodes = " and ".join(
                f"{n} ({'any node' if at is None else f'NUMA node {at}'})" for n, at in (found, (name, spec.numa_node))
            )
            raise BindingError(f"{device} stands for {nodes}; expected a device for each, such as cpu:0 and cpu:1")


def prefer_node(node: int) -> bool:
    """Have the calling thread, and threads that it begins, get new memory from a node; False where Linux refuses."""
    return _call(2, ctypes.c_int(_PREFERRED), _set_of(node), ctypes.c_ulong(_MAX_NODES)) == 0


def move_to_node(ranges: Iterable[AddressRange], node: int) -> None:
    """Have memory come from a node, and what is there already be moved; pages that lie in a range only in part stay."""
    page = os.sysconf("SC_PAGE_SIZE")
    for begin, end in ranges:
        first, last = -(-begin // page) * page, end // page * page
        if first < last:
            size = ctypes.c_ulong(last - first)
            count, flags = ctypes.c_ulong(_MAX_NODES), ctypes.c_uint(_MOVE)
            _call(0, ctypes.c_void_p(first), size, ctypes.c_int(_PREFERRED), _set_of(node), count, flags)


def settle_on_nodes(metadata: Metadata, constants: Sequence[Any]) -> None:
    """Move the constants of devices that are the CPUs of a NUMA node to its memory.

    Parameters
    ----------
    constants : sequence of object
        Tensors on their devices, in the order of ``metadata.constants``.
    """
    for constant, spec in zip(constants, metadata.constants, strict=True):
        node = metadata.devices[spec.device].numa_node if spec.device >= 0 else None
        if node is not None:
            move_to_node([address_range(constant)], node)


def node_of(address: int) -> int | None:
    """The node of the memory at an address, which is read; None where Linux does not tell."""
    node = ctypes.c_int(-1)
    place, flags = ctypes.c_void_p(address), ctypes.c_ulong(_OF_ADDRESS)
    status = _call(1, ctypes.byref(node), None, ctypes.c_ulong(0), place, flags)
    return node.value if status == 0 else None


def _set_of(node: int) -> ctypes.Array[ctypes.c_ulong]:
    nodes = (ctypes.c_ulong * (_MAX_NODES // 64))()
    nodes[node // 64] = 1 << node % 64
    return nodes


def _call(which: int, *arguments: object) -> int:
    """A system call about memory; -1 where there is none, or it is refused."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None or platform.system() != "Linux":
        return -1
    return int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(numbers[which]), *arguments))
