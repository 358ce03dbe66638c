"""Mailboxes of a machine: pinned memory through which command buffers of a GPU and of the CPU exchange values.

Compiled code sends and receives (`tir.commands.mailbox_kernels`). This module allocates the memory, and is called if a
receiver on the CPU waits for long, and after a failure, when a GPU may wait for a value that nobody will send.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact.mailboxes import DATA, MailboxSpec, offsets_of
from ...artifact.metadata import ConstantSpec, Metadata
from ...errors import BindingError, HeteroError
from .cuda_library import cuda_library
from .cuda_memory import free_after_use
from .cuda_streams import Stream
from .tensors import alias, copy_into, from_array, is_host

_BLOCKING = "CUDA_LAUNCH_BLOCKING"

_POLL_SECONDS = 100e-6  # polling interval where compiled code has given up


class Mailboxes:
    """The mailboxes of a machine.

    `specs`: each mailbox once. `gpus`: GPUs with an end of a mailbox. Raises BindingError if there is no CUDA driver
    for pinned memory and graphs, or launches return only when they have ended.
    """

    def __init__(self, specs: Sequence[MailboxSpec], gpus: Sequence[runtime.Device]) -> None:
        library = cuda_library()
        if library is None:
            raise BindingError(
                "this model has command buffers of the CPU and of a GPU that wait for each other, and expects CUDA "
                "graphs: found no CUDA driver that works"
            )
        if os.environ.get(_BLOCKING, "0") not in ("", "0"):
            raise BindingError(
                f"{_BLOCKING}={os.environ[_BLOCKING]}: launches would wait for the GPU, which waits for the CPU in "
                f"this model; expected it unset"
            )
        self._library, self._gpus = library, list(gpus)
        library.use(gpus[0].index)
        self._offsets, size = offsets_of(specs)
        self._address = library.pinned(size)
        weakref.finalize(self, free_after_use, library, self._gpus, self._address)
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self._address))
        self._bytes[:] = 0
        flags = np.array(list(self._offsets.values())) // 4
        self._words, self._flags = self._bytes.view("int32"), flags
        _machines.add(self)

    def end(self, spec: MailboxSpec, device: runtime.Device) -> runtime.Tensor:
        """The memory of a mailbox, as the constant of an end on a device."""
        offset = self._offsets[spec.number]
        return alias(from_array(self._bytes[offset : offset + DATA]), device)

    def contains(self, address: int) -> bool:
        """Return whether an address is one of a mailbox."""
        return self._address <= address < self._address + self._bytes.size

    def await_flag(self, address: int, wanted: int) -> None:
        """Wait until the flag at an address is `wanted`, 1 for a value and 0 for an empty mailbox.

        Raises HeteroError if the GPU has failed, or has ended without sending or receiving.
        """
        flag = (address - self._address) // 4
        while self._words[flag] != wanted:
            is_done = self._are_done()
            if is_done and self._words[flag] != wanted:
                what = "sending what the CPU waits for" if wanted else "receiving what the CPU has sent"
                raise HeteroError(f"a command buffer of the GPU ended without {what}")
            time.sleep(_POLL_SECONDS)

    def reset(self) -> None:
        """End the work of GPUs after a failure, without waiting for the CPU any more, and clear all mailboxes."""
        try:
            while not self._are_done():
                self._words[self._flags] = 1
                time.sleep(_POLL_SECONDS)
        finally:
            self._words[self._flags] = 0

    def _are_done(self) -> bool:
        return all([Stream.current(self._library, gpu).done() for gpu in self._gpus])


_machines: weakref.WeakSet[Mailboxes] = weakref.WeakSet()


@tvm_ffi.register_global_func("relax_hetero.await_mailbox", override=True)
def _await_mailbox(address: int, wanted: int) -> None:
    next(each for each in list(_machines) if each.contains(address)).await_flag(address, wanted)


def place_mailboxes(
    metadata: Metadata, devices: Sequence[runtime.Device], constants: Any
) -> tuple[Any, Mailboxes | None]:
    """Replace placeholders of mailboxes among a machine's constants; returns the constants, and the mailboxes if any.

    Parameters
    ----------
    metadata : Metadata
        Metadata of the executable.
    devices : sequence of runtime.Device
        Devices by manifest index.
    constants : object
        Array of the constants by index (`PlacedConstants.values`), which other machines may share.
    """
    ends = {index: spec for index, spec in enumerate(metadata.constants) if spec.mailbox is not None}
    if not ends:
        return constants, None
    specs = {spec.mailbox.number: spec.mailbox for spec in ends.values() if spec.mailbox is not None}
    gpus = {spec.device: devices[spec.device] for spec in ends.values() if not is_host(devices[spec.device])}
    mailboxes, values = Mailboxes(list(specs.values()), list(gpus.values())), list(constants)
    for index, spec in ends.items():
        assert spec.mailbox is not None, "ends have mailboxes"
        values[index] = mailboxes.end(spec.mailbox, devices[spec.device])
    for index, spec in enumerate(metadata.constants):
        if spec.addresses is not None and not spec.region and not ends.keys().isdisjoint(spec.addresses):
            values[index] = _with_ends(values, index, spec)
    return tvm_ffi.convert(values), mailboxes


def _with_ends(values: Sequence[runtime.Tensor], index: int, spec: ConstantSpec) -> runtime.Tensor:
    """A table of addresses with those of mailboxes."""
    table = values[index].numpy().copy()
    for position, entry in enumerate(spec.addresses or ()):
        if isinstance(entry, int):
            table[position] = values[entry].data_ptr()
    result = runtime.empty(table.shape, "int64", values[index].device)
    copy_into(from_array(table), result)
    return result
