"""The queues of a machine, and how its functions go through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tvm_ffi
from tvm import runtime

from ..cpu_cores import cpus_of_cores, num_cores
from ..errors import HeteroError
from .builtins import running
from .failure import explain_failure
from .metadata import CPU, Metadata
from .queue import DeviceQueue
from .schedule import Results, Schedule, Step
from .signature import FunctionSignature
from .tensors import alias, is_host
from .threads import threads_of_queues

if TYPE_CHECKING:
    from .calls_in_flight import Call

# A machine that is dropped, and a process that ends, wait so long for what still runs.
CLOSE_SECONDS = 5.0


class Queues:
    """A queue for each device of a machine, however many entries of the manifest stand for it.

    Parameters
    ----------
    metadata : Metadata
    devices, scopes : sequence
        By manifest index; the last is the host.
    constants : tvm_ffi.Array
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
    ) -> None:
        self._metadata, self._devices, self._scopes = metadata, devices, scopes
        self._constants, self._load = constants, load
        keys = [(device.dlpack_device_type(), device.index) for device in devices]
        cores: dict[tuple[int, int], int] = {}
        for key, spec in zip(keys, metadata.devices, strict=False):
            if key[0] == CPU:
                cores[key] = max(cores.get(key, 0), spec.num_cores)
        if not cores:
            cores[keys[-1]] = 0
        threads = dict(zip(cores, threads_of_queues(list(cores.values())), strict=True))
        cpus = own_cpus(threads)
        queues: dict[tuple[int, int], DeviceQueue] = {}
        for key, device in zip(keys, devices, strict=True):
            if key not in queues:
                queues[key] = DeviceQueue(f"queue of {device}", cpus.get(key, ()), threads.get(key, 1))
        self.by_entry = [queues[key] for key in keys]
        self.all = list(queues.values())
        self._machines: dict[DeviceQueue, tuple[runtime.Module, dict[str, Any]]] = {}

    def close(self) -> None:
        """End the threads; what has not begun never will."""
        for queue in self.all:
            queue.close(CLOSE_SECONDS)

    def is_alias(self, step: Step) -> bool:
        """Whether a transfer only gives memory another device's name."""
        return (
            step.is_transfer
            and all(is_host(self._devices[entry]) for entry in (step.device, step.source))
            and self._scopes[step.device] == "global"
        )

    def run(self, step: Step, call: Call) -> Any:
        """Run a step in this thread, which is its queue's; what the step makes."""
        reads = [call.values[number] for number in step.reads]
        device = self._devices[step.device]
        if step.is_transfer:
            if self.is_alias(step):
                return _aliases(reads[0], device)
            running.machine = self._devices, self._scopes
            return _to_device(reads[0], step.device, 0)
        if step.sizes:
            reads.append(tvm_ffi.Shape([call.sizes[name] for name in step.sizes]))
        if step.takes_constants:
            reads.append(self._constants)
        running.machine = self._devices, self._scopes
        locks = [queue.lock for queue in self.all if queue in {self.by_entry[entry] for entry in step.devices}]
        for lock in locks:
            lock.acquire()
        try:
            made = self._function(self.by_entry[step.device], step.function)(*reads)
            for entry in step.devices:
                if not is_host(self._devices[entry]):
                    self._devices[entry].sync()
            return made
        finally:
            for lock in locks:
                lock.release()

    def explain(self, what: str, error: Exception) -> HeteroError:
        """`error` in terms of the model."""
        return error if isinstance(error, HeteroError) else explain_failure(what, error, self._metadata)

    def _function(self, queue: DeviceQueue, name: str) -> Any:
        found = self._machines.get(queue)
        if found is None:
            found = self._machines[queue] = (self._load(), {})
        module, functions = found
        function = functions.get(name)
        if function is None:
            function = functions[name] = module[name]
        return function


class Plan:
    """A schedule with the queues of a machine.

    Parameters
    ----------
    schedule : Schedule
    queues : Queues

    Attributes
    ----------
    steps : tuple of Step
    queues : list of DeviceQueue or None
        Of each step; None for one that runs where what it reads was made.
    values : int
        How many there are.
    missing : list of int
        For each step how many values it reads that are not there at the beginning.
    readers : list of int
        How many steps read each value; the caller counts as one.
    read_by : list of list of int
        The steps that read each value.
    """

    def __init__(self, schedule: Schedule, queues: Queues) -> None:
        self.steps = schedule.steps
        self.values = schedule.values
        self.queues = [None if queues.is_alias(step) else queues.by_entry[step.device] for step in schedule.steps]
        self._owner, self._results, self._name = queues, schedule.results, schedule.function
        self.missing = [sum(number >= schedule.inputs for number in step.reads) for step in self.steps]
        self.read_by: list[list[int]] = [[] for _ in range(schedule.values)]
        for index, step in enumerate(self.steps):
            for number in step.reads:
                self.read_by[number].append(index)
        self.readers = [len(found) for found in self.read_by]
        for number in _leaves(self._results):
            self.readers[number] += 1

    def execute(self, index: int, call: Call) -> Sequence[Any]:
        """Run a step of a call; what it makes, in order."""
        step = self.steps[index]
        made = self._owner.run(step, call)
        return made if len(step.makes) != 1 else (made,)

    def explain(self, index: int, error: Exception) -> HeteroError:
        """The error that a failed step means for the caller."""
        step = self.steps[index]
        part = "a transfer" if step.is_transfer else f"step {step.function!r}"
        what = f"function {self._name!r}" + ("" if step.function == self._name else f", {part}")
        return self._owner.explain(what, error)

    def result(self, values: Sequence[Any]) -> Any:
        """What the function returns, of the values made."""
        return _gather(self._results, values)


def whole(signature: FunctionSignature, entries: Sequence[int]) -> Schedule:
    """The schedule of a function that has none: one step, on all devices."""
    inputs = len(signature.inputs)
    first, *also = entries or (-1,)
    reads, takes = tuple(range(inputs)), signature.takes_constants
    step = Step(first, reads, (inputs,), signature.name, also=tuple(also), takes_constants=takes)
    return Schedule(signature.name, inputs, inputs + 1, (step,), inputs)


def overlapping(metadata: Metadata) -> set[str]:
    """The functions whose plain calls gain by queues: with work to overlap, on devices that share no cores."""
    cores = {
        (s.device_type, s.vdevice_id): s.num_cores or num_cores() for s in metadata.devices if s.device_type == CPU
    }
    if sum(cores.values()) > num_cores():
        return set()
    return {schedule.function for schedule in metadata.schedules if schedule.overlaps()}


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


def _leaves(results: Results) -> list[int]:
    return [results] if isinstance(results, int) else [number for part in results for number in _leaves(part)]


def _gather(results: Results, values: Sequence[Any]) -> Any:
    return values[results] if isinstance(results, int) else tuple(_gather(part, values) for part in results)


def _aliases(value: Any, device: runtime.Device) -> Any:
    if isinstance(value, tvm_ffi.core.Tensor):
        return alias(value, device)
    return tvm_ffi.convert(tuple(_aliases(part, device) for part in value))


_to_device = tvm_ffi.get_global_func("relax_hetero.to_device")
