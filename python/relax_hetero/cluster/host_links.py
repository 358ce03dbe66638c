"""Links of one host: transfers of tensors from GPU to GPU by NCCL, without copies in host memory.

A `GpuLink` has one direction, and a communicator of its own with two ranks. Its operations run on a stream of its own,
after the machine's stream has written what is sent (or has read the previous contents of the buffer), and the machine's
stream waits for what arrives. No thread waits for them. Links work without Ray::

    link = GpuLink(gpu=0)
    link.connect(rank, id)                  # in both processes at the same time; one of them has called `create_id`
    link.send(tensor)                       # rank 0
    tensor = link.receive(shape, dtype)     # rank 1, in the order of sending

NCCL connects two processes at their first operation, which waits for the peer; `connect` runs one to get that over
with.

While an operation waits for the peer, CUDA calls that synchronize a whole GPU, such as freeing memory, wait too. So a
sender must not make the peer wait for anything that comes after such a call.
"""

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
from ..vm.device.nccl import Nccl, load_nccl, require_nccl
from ..vm.device.tensors import nbytes_of
from ..vm.machine import VirtualMachine
from .links import CONNECT_SECONDS, GpuInfo, Link, LinkTensor, check_sequence
from .wire import Failure

TIMEOUT_SECONDS = 30.0  # time to wait for the peer
POOL_BYTES = 4 << 30  # maximum number of bytes of receive buffers per GPU
SENDER, RECEIVER = 0, 1  # ranks of a link

_ABORT_SECONDS = 10.0
"""Timeout of an abort; NCCL ends its kernels within milliseconds, but its helper threads may take longer."""
_SPIN_SECONDS, _POLL_SECONDS = 0.002, 0.0002  # time that a wait spins, and its polling interval after that
_WARM_UP_BYTES = (1, 1 << 20)


