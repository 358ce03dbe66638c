"""The queues of a machine, one for each device, and how a step runs in them."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import tvm_ffi
from tvm import runtime

from ...artifact.commands import Dispatch, RegionSpec
from ...artifact.messages import explain_failure
from ...artifact.metadata import CPU, Metadata, device_names
from ...artifact.schedule import Step
from ...errors import HeteroError
from ...target.backend import backend_of_device, backend_of_type
from ...target.cpu_cores import cpus_of_cores, cpus_of_nodes, num_cores
from ..device.builtins import running
from ..device.cuda_driver import CudaError
from ..device.machine_lock import hold_all
from ..device.tensors import alias, is_host, map_tensors, same_device
from ..device.threads import Threads, threads_of_queues
from .device_queue import DeviceQueue
from .stream_queue import Point, StreamQueue, follow_callers_streams

# A process that ends waits so long for what still runs.
CLOSE_SECONDS = 5.0

LARGE_BYTES, LARGE_OPERATIONS = 1 << 20, 10_000_000
"""Work that takes some 100 us of a CPU core, which is more than a queue's thread takes to begin a step."""


class CallState(Protocol):
    """The parts of a `call.QueuedCall` that its steps read."""

    values: list[Any]
    points: dict[int, Point]
    sizes: Mapping[str, int]


