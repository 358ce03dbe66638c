"""Functions that bytecode calls by name: ``relax_hetero.to_device`` and ``relax_hetero.pinned_storage``.

Bytecode names a device by its manifest index, so that one executable runs on whatever devices a machine was
made with. The machine that runs on the calling thread says which device that is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tvm_ffi
from tvm import runtime

from ...errors import HeteroError
from .cuda_library import CUDA
from .pinned_pool import arrival, departure
from .tensors import alias, copy_into, copy_to, empty, is_host


class _Running(threading.local):
    """Devices and memory scopes of the machine on this thread; None outside of a call."""

    machine: tuple[Sequence[runtime.Device], Sequence[str]] | None = None


running = _Running()


@contextmanager
def running_on(devices: Sequence[runtime.Device], scopes: Sequence[str]) -> Iterator[None]:
    """Within the block, manifest index ``i`` means ``devices[i]`` on this thread; -1 is the last, the host.

    Blocks nest, so that a kernel written in Python may call another machine.
    """
    outer = running.machine
    running.machine = devices, scopes
    try:
        yield
    finally:
        running.machine = outer


def running_host() -> runtime.Device:
    """The host of the machine that runs on this thread; ``cpu(0)`` outside of a call."""
    return running.machine[0][-1] if running.machine is not None else runtime.device("cpu", 0)


@tvm_ffi.register_global_func("relax_hetero.to_device", override=True)
def to_device(value: Any, index: int, must_copy: int = 0, room: Any = None) -> Any:
    """`value` on the device of manifest entry `index` (-1: the host): itself if it is there, else a copy.

    Works between any two devices, and through nested tuples. Between two CPUs the copy is an alias. With `must_copy`
    always a copy: the module writes in place, and the value may have other readers (LowerTransfers). A copy goes into
    `room`, a tensor of the machine's pool, where the compiler could allocate one; else into new memory. What comes from
    a GPU goes into pinned memory, if it is large.
    """
    devices, scopes = _machine("to_device", index)
    if not isinstance(value, tvm_ffi.core.Tensor):
        return tuple(to_device(part, index, must_copy) for part in value)
    # A tensor does not know its memory scope, so one bound for a special scope is always copied.
    device, scope = devices[index], scopes[index]
    if not must_copy and scope == "global":
        if value.__dlpack_device__() == (device.dlpack_device_type(), device.index):
            return value
        if is_host(device) and is_host(value.device):
            return alias(value, device)
    pinned = arrival(value, device, room) if scope == "global" else None
    target = room if pinned is None else pinned
    if target is not None:
        copy_into(value, target)
        return target
    return copy_to(value, device, None if scope == "global" else scope)


@tvm_ffi.register_global_func("relax_hetero.pinned_storage", override=True)
def pinned_storage(size: Sequence[int], index: int) -> runtime.Tensor:
    """``size[0]`` bytes on the CPU of manifest entry `index` (-1: the host), for what is to go to a GPU: pinned.

    Plain memory where pinning makes no difference, cannot be had or has reached its limit.
    """
    devices, _ = _machine("pinned_storage", index)
    device, nbytes = devices[index], int(size[0])
    gpu = next((other.index for other in devices if other.dlpack_device_type() == CUDA), None)
    pinned = None if gpu is None else departure(nbytes, device, gpu)
    return empty((nbytes,), "uint8", device) if pinned is None else pinned


def _machine(function: str, index: int) -> tuple[Sequence[runtime.Device], Sequence[str]]:
    """Devices and memory scopes of the machine on this thread."""
    if running.machine is None:
        raise HeteroError(
            f"relax_hetero.{function} was called outside of relax_hetero.vm.VirtualMachine, which alone knows "
            f"what device manifest entry {index} is"
        )
    return running.machine
