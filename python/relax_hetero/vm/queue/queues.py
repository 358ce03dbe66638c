"""The queues of a machine, one for each device, and the execution of steps in them."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import tvm_ffi
from tvm import runtime

from ...artifact.commands import Dispatch, RegionSpec
from ...artifact.messages import explain_failure
from ...artifact.metadata import CPU, Metadata, body_symbol, device_names
from ...artifact.schedule import Step
from ...errors import HeteroError
from ...target.backend import backend_of_device, backend_of_type
from ...target.cpu_cores import cpus_of_cores, cpus_of_nodes, num_cores
from ..device.builtins import current_machine
from ..device.cuda_driver import CudaError
from ..device.device_api import cause_of
from ..device.machine_lock import hold_all
from ..device.mailboxes import Mailboxes
from ..device.peer_memory import run_over_peers
from ..device.tensors import alias, is_host, map_tensors, same_device
from ..device.threads import SHARED_THREADS, Threads, threads_of_queues
from .device_queue import DeviceQueue
from .stream_queue import Point, StreamQueue, follow_callers_streams

CLOSE_SECONDS = 5.0  # maximum wait for running work when the process ends

LARGE_BYTES, LARGE_OPERATIONS = 1 << 20, 10_000_000
"""Work of about 100 us on a CPU core, which is more than a queue's thread takes to begin a step."""


class CallState(Protocol):
    """The parts of a `call.QueuedCall` that its steps read."""

    values: list[Any]
    points: dict[int, Point]
    sizes: Mapping[str, int]