class GpuLink:
    """One end of a link.

    Not thread-safe, except for `abort`. `gpu`: index of the GPU in this process; `limit`: seconds that `connect` and
    `synchronize` wait for the peer; `nccl`, `library`: NCCL and the CUDA driver, by default those of this machine.
    Raises HostError if there is no GPU or no NCCL.
    """

    def __init__(
        self, gpu: int, limit: float = TIMEOUT_SECONDS, nccl: Nccl | None = None, library: CudaLibrary | None = None
    ) -> None:
        driver = library or cuda_library()
        if driver is None:
            raise HostError("tensors cannot go from GPU to GPU: this process has no CUDA driver, or no GPU")
        self.gpu, self._limit = gpu, limit
        self._library, self._nccl = driver, nccl or require_nccl()
        self._device = cuda_device(gpu)
        self._stream = Stream(driver, gpu)
        self._before = Event(driver, gpu)
        self._free_events: list[Event] = []
        self._communicator: Any = None
        self._peer = SENDER
        self._is_closed, self._problem = False, ""
        self._closing = threading.Lock()
        # Events at the ends of operations, and the tensors that they use: memory pools reuse tensors that the host does
        # not reference.
        self._in_flight: deque[tuple[Event, list[runtime.Tensor]]] = deque()

    def create_id(self) -> Any:
        """Create the identifier that both processes pass to `connect`; this process must live until then."""
        self._library.use(self.gpu)
        return self._nccl.create_id()

    def connect(self, rank: int, link_id: Any, ranks: int = 2) -> None:
        """Connect to the peer, which must call this at the same time.

        `rank`: `SENDER` or `RECEIVER`; `link_id`: identifier from `create_id`; `ranks`: number of ranks, 1 for a
        loopback link, for `exchange`. Raises HostError if the peer does not come in time, or NCCL fails (both on one
        GPU, no path between them).
        """
        self._peer = (rank + 1) % ranks
        failures: list[Exception] = []

        def work() -> None:
            try:
                self._connect(rank, link_id, ranks)
            except Exception as error:  # of NCCL or the driver
                failures.append(error)

        # NCCL cannot be interrupted while it creates a communicator: a thread that hangs is abandoned.
        is_done = _run_with_timeout(self._limit, work)
        if is_done and not failures:
            return
        self.abort()
        reason = f"{failures[0]}" if failures else f"the other process did not come within {self._limit:g} s"
        raise HostError(f"NCCL could not connect GPU {self.gpu}: {reason}")

    def send(self, *tensors: runtime.Tensor) -> None:
        """Send contiguous tensors of this GPU after the work on the machine's stream; returns at once.

        The receiver must receive as many at once. Tensors must not be changed before they are sent: `finish` makes the
        machine's stream wait for that. Raises HostError if the link is not connected or has failed.
        """
        self.exchange(tensors, ())

    def receive(self, shape: Sequence[int], dtype: str) -> runtime.Tensor:
        """Receive the next tensor on this GPU; returns at once, and the machine's stream waits for it.

        Raises HostError if the link is not connected or has failed.
        """
        return self.receive_all([(tuple(shape), dtype)])[0]

    def receive_all(self, kinds: Sequence[tuple[tuple[int, ...], str]]) -> list[runtime.Tensor]:
        """Receive tensors that were sent at once, of these shapes and element types; see `receive`."""
        pool = _receive_pool(self._library, self.gpu)
        tensors = [pool.tensor(shape, dtype, self._device) for shape, dtype in kinds]
        self.exchange((), tensors)
        return tensors

    def exchange(self, sent: Sequence[runtime.Tensor], received: Sequence[runtime.Tensor]) -> None:
        """Send tensors and receive into others at once; empty tensors are skipped.

        Raises HostError if the link is not connected or has failed; then only `abort` is possible.
        """
        communicator = self._ready()
        try:
            self._library.use(self.gpu)
            self._recycle_events()
            current = Stream.current(self._library, self._device)
            self._before.record(current)
            self._stream.wait(self._before)
            self._enqueue(communicator, sent, received)
            end = self._free_events.pop() if self._free_events else Event(self._library, self.gpu)
            end.record(self._stream)
            if received:
                current.wait(end)
        except Exception as error:
            # Not aborted: operations in flight would end with undefined data, which nobody would notice.
            self._problem = f"{error}"
            raise HostError(f"the link of GPU {self.gpu} failed: {error}") from error
        self._in_flight.append((end, [*sent, *received]))

    def finish(self) -> None:
        """Make the machine's stream wait for all operations; returns at once."""
        if self._in_flight and not self._is_closed:
            Stream.current(self._library, self._device).wait(self._in_flight[-1][0])

    def synchronize(self, limit: float | None = None) -> None:
        """Wait for all operations.

        `limit`: timeout in seconds; by default the link's. Raises HostError if they do not end in time, or fail; then
        the link is aborted, and their tensors are undefined.
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
                raise self._fail(f"the other process did not answer within {end - begin:g} s")
            if now > begin + _SPIN_SECONDS:
                self._check(communicator)
                time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Close the link after all operations; both processes must do it at about the same time."""
        with suppress(HostError):
            if self._communicator is not None:
                self.synchronize()
        if self._problem:
            return self.abort()
        with self._closing:
            communicator, self._communicator, self._is_closed = self._communicator, None, True
        if communicator is not None and not _run_with_timeout(_ABORT_SECONDS, communicator.destroy):
            _abandoned.append(communicator)

    def abort(self) -> None:
        """Close the link now; operations in flight end, and their tensors are undefined."""
        with self._closing:
            communicator, self._communicator, self._is_closed = self._communicator, None, True
        if communicator is not None and not _run_with_timeout(_ABORT_SECONDS, communicator.abort):
            _abandoned.append(communicator)

    def _connect(self, rank: int, link_id: Any, ranks: int) -> None:
        self._library.use(self.gpu)
        communicator = self._nccl.communicator(ranks, link_id, rank)
        with self._closing:
            was_aborted, self._communicator = self._is_closed, None if self._is_closed else communicator
        if was_aborted:
            communicator.abort()
        elif ranks > 1:
            for nbytes in _WARM_UP_BYTES:
                block = DeviceBlock(self._library, self.gpu, nbytes)
                operation = communicator.send if rank == SENDER else communicator.recv
                operation(block.address, nbytes, self._nccl.byte, self._peer, self._stream.handle)
                self._stream.synchronize()

    def _enqueue(self, communicator: Any, sent: Sequence[runtime.Tensor], received: Sequence[runtime.Tensor]) -> None:
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
            raise HostError(f"the link of GPU {self.gpu} {'has ended' if self._is_closed else 'is not connected'}")
        return communicator

    def _check(self, communicator: Any) -> None:
        try:
            communicator.check_async_error()
        except Exception as error:  # of NCCL
            raise self._fail(f"{error}") from error

    def _fail(self, reason: str) -> HostError:
        self._problem = reason
        self.abort()
        return HostError(f"the link of GPU {self.gpu} failed: {reason}")

    def _recycle_events(self) -> None:
        while self._in_flight and self._in_flight[0][0].done():
            self._free_events.append(self._in_flight.popleft()[0])


