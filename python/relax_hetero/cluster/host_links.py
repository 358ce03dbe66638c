"""The links of one host, at work: which tensors of a step leave and arrive by them."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm import runtime

from ..artifact.signature import TensorSpec, ValueSpec
from ..errors import HostError
from ..target.backend import backend_of_device, backend_of_type
from ..vm.device.cuda_library import CudaLibrary, cuda_device, cuda_library
from ..vm.device.cuda_memory import DeviceBlock
from ..vm.device.cuda_streams import Event, Stream
from ..vm.device.error_records import raise_reported
from ..vm.device.memory_pools import BlockPool
from ..vm.device.tensors import nbytes_of
from ..vm.machine import VirtualMachine
from .links import CONNECT_SECONDS, GpuInfo, Link, LinkTensor, check_sequence
from .nccl import Nccl, load_nccl, require_nccl
from .wire import Failure

# Links: tensors from a GPU of one process to a GPU of another, by NCCL, without a copy in host memory.
#
# A link has one direction and a communicator of its own, of two processes. Its operations are work of a stream of its
# own: they begin when the machine's stream has made what is sent, or has read what memory had before, and the machine's
# stream waits for what arrives. No thread waits for them. Nothing here needs Ray::
#
#     link = GpuLink(gpu=0)
#     link.connect(rank, id)                  # both processes, at the same time; one has made the id by `create_id`
#     link.send(tensor)                       # of rank 0
#     tensor = link.receive(shape, dtype)     # of rank 1, in the order in which tensors were sent
#
# NCCL connects two processes at their first operation, in which each waits for the other. `connect` has that behind it.
#
# While an operation waits for the other process, all calls of CUDA that wait for a whole GPU, such as those that give
# memory back, wait too. Whoever sends must not make the other process wait for what comes after such a call.

TIMEOUT_SECONDS = 30.0
"""Seconds within which the other process has to be there."""

POOL_BYTES = 4 << 30
"""Maximum bytes of a GPU's memory for tensors that arrive there."""

SENDER, RECEIVER = 0, 1
"""The ranks of a link."""

# Seconds. NCCL ends its kernels within milliseconds when it is told to; its helpers' threads may take longer.
_ABORT_SECONDS = 10.0
# Seconds for which a wait spins before it looks every now and then, and between these looks.
_SPIN, _PAUSE = 0.002, 0.0002
# Bytes of the first operations.
_HELLO = (1, 1 << 20)


