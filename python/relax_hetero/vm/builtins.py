"""Functions that bytecode calls by name: ``relax_hetero.to_device``.

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

from ..errors import HeteroError
from .pinned_pool import arrival
from .tensors import alias, copy_into, copy_to, is_host


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
    if running.machine is None:
        raise HeteroError(
            "relax_hetero.to_device was called outside of relax_hetero.vm.VirtualMachine, which alone knows "
            f"what device manifest entry {index} is"
        )
    if not isinstance(value, tvm_ffi.core.Tensor):
        return tuple(to_device(part, index, must_copy) for part in value)
    devices, scopes = running.machine
    # A tensor does not know its memory scope, so one bound for a special scope is always copied.
    device, scope = devices[index], scopes[index]
    if not must_copy and scope == "global":
        if value.__dlpack_device__() == (device.dlpack_device_type(), device.index):
            return value
        if is_host(device) and is_host(value.device):
            return alias(value, device)
    pinned = arrival(value, device) if scope == "global" else None
    target = room if pinned is None else pinned
    if target is not None:
        copy_into(value, target)
        return target
    return copy_to(value, device, None if scope == "global" else scope)