_abandoned: list[Any] = []
"""Communicators whose destruction hangs: their finalizer would hang in whatever thread runs it."""


def _run_with_timeout(seconds: float, work: Callable[[], None]) -> bool:
    """Run work in a thread; False if it has not ended in time, and goes on there."""
    thread = threading.Thread(target=_ignore_errors, args=(work,), name="relax_hetero link", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _ignore_errors(work: Callable[[], None]) -> None:
    with suppress(Exception):
        work()


@cache
def _receive_pool(library: CudaLibrary, gpu: int) -> BlockPool:
    """Pool of receive buffers; the machine's stream orders their reuse after the last reader."""
    return BlockPool(partial(DeviceBlock, library, gpu), POOL_BYTES)


_Tensor = tvm_ffi.core.Tensor


class HostLinks:
    """Links of one host.

    A step calls `receive` for its messages, `announce` for its results, and `send_announced` once all messages are
    encoded: encoding may synchronize with CUDA, which would wait for the peer (see the module's docstring). `host`:
    logical name of the host; `machine`: machine of the host; `make`: function from the index of a GPU to a link's end.
    """

    def __init__(self, host: str, machine: VirtualMachine, make: Callable[[int], Any] | None = None) -> None:
        self._host, self._machine = host, machine
        self._make = make or (lambda gpu: GpuLink(gpu, CONNECT_SECONDS))
        self._links: dict[int, Any] = {}
        self._outgoing: dict[tuple[int, int], list[Link]] = {}  # by tasks
        self._sequence: dict[int, int] = {}
        self._pending: dict[int, list[Any]] = {}
        self._rejects_results = False

    @property
    def are_used(self) -> bool:
        """True if steps must call `receive`, `announce` and `send_announced`."""
        return bool(self._links) or self._rejects_results

    def info(self) -> GpuInfo:
        """Describe the machine's GPUs, and the reason if they cannot have links."""
        machine = self._machine
        gpu_of_device = [device.index if backend_of_device(device).has_links else None for device in machine.devices]
        gpus = {gpu for gpu in gpu_of_device if gpu is not None}
        if not gpus:
            return GpuInfo()
        scopes = [spec.memory_scope for spec in machine.executable.devices]
        linkable = [gpu if scope == "global" else None for gpu, scope in zip(gpu_of_device, scopes, strict=True)]
        linkable.append(None)  # index -1, the host
        signatures = machine.executable.metadata.signatures
        inputs = {name: _gpus_of(signature.inputs, linkable) for name, signature in signatures.items()}
        outputs = {name: _gpus_of(signature.outputs, linkable) for name, signature in signatures.items()}
        nccl = load_nccl()
        if isinstance(nccl, str):
            return GpuInfo(nccl, {}, inputs, outputs)
        return GpuInfo("", {gpu: _global_id(gpu) for gpu in gpus}, inputs, outputs)

    def create_id(self, link: Link) -> tuple[Any, str]:
        """Create the identifier of a link; returns it and "", or None and the reason why there can be no link."""
        try:
            return self._link(link).create_id(), ""
        except Exception as error:  # of NCCL or the driver
            return None, f"{error}"

    def connect(self, links: Sequence[tuple[Link, Any]]) -> dict[int, str]:
        """Connect links, in the same order on all hosts; returns errors by number of the link."""
        failures = {}
        for link, link_id in links:
            try:
                self._link(link).connect(SENDER if link.hosts[0] == self._host else RECEIVER, link_id)
            except Exception as error:  # of NCCL or the driver
                failures[link.number] = f"{error}"
                continue
            if link.hosts[0] == self._host:
                self._outgoing.setdefault(link.tasks, []).append(link)
        return failures

    def retain(self, numbers: Sequence[int]) -> None:
        """Abort all links except for those that both ends have connected."""
        for number in [number for number in self._links if number not in numbers]:
            self._links.pop(number).abort()
        self._outgoing = {
            tasks: [link for link in links if link.number in numbers] for tasks, links in self._outgoing.items()
        }

    def reject_results(self) -> bool:
        """Make all steps fail from now on, since their inputs may be undefined after `abort`; thread-safe."""
        self._rejects_results = True
        return True

    def abort(self) -> None:
        """Abort all links after `reject_results` on all hosts: what waits for them goes on with undefined data."""
        for end in list(self._links.values()):
            end.abort()

    def reset(self) -> None:
        """Abort and remove all links."""
        self.abort()
        self._links, self._outgoing, self._sequence, self._pending = {}, {}, {}, {}
        self._rejects_results = False

    def announce(self, tasks: tuple[int, int], function: str, values: Sequence[Any]) -> list[Any]:
        """Replace results that go by links by `LinkTensor`, in a message between tasks; `send_announced` sends them."""
        message = list(values)
        for link in self._outgoing.get(tasks, ()):
            for index in link.values.get(function, ()):
                tensor = message[index]
                if _is_on(tensor, link.gpus[0]):
                    sequence = self._next_sequence(link.number)
                    message[index] = LinkTensor(link.number, sequence, str(tensor.dtype), tuple(tensor.shape))
                    self._pending.setdefault(link.number, []).append(tensor)
        return message

    def send_announced(self) -> None:
        """Send announced tensors at the end of a step; HostError if a link or another host has failed."""
        if self._rejects_results:
            raise HostError(f"host {self._host!r}: another host died, whose tensors may not have come")
        pending, self._pending = self._pending, {}
        for number, tensors in pending.items():
            self._links[number].send(*tensors)

    def receive(self, values: tuple[Any, ...] | Failure) -> tuple[Any, ...] | Failure:
        """Receive the tensors that a message announces; return its values, or the failure.

        Must be called for all messages of a step, even if one of them is a failure: their tensors are on the way.
        Raises HostError if a link has failed, or its tensors are not the announced ones.
        """
        if isinstance(values, Failure):
            return values
        announced: dict[int, list[int]] = {}
        for index, value in enumerate(values):
            if isinstance(value, LinkTensor):
                announced.setdefault(value.link, []).append(index)
        if not announced:
            return values
        message = list(values)
        for number, indices in announced.items():
            tensors = self._receive_from(number, [values[index] for index in indices])
            for index, tensor in zip(indices, tensors, strict=True):
                message[index] = tensor
        return tuple(message)

    def check(self) -> None:
        """Raise errors that kernels of the last call have reported, before its results are sent from the GPU."""
        if not self._machine.executable.metadata.checks:
            return
        for gpu in {link.gpus[0] for links in self._outgoing.values() for link in links}:
            self._machine_stream(gpu).synchronize()
            raise_reported(gpu)

    def finish(self) -> None:
        """Make later writes wait for all sends, for steps that write to their arguments."""
        for end in self._links.values():
            end.finish()

    def _machine_stream(self, gpu: int) -> Stream:
        library = cuda_library()
        assert library is not None  # there are links
        return Stream.current(library, cuda_device(gpu))

    def _receive_from(self, number: int, announced: Sequence[LinkTensor]) -> list[Any]:
        end = self._links.get(number)
        if end is None:
            raise HostError(f"a tensor is announced on link {number}, which this host does not have")
        for value in announced:
            check_sequence(value, self._next_sequence(number))
        tensors: list[Any] = end.receive_all([(value.shape, value.dtype) for value in announced])
        return tensors

    def _next_sequence(self, number: int) -> int:
        sequence = self._sequence.get(number, 0)
        self._sequence[number] = sequence + 1
        return sequence

    def _link(self, link: Link) -> Any:
        if link.number not in self._links:
            self._links[link.number] = self._make(link.gpus[0 if link.hosts[0] == self._host else 1])
        return self._links[link.number]


def _is_on(value: Any, gpu: int) -> bool:
    """Return whether a value is a contiguous, nonempty tensor on a GPU."""
    if not isinstance(value, _Tensor):
        return False
    kind, index = value.__dlpack_device__()
    return bool(backend_of_type(kind).has_links and index == gpu and nbytes_of(value) and value.is_contiguous())


def _global_id(gpu: int) -> str:
    """Identifier of a GPU that is unique among all machines."""
    from cupy.cuda import runtime as cuda

    machine = socket.gethostname()
    with suppress(OSError):  # hostnames of containers differ
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{machine} {cuda.deviceGetPCIBusId(gpu)}"


def _gpus_of(specs: Sequence[ValueSpec], gpus: Sequence[int | None]) -> tuple[int | None, ...]:
    """GPU of each value, or None; `gpus` are by manifest index, the host last."""
    return tuple(gpus[spec.device] if isinstance(spec, TensorSpec) else None for spec in specs)