class Queues:
    """A queue for each device of a machine, however many entries of the manifest stand for it.

    Copies from and to GPUs have queues of their own, one for each two devices and direction.

    Parameters
    ----------
    devices, scopes
        Devices and memory scopes by manifest index; the last is the host.
    constants : object
        As functions take them.
    load : callable
        Makes a virtual machine of TVM's, as each queue's thread has its own.
    """

    def __init__(
        self,
        metadata: Metadata,
        devices: Sequence[runtime.Device],
        scopes: Sequence[str],
        constants: Any,
        load: Callable[[], runtime.Module],
        are_threads_stock: bool = False,
    ) -> None:
        self._metadata, self._devices, self._scopes = metadata, devices, scopes
        self._constants, self._load = constants, load
        keys = [(device.dlpack_device_type(), device.index) for device in devices]
        cores: dict[tuple[int, int], int] = {}
        nodes: dict[tuple[int, int], int] = {}
        for key, spec in zip(keys, metadata.devices, strict=False):
            if key[0] == CPU:
                cores[key] = max(cores.get(key, 0), spec.num_cores)
                if spec.numa_node is not None:
                    nodes[key] = spec.numa_node
        if not cores:
            cores[keys[-1]] = 0
        threads = dict(zip(cores, threads_of_queues(list(cores.values())), strict=True))
        cpus = cpus_of_queues(threads, nodes)
        names: dict[tuple[int, int], list[str]] = {}
        for key, name in zip(keys, device_names(metadata.devices), strict=False):
            names.setdefault(key, []).append(name)
        names.setdefault(keys[-1], ["host"])
        queues: dict[tuple[int, int], DeviceQueue] = {}
        for key, device in zip(keys, devices, strict=True):
            if key not in queues:
                name = f"queue of {', '.join(names[key])}"
                own = backend_of_device(device).queue(device, name)
                if own is None:
                    pool = Threads(threads.get(key, 1), are_threads_stock)
                    own = DeviceQueue(name, cpus.get(key, ()), pool, nodes.get(key))
                queues[key] = own
        self._copies = _copy_queues(keys)
        self.by_entry = [queues[key] for key in keys]
        self.all = list(queues.values())
        self._machines: dict[DeviceQueue, tuple[runtime.Module, dict[str, Any]]] = {}

        _open.add(self)

    @property
    def host(self) -> DeviceQueue:
        """The queue of the host's device."""
        return self.by_entry[-1]

    def close(self, until: float = 0) -> None:
        """Have the threads end after what runs now, and what has not begun fail; wait for that, by the clock's time."""
        for queue in (*self.all, *self._copying()):
            queue.close(until - time.monotonic())

    def queue_of(self, step: Step) -> DeviceQueue | None:
        """The queue that runs a step; None for one that only gives memory another device's name.

        Not to be called by two threads at once.
        """
        own, plain = self.by_entry[step.device], self._scopes[step.device] == "global"
        if not step.is_transfer or not plain:
            return own
        source, target = self._devices[step.source], self._devices[step.device]
        if same_device(source, target) or (is_host(source) and is_host(target)):
            return None
        return next(filter(None, (copies.between(source, target) for copies in self._copies)), own)

    def is_issued(self, step: Step, queue: DeviceQueue | None) -> bool:
        """Return whether a step is only issued when it has run: one of a single GPU, or a copy from or to it."""
        return (
            isinstance(queue, StreamQueue)
            and not step.other_devices
            and (not step.is_transfer or queue not in self.all)
        )

    def follow_caller(self) -> None:
        """Have work that is issued from now on come after the work on streams that this thread has chosen itself."""
        follow_callers_streams(queue for queue in (*self.all, *self._copying()) if isinstance(queue, StreamQueue))

    def run(self, step: Step, queue: DeviceQueue | None, leaves: bool, call: CallState) -> tuple[Any, Point | None]:
        """Run a step in this thread, which is that of its queue.

        Parameters
        ----------
        queue : DeviceQueue or None
            As `queue_of` says.
        leaves : bool
            Whether what it makes is a result of the call.

        Returns
        -------
        tuple
            Results of the step; and the point at which they are made, where they are only issued.
        """
        reads = [call.values[number] for number in step.reads]

        def work() -> Any:
            if step.is_transfer:
                return self._moved(reads[0], step, queue, leaves)
            return self._computed(step, reads, call.sizes)

        if isinstance(queue, StreamQueue) and self.is_issued(step, queue):
            return queue.issue(work, [call.points[number] for number in step.reads if number in call.points])
        return work(), None

    def _moved(self, value: Any, step: Step, queue: DeviceQueue | None, leaves: bool) -> Any:
        device = self._devices[step.device]
        if queue is None:
            return map_tensors(value, lambda tensor: alias(tensor, device))
        for copies in self._copies:
            if isinstance(queue, StreamQueue) and queue in copies.queues:
                return copies.copy(value, device, queue.stream, leaves)
        running.machine = self._devices, self._scopes
        return _to_device(value, step.device, 0)

    def _computed(self, step: Step, reads: list[Any], sizes: Mapping[str, int]) -> Any:
        if step.sizes:
            reads.append(tvm_ffi.Shape([sizes[name] for name in step.sizes]))
        if step.takes_constants:
            reads.append(self._constants)
        running.machine = self._devices, self._scopes
        function = self._function(self.by_entry[step.device], step.function)
        if not all(is_host(self._devices[entry]) for entry in step.devices):
            function = partial(self._on_streams, step, function)
        mine = {self.by_entry[entry] for entry in step.devices}
        with ExitStack() as held:
            for queue in self.all:
                if queue in mine:
                    held.enter_context(queue.lock)
            return function(*reads)

    def _on_streams(self, step: Step, function: Callable[..., Any], *reads: Any) -> Any:
        """Have kernels run on the streams of their devices' queues; those of several devices end."""
        with ExitStack() as held:
            for entry in step.devices:
                device, queue = self._devices[entry], self.by_entry[entry]
                if isinstance(queue, StreamQueue):
                    held.enter_context(tvm_ffi.use_raw_stream(device, queue.stream.handle))
                    if step.other_devices:
                        held.callback(queue.stream.synchronize)
                elif not is_host(device):
                    held.callback(device.sync)
            return function(*reads)

    def explain(self, what: str, error: BaseException) -> HeteroError:
        """`error` in terms of the model."""
        if isinstance(error, HeteroError) and not isinstance(error, CudaError):
            return error
        return explain_failure(what, error, self._metadata)

    def _copying(self) -> list[StreamQueue]:
        return [queue for copies in self._copies for queue in copies.queues]

    def _function(self, queue: DeviceQueue, name: str) -> Any:
        found = self._machines.get(queue)
        if found is None:
            found = self._machines[queue] = (self._load(), {})
        module, functions = found
        function = functions.get(name)
        if function is None:
            function = functions[name] = module[name]
        return function