class Queues:
    """A queue for each physical device of a machine; several manifest entries may share one.

    Copies from and to GPUs have queues of their own, one for each ordered pair of devices.
    """

    def __init__(
        self,
        metadata: Metadata,
        # devices, scopes: devices and memory scopes by manifest index; the last is the host.
        devices: Sequence[runtime.Device],
        scopes: Sequence[str],
        constants: Any,  # constants, as functions take them
        # Function that makes a TVM virtual machine; each queue's thread has its own.
        load: Callable[[], runtime.Module],
        threads: Threads = SHARED_THREADS,  # threads of the machine, which its CPU devices share
        mailboxes: Mailboxes | None = None,  # mailboxes of the machine
    ) -> None:
        self._mailboxes = mailboxes
        self._metadata, self._devices, self._scopes = metadata, devices, scopes
        self._constants, self._load = constants, load
        # Keys are pairs (DLPack device type, index).
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
        widths = dict(zip(cores, threads_of_queues(list(cores.values()), threads), strict=True))
        cpus = shares_of(threads.cpus, list(widths)) if threads.cpus else cpus_of_queues(widths, nodes)
        names: dict[tuple[int, int], list[str]] = {}
        for key, name in zip(keys, device_names(metadata.devices), strict=False):
            names.setdefault(key, []).append(name)
        names.setdefault(keys[-1], ["host"])
        queues: dict[tuple[int, int], DeviceQueue] = {}
        for key, device in zip(keys, devices, strict=True):
            if key not in queues:
                name = f"queue of {', '.join(names[key])}"
                queue = backend_of_device(device).queue(device, name)
                if queue is None:
                    pool = replace(threads, width=widths.get(key, 1))
                    queue = DeviceQueue(name, cpus.get(key, ()), pool, nodes.get(key))
                queues[key] = queue
        self._copy_queues = _copy_queues(keys)
        self.by_entry = [queues[key] for key in keys]  # queues by manifest index; the last is the host's
        self.all = list(queues.values())  # queues by physical device, without those of copies
        # TVM's virtual machine of each queue's thread, with its functions by name.
        self._modules: dict[DeviceQueue, tuple[runtime.Module, dict[str, Any]]] = {}
        _open_queues.add(self)

    @property
    def host(self) -> DeviceQueue:
        """The queue of the host's device."""
        return self.by_entry[-1]

    def close(self, until: float = 0) -> None:
        """End the threads after their current work, fail other work, and wait until `until` (monotonic) at most."""
        for queue in (*self.all, *self._copying()):
            queue.close(until - time.monotonic())

    def queue_of(self, step: Step) -> DeviceQueue | None:
        """The queue that runs a step; None for a transfer that makes an alias instead of a copy. Not thread-safe."""
        queue, is_global = self.by_entry[step.device], self._scopes[step.device] == "global"
        if not step.is_transfer or not is_global:
            return queue
        source, target = self._devices[step.source], self._devices[step.device]
        if same_device(source, target) or (is_host(source) and is_host(target)):
            return None
        return next(filter(None, (copy_queues.between(source, target) for copy_queues in self._copy_queues)), queue)

    def is_issued(self, step: Step, queue: DeviceQueue | None) -> bool:
        """Return whether `run` only issues the step: if it uses a single GPU, or is a copy from or to a GPU."""
        return (
            isinstance(queue, StreamQueue)
            and not step.other_devices
            and (not step.is_transfer or queue not in self.all)
        )

    def follow_caller(self) -> None:
        """Order work that is issued from now on after the caller's work on this thread's current streams."""
        follow_callers_streams(queue for queue in (*self.all, *self._copying()) if isinstance(queue, StreamQueue))

    def run(self, step: Step, queue: DeviceQueue | None, is_result: bool, call: CallState) -> tuple[Any, Point | None]:
        """Run a step in this thread, which is its queue's.

        `queue`: queue of the step (`queue_of`). `is_result`: whether the call returns a value that the step makes.
        Returns the results of the step; and the stream point that completes them, if they are only issued.
        """
        reads = [call.values[number] for number in step.reads]

        def work() -> Any:
            if step.is_transfer:
                return self._transfer(reads[0], step, queue, is_result)
            return self._compute(step, reads, call.sizes)

        if isinstance(queue, StreamQueue) and self.is_issued(step, queue):
            return queue.issue(work, [call.points[number] for number in step.reads if number in call.points])
        return work(), None

    def _transfer(self, value: Any, step: Step, queue: DeviceQueue | None, is_result: bool) -> Any:
        device = self._devices[step.device]
        if queue is None:
            return map_tensors(value, lambda tensor: alias(tensor, device))
        for copy_queues in self._copy_queues:
            if isinstance(queue, StreamQueue) and queue in copy_queues.queues:
                return copy_queues.copy(value, device, queue.stream, is_result)
        current_machine.devices_and_scopes = self._devices, self._scopes
        return _to_device(value, step.device, 0)

    def _compute(self, step: Step, reads: list[Any], sizes: Mapping[str, int]) -> Any:
        if step.sizes:
            reads.append(tvm_ffi.Shape([sizes[name] for name in step.sizes]))
        if step.takes_constants:
            reads.append(self._constants)
        current_machine.devices_and_scopes = self._devices, self._scopes
        queue = self.by_entry[step.device]
        function = self._function(queue, step.function)
        if not step.other_devices and is_host(self._devices[step.device]):
            with queue.lock:
                return function(*reads)
        if not all(is_host(self._devices[entry]) for entry in step.devices):
            function = partial(self._on_streams, step, function)
        queues_of_step = {self.by_entry[entry] for entry in step.devices}
        with ExitStack() as stack:
            for queue in self.all:  # one order for all steps, so that they cannot deadlock
                if queue in queues_of_step:
                    stack.enter_context(queue.lock)
            return run_over_peers(function, reads, self._devices)

    def _on_streams(self, step: Step, function: Callable[..., Any], *reads: Any) -> Any:
        """Run kernels on the streams of their devices' queues; waits for them if the step has several devices."""
        with ExitStack() as stack:
            for entry in step.devices:
                device, queue = self._devices[entry], self.by_entry[entry]
                if isinstance(queue, StreamQueue):
                    stack.enter_context(tvm_ffi.use_raw_stream(device, queue.stream.handle))
                    if step.other_devices:
                        stack.callback(queue.stream.synchronize)
                elif not is_host(device):
                    stack.callback(device.sync)
            try:
                return function(*reads)
            except Exception:
                if self._mailboxes is not None:
                    self._mailboxes.reset()
                raise

    def explain(self, what: str, error: BaseException) -> HeteroError:
        """The error in terms of the model."""
        error = cause_of(error)
        if isinstance(error, HeteroError) and not isinstance(error, CudaError):
            return error
        return explain_failure(what, error, self._metadata)

    def _copying(self) -> list[DeviceQueue]:
        return [queue for copy_queues in self._copy_queues for queue in copy_queues.queues]

    def _function(self, queue: DeviceQueue, name: str) -> Any:
        if queue not in self._modules:
            self._modules[queue] = self._load(), {}
        module, functions = self._modules[queue]
        function = functions.get(name)
        if function is None:
            function = functions[name] = module[body_symbol(name) if name in self._metadata.signatures else name]
        return function