class GpuLink:
    """A link, at one of its ends.

    Operations come from one thread at a time; `abort` may come from any.

    Parameters
    ----------
    gpu : int
        Number of the GPU in this process.
    limit : float
        Seconds that `connect` and `synchronize` wait for the other process.
    nccl, library
        NCCL and the driver, where not those of this machine.

    Raises
    ------
    HostError
        Without a GPU or NCCL; says what is missing.
    """

    def __init__(
        self, gpu: int, limit: float = TIMEOUT_SECONDS, nccl: Nccl | None = None, library: CudaLibrary | None = None
    ) -> None:
        found = library or cuda_library()
        if found is None:
            raise HostError("tensors cannot go from GPU to GPU: this process has no CUDA driver, or no GPU")
        self.gpu, self._limit = gpu, limit
        self._library, self._nccl = found, nccl or require_nccl()
        self._device = cuda_device(gpu)
        self._stream = Stream(found, gpu)
        self._before = Event(found, gpu)
        self._free_events: list[Event] = []  # that can be recorded again
        self._communicator: Any = None
        self._peer = SENDER
        self._is_over, self._problem = False, ""
        self._closing = threading.Lock()
        # Ends of operations, and what they read and write. TVM's pool and ours give memory again when nothing on the
        # host refers to it.
        self._in_flight: deque[tuple[Event, list[runtime.Tensor]]] = deque()

    def create_id(self) -> Any:
        """Identifier that both processes give to `connect`; this one has to live until then."""
        self._library.use(self.gpu)
        return self._nccl.create_id()

    def connect(self, rank: int, link_id: Any, ranks: int = 2) -> None:
        """Meet the other process, which does the same at the same time.

        Parameters
        ----------
        rank : int
            `SENDER` or `RECEIVER`.
        ranks : int
            1: the link leads back here, for `exchange`.

        Raises
        ------
        HostError
            The other process does not come in time, or NCCL fails: both on one GPU, no way between them.
        """
        self._peer = (rank + 1) % ranks
        failures: list[Exception] = []

        def work() -> None:
            try:
                self._meet(rank, link_id, ranks)
            except Exception as error:  # NCCL's and the driver's
                failures.append(error)

        # NCCL cannot be interrupted before it has made the communicator: a thread that waits in vain is left alone.
        is_done = _within(self._limit, work)
        if is_done and not failures:
            return
        self.abort()
        why = f"{failures[0]}" if failures else f"the other process did not come within {self._limit:g} s"
        raise HostError(f"NCCL could not connect GPU {self.gpu}: {why}")

    def send(self, *tensors: runtime.Tensor) -> None:
        """Send contiguous tensors of this GPU, after what the machine's stream was given; returns at once.

        The receiver takes as many at once. Their memory must not be written to before they are sent: `finish` has the
        machine's stream wait for that.

        Raises
        ------
        HostError
            A link that is not connected or has failed.
        """
        self.exchange(tensors, ())

    def receive(self, shape: Sequence[int], dtype: str) -> runtime.Tensor:
        """The next tensor, on this GPU; returns at once, and work of the machine's stream waits for it.

        Raises
        ------
        HostError
            A link that is not connected or has failed.
        """
        return self.receive_all([(tuple(shape), dtype)])[0]

    def receive_all(self, kinds: Sequence[tuple[tuple[int, ...], str]]) -> list[runtime.Tensor]:
        """The next tensors, which were sent at once, of these shapes and element types; see `receive`."""
        rooms = _receive_pool(self._library, self.gpu)
        tensors = [rooms.tensor(shape, dtype, self._device) for shape, dtype in kinds]
        self.exchange((), tensors)
        return tensors

    def exchange(self, sent: Sequence[runtime.Tensor], received: Sequence[runtime.Tensor]) -> None:
        """Send tensors and fill others with what arrives, at once; what has no elements does not travel.

        Raises
        ------
        HostError
            A link that is not connected, or has failed; no further operation can begin, and `abort` ends it.
        """
        communicator = self._ready()
        try:
            self._library.use(self.gpu)
            self._forget_ended()
            current = Stream.current(self._library, self._device)
            self._before.record(current)
            self._stream.wait(self._before)
            self._issue(communicator, sent, received)
            end = self._free_events.pop() if self._free_events else Event(self._library, self.gpu)
            end.record(self._stream)
            if received:
                current.wait(end)
        except Exception as error:
            # Not aborted: what was under way before must not come to an end that nobody knows to be none.
            self._problem = f"{error}"
            raise HostError(f"the link of GPU {self.gpu} failed: {error}") from error
        self._in_flight.append((end, [*sent, *received]))

    def finish(self) -> None:
        """Have later work of the machine's stream run after all operations; returns at once."""
        if self._in_flight and not self._is_over:
            Stream.current(self._library, self._device).wait(self._in_flight[-1][0])

    def synchronize(self, limit: float | None = None) -> None:
        """Return when all operations have ended.

        Parameters
        ----------
        limit : float, optional
            Seconds, if not the link's.

        Raises
        ------
        HostError
            They have not ended in time, or failed; the link is aborted then, and their tensors hold anything.
        """
        begin = time.monotonic()
        end = begin + (self._limit if limit is None else limit)
        while self._in_flight:
            communicator = self._ready()
            if self._in_flight[-1][0].done():
                self._in_flight.clear()
                break
            now = time.monotonic()
            if now > end:
                raise self._failed(f"the other process did not answer within {end - begin:g} s")
            if now > begin + _SPIN:
                self._check(communicator)
                time.sleep(_PAUSE)

    def close(self) -> None:
        """End the link, in order where all operations have ended; both processes do it at about the same time."""
        with suppress(HostError):
            if self._communicator is not None:
                self.synchronize()
        if self._problem:
            return self.abort()
        with self._closing:
            communicator, self._communicator, self._is_over = self._communicator, None, True
        if communicator is not None and not _within(_ABORT_SECONDS, communicator.destroy):
            _abandoned.append(communicator)

    def abort(self) -> None:
        """End the link now: operations under way end, and what they should have brought is anything."""
        with self._closing:
            communicator, self._communicator, self._is_over = self._communicator, None, True
        if communicator is not None and not _within(_ABORT_SECONDS, communicator.abort):
            _abandoned.append(communicator)

    def _meet(self, rank: int, link_id: Any, ranks: int) -> None:
        self._library.use(self.gpu)
        communicator = self._nccl.communicator(ranks, link_id, rank)
        with self._closing:
            is_late, self._communicator = self._is_over, None if self._is_over else communicator
        if is_late:
            communicator.abort()
        elif ranks > 1:
            for nbytes in _HELLO:
                block = DeviceBlock(self._library, self.gpu, nbytes)
                operation = communicator.send if rank == SENDER else communicator.recv
                operation(block.address, nbytes, self._nccl.byte, self._peer, self._stream.handle)
                self._stream.synchronize()

    def _issue(self, communicator: Any, sent: Sequence[runtime.Tensor], received: Sequence[runtime.Tensor]) -> None:
        operations = [(communicator.send, tensor, nbytes_of(tensor)) for tensor in sent]
        operations += [(communicator.recv, tensor, nbytes_of(tensor)) for tensor in received]
        operations = [operation for operation in operations if operation[2]]
        is_group = len(operations) > 1
        if is_group:
            self._nccl.start()
        try:
            for operation, tensor, nbytes in operations:
                operation(tensor.data_ptr(), nbytes, self._nccl.byte, self._peer, self._stream.handle)
        finally:
            if is_group:
                self._nccl.end()

    def _ready(self) -> Any:
        communicator = self._communicator
        if self._problem:
            raise HostError(f"the link of GPU {self.gpu} has failed: {self._problem}")
        if communicator is None:
            raise HostError(f"the link of GPU {self.gpu} {'has ended' if self._is_over else 'is not connected'}")
        return communicator

    def _check(self, communicator: Any) -> None:
        try:
            communicator.check_async_error()
        except Exception as error:  # NCCL's
            raise self._failed(f"{error}") from error

    def _failed(self, why: str) -> HostError:
        self._problem = why
        self.abort()
        return HostError(f"the link of GPU {self.gpu} failed: {why}")

    def _forget_ended(self) -> None:
        while self._in_flight and self._in_flight[0][0].done():
            self._free_events.append(self._in_flight.popleft()[0])


_abandoned: list[Any] = []
"""Communicators whose end does not end: to let go of one would begin another in whatever thread does."""


def _within(seconds: float, work: Callable[[], None]) -> bool:
    """Return whether work that other processes may hold up has ended in time; it goes on in its thread otherwise."""
    thread = threading.Thread(target=_quiet, args=(work,), name="relax_hetero link", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _quiet(work: Callable[[], None]) -> None:
    with suppress(Exception):  # of an end: there is nothing that could be done
        work()


@cache
def _receive_pool(library: CudaLibrary, gpu: int) -> BlockPool:
    """Memory for what arrives. A block is given again once the machine's stream has had its last reader."""
    return BlockPool(partial(DeviceBlock, library, gpu), POOL_BYTES)


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