def _copy_queues(keys: Sequence[tuple[int, int]]) -> list[Any]:
    """Queues for copies from and to devices, by (device type, index); an object for each type that has some."""
    found = []
    for kind in dict.fromkeys(kind for kind, _ in keys):
        copies = backend_of_type(kind).copy_queues([index for other, index in keys if other == kind])
        if copies is not None:
            found.append(copies)
    return found


def overlapping(metadata: Metadata) -> set[str]:
    """The functions whose plain calls go through queues.

    Those that gain by it, with large work to overlap on devices that share no cores; and all where a device is the CPUs
    of a NUMA node: queues have threads there, and the calling thread stays where it is.
    """
    if any(spec.numa_node is not None for spec in metadata.devices):
        return set(metadata.signatures)
    cores = {
        (s.device_type, s.vdevice_id): s.num_cores or num_cores() for s in metadata.devices if s.device_type == CPU
    }
    if sum(cores.values()) > num_cores():
        return set()
    devices = {index: (s.device_type, s.vdevice_id) for index, s in enumerate(metadata.devices)}
    is_large = partial(_is_large, metadata, {region.name: region for region in metadata.regions})
    return {schedule.function for schedule in metadata.schedules if schedule.overlaps(devices, is_large)}


def _is_large(metadata: Metadata, regions: Mapping[str, RegionSpec], step: Step) -> bool:
    """Return whether a step takes longer than a queue's thread takes to begin it; True where its work is not known."""
    nbytes = operations = 0
    for name in step.calls:
        region = regions.get(name)
        kernels = [name] if region is None else [one.kernel for one in region.commands if isinstance(one, Dispatch)]
        for kernel in kernels:
            spec = metadata.dispatches.get(kernel)
            if spec is None or not spec.bytes:
                return True
            nbytes, operations = nbytes + spec.bytes, operations + spec.operations
    return nbytes >= LARGE_BYTES or operations >= LARGE_OPERATIONS


def cpus_of_queues(
    threads: Mapping[tuple[int, int], int], nodes: Mapping[tuple[int, int], int]
) -> dict[tuple[int, int], list[int]]:
    """The CPUs that queues are kept to, by how many threads each CPU device has, and by the NUMA nodes of some.

    Beside a node, which has all its CPUs, the system chooses for devices that are not bound to one.
    """
    if nodes:
        return {key: [cpu for core in cpus_of_nodes()[node] for cpu in core] for key, node in nodes.items()}
    return own_cpus(threads)


def own_cpus(threads: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], list[int]]:
    """The CPUs that are each CPU device's own, by how many threads it has; nobody's where there are not enough."""
    cores = cpus_of_cores()
    # With a quota, which of the cores one may use at a time is not known.
    if len(threads) < 2 or sum(threads.values()) > len(cores) or len(cores) > num_cores():
        return {}
    found, begin = {}, 0
    for key, count in threads.items():
        found[key] = [cpu for core in cores[begin : begin + count] for cpu in core]
        begin += count
    return found


_open: weakref.WeakSet[Queues] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before the interpreter takes itself apart: a thread that comes back from a kernel then finds nothing left."""
    until = time.monotonic() + CLOSE_SECONDS
    queues = list(_open)
    for each in queues:
        each.close()
    for each in queues:
        each.close(until)
    hold_all(until)


_to_device = tvm_ffi.get_global_func("relax_hetero.to_device")