def _copy_queues(keys: Sequence[tuple[int, int]]) -> list[Any]:
    """Copy queues of devices (device type, index): one object for each device type whose back end has them."""
    indices: dict[int, list[int]] = {}
    for device_type, index in keys:
        indices.setdefault(device_type, []).append(index)
    copy_queues = (backend_of_type(device_type).copy_queues(of_type) for device_type, of_type in indices.items())
    return [queues for queues in copy_queues if queues is not None]


def functions_to_queue(metadata: Metadata, is_bound: bool = False) -> set[str]:
    """The functions whose plain calls (not only submitted ones) go through queues.

    These are functions with large work to overlap on devices that share no cores. Work of several GPUs overlaps anyway,
    as launches do not wait. If a device is bound to a NUMA node, or the machine to cores (`is_bound`), all functions go
    through queues, whose threads are there: a plain call would run where its caller runs.
    """
    if is_bound or any(spec.numa_node is not None for spec in metadata.devices):
        return set(metadata.signatures)
    cores = {
        (spec.device_type, spec.vdevice_id): spec.num_cores or num_cores()
        for spec in metadata.devices
        if spec.device_type == CPU
    }
    if sum(cores.values()) > num_cores():
        return set()
    devices = {index: (spec.device_type, spec.vdevice_id) for index, spec in enumerate(metadata.devices)}
    is_large = partial(_is_large, metadata, {region.name: region for region in metadata.regions})

    def occupies_host(step: Step) -> bool:
        return not all(backend_of_type(devices.get(device, (CPU, 0))[0]).is_gpu for device in step.devices)

    return {each.function for each in metadata.schedules if each.overlaps(devices, is_large, occupies_host)}


def _is_large(metadata: Metadata, regions: Mapping[str, RegionSpec], step: Step) -> bool:
    """Return whether a step takes longer than a queue's thread takes to begin it; True if its work is unknown."""
    nbytes = operations = 0
    for name in step.calls:
        region = regions.get(name)
        kernels = [name] if region is None else [c.kernel for c in region.commands if isinstance(c, Dispatch)]
        for kernel in kernels:
            spec = metadata.dispatches.get(kernel)
            if spec is None or not spec.bytes:
                return True
            nbytes, operations = nbytes + spec.bytes, operations + spec.operations
    return nbytes >= LARGE_BYTES or operations >= LARGE_OPERATIONS


def cpus_of_queues(
    threads: Mapping[tuple[int, int], int], nodes: Mapping[tuple[int, int], int]
) -> dict[tuple[int, int], list[int]]:
    """The CPUs that queues are bound to, from the number of threads of each CPU device and the NUMA nodes of some.

    A device with a node gets all CPUs of the node; the operating system chooses for devices without one.
    """
    if nodes:
        return {key: [cpu for core in cpus_of_nodes()[node] for cpu in core] for key, node in nodes.items()}
    return own_cpus(threads)


def shares_of(cpus: Sequence[int], keys: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Sequence[int]]:
    """The CPUs of a machine, distributed over its CPU devices; each has all if there are fewer CPUs than devices."""
    if len(cpus) < len(keys):
        return dict.fromkeys(keys, cpus)
    bounds = [len(cpus) * number // len(keys) for number in range(len(keys) + 1)]
    return {key: cpus[begin:end] for key, begin, end in zip(keys, bounds, bounds[1:], strict=False)}


def own_cpus(threads: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], list[int]]:
    """Disjoint CPUs for CPU devices, by number of threads; empty if there are too few cores."""
    cores = cpus_of_cores()
    # With a CPU quota, the usable cores at any time are unknown.
    if len(threads) < 2 or sum(threads.values()) > len(cores) or len(cores) > num_cores():
        return {}
    cpus, begin = {}, 0
    for key, count in threads.items():
        cpus[key] = [cpu for core in cores[begin : begin + count] for cpu in core]
        begin += count
    return cpus


_open_queues: weakref.WeakSet[Queues] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all queues before interpreter teardown, when a thread returning from a kernel would crash."""
    until = time.monotonic() + CLOSE_SECONDS
    open_queues = list(_open_queues)
    for queues in open_queues:
        queues.close()
    for queues in open_queues:
        queues.close(until)
    hold_all(until)


_to_device = tvm_ffi.get_global_func("relax_hetero.to_device")
