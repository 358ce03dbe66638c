"""Costs of ops and transfers on each device: the estimates that ``placement="auto"`` minimizes.

Rough estimates suffice: a plan depends on a GPU multiplying a hundred times faster than the CPU and on ten microseconds
per transfer, not on the third digit. All numbers can be replaced. Figures of CPUs and GPUs of this machine are measured
(`measure_devices`), those of other devices come from tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

import tvm
from tvm.target import Target, codegen

from ...errors import PlacementError, VDeviceError
from ...target.backend import backend_of
from ...target.cpu_cores import num_cores
from ...target.gpu_target import NVLINK_BYTES_PER_SECOND
from ...target.hosts import NETWORK_BYTES_PER_SECOND, NETWORK_LATENCY_SECONDS, host_of, hosts_of
from ...target.native_target import with_hardware
from ...target.product_rates import QUANTIZED, product_rate
from ...target.vdevice import is_cpu, physical
from .measure_devices import Figures, are_present, figures_of
from .work_graph import Work

Objective: TypeAlias = Literal["latency", "throughput"]
"""Minimize the time of one call, or the time between calls with several in flight."""

# Index of the implicit host CPU if the vdevices lack a CPU.
IMPLICIT_HOST = -1

# Fraction of peak arithmetic and bandwidth that generated code attains.
_CPU_FLOPS_EFFICIENCY = 0.8
_GPU_FLOPS_EFFICIENCY = 0.6
_BANDWIDTH_EFFICIENCY = 0.7
# Fraction of the rate of large products that products in models attain.
_LAYER_EFFICIENCY = 0.7

_CLOCK_HZ = 3e9  # a server core under vector load
_FLOPS_PER_LANE = 4  # two units, each a multiply and an add per cycle
_CORE_BYTES_PER_SECOND = 40e9  # of one core
_SOCKET_BYTES_PER_SECOND = 200e9  # of all cores together

# LLVM feature -> float32 lanes, widest first.
_LANES = {"avx512f": 16, "avx": 8, "sse2": 4, "neon": 4, "v": 4}

_TWO_BYTE_TYPES = ("float16", "bfloat16")
_ABSENT_TYPE_RATE = 1.0  # operations per second of a type that the device lacks: another device computes it

_GPU_LAUNCH_SECONDS = 2.5e-6  # seconds per kernel of a graph
_CPU_LAUNCH_SECONDS = 0.5e-6

# Delay until a CPU queue's worker continues with a result of another queue: measured 45 us between calls in flight,
# 90 us within a call.
_QUEUE_HANDOVER_SECONDS = 60e-6


def check_objective(objective: str) -> None:
    """Raise PlacementError for an invalid objective."""
    if objective not in get_args(Objective):
        raise PlacementError(f"objective is {objective!r}; expected {' or '.join(map(repr, get_args(Objective)))}")


@dataclass(frozen=True)
class DeviceCost:
    """Speed of a device.

    Attributes
    ----------
    flops : float
        float32 operations per second.
    bandwidth : float
        Bytes per second to and from its memory.
    launch : float
        Seconds per kernel in addition to its work.
    products : mapping of str to float
        Element type of operands, or `QUANTIZED` weights, -> operations per second of products of many rows; `flops`
        for other types.
    """

    flops: float
    bandwidth: float
    launch: float
    products: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LinkCost:
    """Speed of transfers between two devices: seconds = latency + bytes / bandwidth.

    Attributes
    ----------
    bandwidth : float
        Bytes per second.
    latency : float
        Seconds per transfer.
    mailbox : float or None
        Seconds, instead of `latency`, of small values that cross where work alternates (`FormMailboxes`); None if
        these are transfers, too.
    """

    bandwidth: float
    latency: float
    mailbox: float | None = None


@dataclass(frozen=True)
class CostModel:
    """Seconds per op and per transfer, and the devices that work concurrently.

    An op takes ``launch + max(flops / device.flops, bytes / device.bandwidth)``, without ``launch`` if it is fused into
    the kernel of its operand. Inputs start on the host and outputs are read there. Weights are on their device before
    the call.

    Attributes
    ----------
    devices : sequence of DeviceCost
        One per vdevice, in order.
    links : mapping
        (from, to) -> LinkCost, indices of vdevices; -1 is the host CPU if the list lacks a CPU.
    host : int
        Index of the host, or -1.
    symbolic_extent : int
        Assumed size of symbolic dimensions.
    queues : sequence of int
        The queue of each device, counted from 0; devices of one queue do not overlap. Empty: each has its own.
    figures : str
        Source of the costs: "tables", or a description of the measurement.

    Examples
    --------
    ``dataclasses.replace(CostModel.for_vdevices(vdevices), symbolic_extent=512)`` changes one number.
    """

    devices: Sequence[DeviceCost]
    links: Mapping[tuple[int, int], LinkCost] = field(default_factory=dict)
    host: int = IMPLICIT_HOST
    symbolic_extent: int = 64
    queues: Sequence[int] = ()
    figures: str = "tables"

    @classmethod
    def for_vdevices(cls, vdevices: Sequence[tvm.relax.VDevice], objective: Objective = "latency") -> CostModel:
        """Default costs by target kind and features (vector width and cores of a CPU, compute capability of a GPU).

        A CPU device has the ``num-cores`` of its target, by default one. CPU devices that together have more cores than
        this process may use share them: in one call they take turns with all their cores; with several calls in flight
        they work concurrently with at most an equal share each. (A device with more cores belongs to another machine
        and keeps them, as do devices on hosts.) Vdevices of one physical device always take turns.

        Parameters
        ----------
        vdevices : sequence of tvm.relax.VDevice
            Devices in the order of the module's list.
        objective : Objective
            See `auto_placement`.
        """
        vdevices = list(map(with_hardware, vdevices))
        declared = _cores_by_device(vdevices)
        cores, take_turns = declared, False
        if not hosts_of(vdevices) and sum(declared.values()) > num_cores() >= max(declared.values()):
            take_turns = objective == "latency"
            share = max(1, num_cores() // len(declared))
            cores = declared if take_turns else {device: min(count, share) for device, count in declared.items()}
        queue_numbers: dict[tuple[object, ...], int] = {}
        queues = [
            queue_numbers.setdefault(
                (host_of(vdevice), "CPU") if take_turns and is_cpu(vdevice) else _physical_device(vdevice),
                len(queue_numbers),
            )
            for vdevice in vdevices
        ]
        busy: dict[str | None, int] = {}  # cores of a machine that work at the same time
        for (machine, *_), count in cores.items():
            busy[machine] = max(count, busy.get(machine, 0)) if take_turns else count + busy.get(machine, 0)
        devices = [
            _default_cpu(vdevice.target, cores[_physical_device(vdevice)], busy[host_of(vdevice)])
            if is_cpu(vdevice)
            else _default_gpu(vdevice.target)
            for vdevice in vdevices
        ]
        # All CPU devices read the caller's arrays in place, but costs have one host: the fastest, the first of equals.
        cpus = [
            index
            for index, vdevice in enumerate(vdevices)
            if is_cpu(vdevice) and host_of(vdevice) == host_of(vdevices[0])
        ]
        host = max(cpus, key=lambda index: devices[index].flops, default=IMPLICIT_HOST)
        ends = {**dict(enumerate(vdevices)), **({IMPLICIT_HOST: None} if host == IMPLICIT_HOST else {})}
        links = {(a, b): _default_link(ends[a], ends[b], take_turns) for a in ends for b in ends if a != b}
        return cls(devices, links, host, queues=queues)

    @classmethod
    def measured(
        cls, vdevices: Sequence[tvm.relax.VDevice], objective: Objective = "latency", may_measure: bool = True
    ) -> CostModel:
        """Costs of `for_vdevices`, with measured figures for a CPU and GPU or several GPUs of this machine.

        The measurement takes some seconds, once per machine (`measure_devices`).

        Parameters
        ----------
        vdevices : sequence of tvm.relax.VDevice
            Devices in the order of the module's list.
        objective : Objective
            See `auto_placement`.
        may_measure : bool
            False to use only figures that were measured before, and else those of `for_vdevices`, which takes no time.
        """
        vdevices = list(map(with_hardware, vdevices))
        model = cls.for_vdevices(vdevices, objective)
        if len(vdevices) < 2 or all(map(is_cpu, vdevices)) or not are_present(vdevices):
            return model
        figures = figures_of(vdevices, "missing" if may_measure else "nothing")
        return model if figures is None else _with_measurements(model, figures)

    def op_seconds(self, work: Work, device: int) -> float:
        """Seconds of one op on a device.

        Parameters
        ----------
        work : Work
            Floating-point operations and bytes of the op.
        device : int
            Index of the vdevice.
        """
        cost = self.devices[device]
        rate = cost.products.get(work.product, cost.flops)
        return (cost.launch if work.is_kernel else 0.0) + max(work.flops / rate, work.bytes / cost.bandwidth)

    def product_seconds(self, flops: float, nbytes: float, dtype: str, device: int) -> float:
        """Seconds of a product on a device, without the launch of its kernel.

        Parameters
        ----------
        flops, nbytes : float
            Operations, and bytes of operands and result.
        dtype : str
            Element type of the operands.
        device : int
            Index of the vdevice.
        """
        return self.op_seconds(Work(flops, nbytes, dtype, is_kernel=False), device)

    def transfer_seconds(self, size: float, source: int, destination: int) -> float:
        """Seconds of a transfer of `size` bytes; 0 within a device.

        Parameters
        ----------
        size : float
            Number of bytes.
        source, destination : int
            Indices of vdevices.
        """
        if source == destination:
            return 0.0
        link = self.links[source, destination]
        return link.latency + size / link.bandwidth

    def check(self, num_devices: int) -> None:
        """Raise VDeviceError if the model does not fit a number of vdevices.

        Parameters
        ----------
        num_devices : int
            Number of vdevices.
        """
        if len(self.devices) != num_devices:
            raise VDeviceError(f"the cost model has {len(self.devices)} devices for {num_devices} vdevices")
        if self.host != IMPLICIT_HOST and not 0 <= self.host < num_devices:
            raise VDeviceError(f"the cost model's host is device {self.host} of {num_devices}")
        endpoints = sorted({*range(num_devices), self.host})
        missing = [(a, b) for a in endpoints for b in endpoints if a != b and (a, b) not in self.links]
        if missing:
            raise VDeviceError(f"the cost model has no link between devices {missing[0]}")
        if self.queues and (len(self.queues) != num_devices or min(self.queues) < 0):
            raise VDeviceError(f"the cost model's queues are {list(self.queues)}; expected a number for each device")


def device_costs(vdevices: Sequence[tvm.relax.VDevice]) -> CostModel:
    """Costs of devices of a mesh, with figures that have been measured, which `PartitionByMesh` decides by."""
    return CostModel.measured(vdevices, "throughput", may_measure=False)


def with_figures_of(model: CostModel, vdevice: tvm.relax.VDevice) -> CostModel:
    """Costs of equal devices, of which only one is in this machine, with the figures that are measured of it."""
    figures = figures_of([vdevice])
    if figures is None:
        return model
    of_all = dict.fromkeys(range(len(model.devices)), figures.devices[0])
    return _with_measurements(model, replace(figures, devices=of_all))


def _with_measurements(model: CostModel, figures: Figures) -> CostModel:
    """Replace costs by measurements; CPU devices that share cores keep their flops."""
    devices = []
    for cost, measured in zip(model.devices, figures.devices.values(), strict=True):
        products = {dtype: rate * _LAYER_EFFICIENCY for dtype, rate in measured.products.items()}
        products = {**dict.fromkeys(_TWO_BYTE_TYPES, _ABSENT_TYPE_RATE), **products}
        if QUANTIZED not in products:  # weights become floats
            products[QUANTIZED] = products["float32"]
        devices.append(replace(cost, bandwidth=measured.bandwidth, launch=measured.launch, products=products))
    links = dict(model.links)
    for (source, target), link in figures.links.items():
        # A whole call on a GPU has two transfers, of its argument and of its result.
        calls = abs(figures.devices[source].call - figures.devices[target].call) / 2
        links[source, target] = LinkCost(link.bandwidth, max(link.crossing, calls), links[source, target].mailbox)
    origin = (
        f"measured while other work took {figures.other_work:.0%} of the CPUs" if figures.other_work else "measured"
    )
    return replace(model, devices=devices, links=links, figures=origin)


def _default_link(source: tvm.relax.VDevice | None, target: tvm.relax.VDevice | None, take_turns: bool) -> LinkCost:
    """Link between two devices, where None is the implicit host."""
    if source is not None and target is not None and host_of(source) != host_of(target):
        return LinkCost(NETWORK_BYTES_PER_SECOND, NETWORK_LATENCY_SECONDS)
    physical_devices = [(None, 1, 0) if end is None else _physical_device(end) for end in (source, target)]
    on_cpu = [end is None or is_cpu(end) for end in (source, target)]
    if physical_devices[0] == physical_devices[1]:
        return LinkCost(float("inf"), 0.5e-6)  # one physical device: no copy
    if all(on_cpu):  # shared memory: queues alias values, calls without queues copy
        return LinkCost(10e9, 1e-6) if take_turns else LinkCost(float("inf"), _QUEUE_HANDOVER_SECONDS)
    if any(on_cpu):
        # PCIe, measured between an H200 and pageable host memory; mailboxes are assumed.
        return LinkCost(20e9, 30e-6, 6e-6)
    return LinkCost(NVLINK_BYTES_PER_SECOND, 30e-6)


def _physical_device(vdevice: tvm.relax.VDevice) -> tuple[str | None, int, int]:
    """Host, device type and index of the physical device."""
    return host_of(vdevice), *physical(vdevice)


def _cores_by_device(vdevices: Sequence[tvm.relax.VDevice]) -> dict[tuple[str | None, int, int], int]:
    """Number of cores that the code of each physical CPU device is compiled for."""
    cores: dict[tuple[str | None, int, int], int] = {}
    for vdevice in filter(is_cpu, vdevices):
        count = int(vdevice.target.attrs.get("num-cores", 1))
        cores[_physical_device(vdevice)] = max(1, count, cores.get(_physical_device(vdevice), 1))
    return cores


def _default_cpu(target: Target, cores: int, socket_cores: int) -> DeviceCost:
    """Cost of a CPU device; `socket_cores` is the number of cores that work at the same time."""
    peak = cores * _CLOCK_HZ * _FLOPS_PER_LANE * _lanes(target)
    bandwidth = min(cores * _CORE_BYTES_PER_SECOND, _SOCKET_BYTES_PER_SECOND * cores / socket_cores)
    flops = peak * _CPU_FLOPS_EFFICIENCY
    products = {kind: flops * product_rate(target, kind) for kind in (*_TWO_BYTE_TYPES, QUANTIZED)}
    return DeviceCost(flops, bandwidth * _BANDWIDTH_EFFICIENCY, _CPU_LAUNCH_SECONDS, products)


def _default_gpu(target: Target) -> DeviceCost:
    peak, bandwidth, tensor_core_speedup = backend_of(target).peaks(target)
    rate = peak * tensor_core_speedup * _GPU_FLOPS_EFFICIENCY
    products = dict.fromkeys((*_TWO_BYTE_TYPES, QUANTIZED), rate)  # kernels dequantize to 16-bit floats
    return DeviceCost(peak * _GPU_FLOPS_EFFICIENCY, bandwidth * _BANDWIDTH_EFFICIENCY, _GPU_LAUNCH_SECONDS, products)


def _lanes(target: Target) -> int:
    """float32 lanes of a vector register; 4 for `c` targets, where only the C compiler knows."""
    if target.kind.name != "llvm":
        return 4
    return next((lanes for feature, lanes in _LANES.items() if codegen.target_has_features(feature, target)), 4)
