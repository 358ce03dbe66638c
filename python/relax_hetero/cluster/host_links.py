"""The links of one host, at work: which tensors of a step leave and arrive by them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tvm_ffi

from ..artifact.signature import TensorSpec, ValueSpec
from ..errors import HostError
from ..target.backend import backend_of_device, backend_of_type
from ..vm.device.cuda_library import cuda_device, cuda_library
from ..vm.device.cuda_streams import Stream
from ..vm.device.error_records import raise_reported
from ..vm.device.tensors import nbytes_of
from ..vm.machine import VirtualMachine
from .gpu_link import RECEIVER, SENDER, GpuLink
from .links import CONNECT_SECONDS, GpuInfo, Link, LinkTensor, check_sequence
from .nccl import load_nccl
from .wire import Failure

_Tensor = tvm_ffi.core.Tensor


class HostLinks:
    """The links of one host.

    A step takes what `arrived` makes of its messages, `leaving` makes of its results what messages hold, and `post`
    sends the tensors once all messages are there: what comes between could have CUDA wait for them, see `gpu_link`.

    Parameters
    ----------
    host : str
        Its logical name.
    machine : VirtualMachine
        Whose values they are.
    make : callable, optional
        Makes a link's end, of the number of a GPU.
    """

    def __init__(self, host: str, machine: VirtualMachine, make: Callable[[int], Any] | None = None) -> None:
        self._host, self._machine = host, machine
        self._make = make or (lambda gpu: GpuLink(gpu, CONNECT_SECONDS))
        self._links: dict[int, Any] = {}
        self._leaving: dict[tuple[int, int], list[Link]] = {}
        self._sequence: dict[int, int] = {}
        self._pending: dict[int, list[Any]] = {}
        self._is_in_doubt = False

    def info(self) -> GpuInfo:
        """Description of the machine's GPUs, and the reason why they can have no links, if so."""
        machine = self._machine
        gpu_of = [device.index if backend_of_device(device).has_links else None for device in machine.devices]
        gpus = {gpu for gpu in gpu_of if gpu is not None}
        if not gpus:
            return GpuInfo()
        scopes = [spec.memory_scope for spec in machine.executable.devices]
        plain = [gpu if scope == "global" else None for gpu, scope in zip(gpu_of, scopes, strict=True)]
        plain.append(None)  # the host, which is number -1
        signatures = machine.executable.metadata.signatures
        inputs = {name: _places(found.inputs, plain) for name, found in signatures.items()}
        outputs = {name: _places(found.outputs, plain) for name, found in signatures.items()}
        nccl = load_nccl()
        if isinstance(nccl, str):
            return GpuInfo(nccl, {}, inputs, outputs)
        return GpuInfo("", {gpu: _identity(gpu) for gpu in gpus}, inputs, outputs)

    def create_id(self, link: Link) -> tuple[Any, str]:
        """Identifier that both ends of a link share, and an empty text; or nothing, and why there can be no link."""
        try:
            return self._link(link).create_id(), ""
        except Exception as error:  # NCCL's and the driver's; its tensors go through host memory
            return None, f"{error}"

    def connect(self, links: Sequence[tuple[Link, Any]]) -> dict[int, str]:
        """Connect links, in the order that all hosts have; by number, why one could not be connected."""
        failures = {}
        for link, link_id in links:
            try:
                self._link(link).connect(SENDER if link.hosts[0] == self._host else RECEIVER, link_id)
            except Exception as error:  # its tensors go through host memory
                failures[link.number] = f"{error}"
                continue
            if link.hosts[0] == self._host:
                self._leaving.setdefault(link.tasks, []).append(link)
        return failures

    def keep(self, numbers: Sequence[int]) -> None:
        """Drop all links but those that both ends have connected."""
        for number in [number for number in self._links if number not in numbers]:
            self._links.pop(number).abort()
        self._leaving = {
            slots: [link for link in found if link.number in numbers] for slots, found in self._leaving.items()
        }

    def doubt(self) -> bool:
        """From any thread: no step ends in order from now on, as what its GPU was sent may soon be anything."""
        self._is_in_doubt = True
        return True

    def cut(self) -> None:
        """End all links, from any thread, after `doubt` on all hosts: what waits for them goes on with any numbers."""
        for end in list(self._links.values()):
            end.abort()

    def drop(self) -> None:
        """End all links and forget them, before others are made."""
        self.cut()
        self._links, self._leaving, self._sequence, self._pending = {}, {}, {}, {}
        self._is_in_doubt = False

    def leaving(self, slots: tuple[int, int], function: str, values: Sequence[Any]) -> list[Any]:
        """Results for a message from slot to slot, with what goes by links announced only; `post` sends it."""
        found = list(values)
        for link in self._leaving.get(slots, ()):
            for place in link.values.get(function, ()):
                tensor = found[place]
                if _is_on(tensor, link.gpus[0]):
                    found[place] = LinkTensor(
                        link.number, self._next(link.number), str(tensor.dtype), tuple(tensor.shape)
                    )
                    self._pending.setdefault(link.number, []).append(tensor)
        return found

    def post(self) -> None:
        """Send what was announced, at the end of a step; HostError for a link that has failed, and in doubt."""
        if self._is_in_doubt:
            raise HostError(f"host {self._host!r}: another host died, whose tensors may not have come")
        pending, self._pending = self._pending, {}
        for number, tensors in pending.items():
            self._links[number].send(*tensors)

    def arrived(self, values: tuple[Any, ...] | Failure) -> tuple[Any, ...] | Failure:
        """The values of a message, with the tensors that it announces; a failure as it is.

        All messages of a step have to come here, also where one of them is a failure: what they announce is on its way.

        Raises
        ------
        HostError
            A link that has failed, or whose tensors are not those that are announced.
        """
        if isinstance(values, Failure):
            return values
        announced: dict[int, list[int]] = {}
        for place, value in enumerate(values):
            if isinstance(value, LinkTensor):
                announced.setdefault(value.link, []).append(place)
        if not announced:
            return values
        found = list(values)
        for number, places in announced.items():
            tensors = self._received(number, [values[place] for place in places])
            for place, tensor in zip(places, tensors, strict=True):
                found[place] = tensor
        return tuple(found)

    def check(self) -> None:
        """HeteroError for a value that a kernel of the last call has refused, if it could leave before that is seen."""
        if not self._machine.executable.metadata.checks:
            return
        for gpu in {link.gpus[0] for links in self._leaving.values() for link in links}:
            self._machine_stream(gpu).synchronize()
            raise_reported(gpu)

    def finish(self) -> None:
        """Have what is written from now on be written after all that was sent; for steps that write to arguments."""
        for end in self._links.values():
            end.finish()

    def _machine_stream(self, gpu: int) -> Stream:
        library = cuda_library()
        assert library is not None  # there are links
        return Stream.current(library, cuda_device(gpu))

    def _received(self, number: int, announced: Sequence[LinkTensor]) -> list[Any]:
        end = self._links.get(number)
        if end is None:
            raise HostError(f"a tensor is announced on link {number}, which this host does not have")
        for value in announced:
            check_sequence(value, self._next(number))
        received: list[Any] = end.receive_all([(value.shape, value.dtype) for value in announced])
        return received

    def _next(self, number: int) -> int:
        sequence = self._sequence.get(number, 0)
        self._sequence[number] = sequence + 1
        return sequence

    def _link(self, link: Link) -> Any:
        if link.number not in self._links:
            self._links[link.number] = self._make(link.gpus[0 if link.hosts[0] == self._host else 1])
        return self._links[link.number]


def _is_on(value: Any, gpu: int) -> bool:
    """Return whether a value is a tensor with elements, on that GPU."""
    if not isinstance(value, _Tensor):
        return False
    kind, index = value.__dlpack_device__()
    return bool(backend_of_type(kind).has_links and index == gpu and nbytes_of(value) and value.is_contiguous())


def _identity(gpu: int) -> str:
    """Which GPU of all machines the one of that number in this process is."""
    from cupy.cuda import runtime as cuda

    machine = socket.gethostname()
    with suppress(OSError):  # of the kernel, whatever containers call the machine
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{machine} {cuda.deviceGetPCIBusId(gpu)}"


def _places(specs: Sequence[ValueSpec], gpus: Sequence[int | None]) -> tuple[int | None, ...]:
    """For each value the number of its GPU; None for what is on none. `gpus` are by manifest index, the host last."""
    return tuple(gpus[spec.device] if isinstance(spec, TensorSpec) else None for spec in specs)
