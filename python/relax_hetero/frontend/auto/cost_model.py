"""Costs of ops and transfers on each device: the estimates that ``placement="auto"`` minimizes.

Rough on purpose, and every number can be replaced: a plan needs to know that a GPU multiplies matrices a hundred times
faster than this CPU and that reaching it costs ten microseconds, not the third digit of either. Where CPUs and GPUs
that are here are chosen among, their figures are measured (`measure_devices`); of others, tables say them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

import tvm
from tvm.target import Target, codegen

from ...errors import PlacementError, VDeviceError
from ...target.backend import backend_of
from ...target.hosts import NETWORK_BYTES_PER_SECOND, NETWORK_LATENCY_SECONDS, host_of, hosts_of
from ...target.native_target import num_cores, with_hardware
from ...target.vdevice import host_vdevice, is_cpu, physical, vdevice_index
from .measure_devices import Figures, are_present, figures_of
from .work_graph import Work

Objective: TypeAlias = Literal["latency", "throughput"]
"""The least time for one call, or the least time between calls of which several are in flight."""

# The implicit host CPU, where no vdevice of the list is one.
IMPLICIT_HOST = -1

# Share of a device's peak arithmetic and bandwidth that generated code reaches.
_ATTAINED_CPU_FLOPS = 0.8
_ATTAINED_GPU_FLOPS = 0.6
_ATTAINED_BANDWIDTH = 0.7
# The same of what large products reach, for products as models have them.
_ATTAINED_BY_LAYERS = 0.7

_CLOCK = 3e9  # Hz, a server core under vector load
_FLOPS_PER_LANE = 4  # two units, each a multiply and an add per cycle
_CORE_BANDWIDTH = 40e9  # bytes/s one core can draw
_CPU_BANDWIDTH = 200e9  # bytes/s of a socket, however many cores

# LLVM feature -> float32 lanes, widest first.
_LANES = {"avx512f": 16, "avx": 8, "sse2": 4, "neon": 4, "v": 4}

_TWO_BYTES = ("float16", "bfloat16")

_GPU_LAUNCH = 2.5e-6  # seconds per kernel of a graph
_CPU_LAUNCH = 0.5e-6

# Seconds until the worker of one CPU queue goes on with a result of another queue's worker: 45 us were measured between
# calls in flight, 90 us within a call.
_HAND_OVER = 60e-6


def check_objective(objective: str) -> None:
    """Raise a PlacementError if that is not an objective."""
    if objective not in get_args(Objective):
        raise PlacementError(f"objective is {objective!r}; expected {' or '.join(map(repr, get_args(Objective)))}")


@dataclass(frozen=True)
class DeviceCost:
    """How fast one device works.

    Attributes
    ----------
    flops : float
        float32 operations per second.
    bandwidth : float
        Bytes per second to and from its memory.
    launch : float
        Seconds per kernel, whatever its size.
    products : mapping of str to float
        Operations per second of products by the element type of their operands; others have `flops`.
    """

    flops: float
    bandwidth: float
    launch: float
    products: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LinkCost:
    """How fast tensors go from one device to another: seconds = latency + bytes / bandwidth.

    Attributes
    ----------
    bandwidth : float
        Bytes per second.
    latency : float
        Seconds that a transfer takes besides.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class CostModel:
    """Seconds per op and per transfer, and which devices work side by side.

    An op takes ``launch + max(flops / device.flops, bytes / device.bandwidth)``, without ``launch`` where it joins the
    kernel of its operand. Inputs start on the host and outputs are read there. Weights lie where they are used before
    the call, and cost nothing to bring there.

    Attributes
    ----------
    devices : sequence of DeviceCost
        One per vdevice, in order.
    links : mapping
        (from, to) -> LinkCost, positions in the list of vdevices; -1 is the host CPU if the list has none.
    host : int
        Position of the host, or -1.
    symbolic_extent : int
        The size that a symbolic dimension is taken to have.
    queues : sequence of int
        The queue of each device, counted from 0: devices of one queue take turns. Empty: each has its own.
    figures : str
        Source of the costs: "tables", or how they were measured.

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
        """Defaults by target kind and features (vector width and cores of a CPU, compute capability of a GPU).

        What is measured of devices that are here is in `measured`.

        A CPU device works with ``num-cores`` of its target, one where it says nothing. CPU devices that together have
        more cores than this process may use share them: in one call they take turns, each with all its cores; with
        several calls in flight they work side by side, each with an equal share at most. (A device that has more by
        itself is another machine's, and its word is taken; so is that of devices on hosts.) Vdevices of one physical
        device always take turns.

        Parameters
        ----------
        vdevices : sequence of tvm.relax.VDevice
            Devices in the order of the module's list.
        objective : Objective
            "latency" or "throughput", as `auto_placement` takes it.
        """
        vdevices = list(map(with_hardware, vdevices))
        host = host_vdevice(vdevices)
        host_index = IMPLICIT_HOST if host is None else vdevice_index(host, vdevices)
        own = _own_cores(vdevices)
        cores, take_turns = own, False
        if not hosts_of(vdevices) and sum(own.values()) > num_cores() >= max(own.values()):
            take_turns = objective == "latency"
            share = max(1, num_cores() // len(own))
            cores = own if take_turns else {place: min(count, share) for place, count in own.items()}
        numbers: dict[tuple[object, ...], int] = {}
        queues = [
            numbers.setdefault(
                (host_of(vdevice), "CPU") if take_turns and is_cpu(vdevice) else _place(vdevice), len(numbers)
            )
            for vdevice in vdevices
        ]
        at_once: dict[str | None, int] = {}  # cores of a machine's devices that work at the same time
        for (machine, *_), count in cores.items():
            at_once[machine] = max(count, at_once.get(machine, 0)) if take_turns else count + at_once.get(machine, 0)
        devices = [
            _default_cpu(vdevice.target, cores[_place(vdevice)], at_once[host_of(vdevice)])
            if is_cpu(vdevice)
            else _default_gpu(vdevice.target)
            for vdevice in vdevices
        ]
        ends = {**dict(enumerate(vdevices)), **({IMPLICIT_HOST: None} if host is None else {})}
        links = {(a, b): _default_link(ends[a], ends[b], take_turns) for a in ends for b in ends if a != b}
        return cls(devices, links, host_index, queues=queues)

    @classmethod
    def measured(cls, vdevices: Sequence[tvm.relax.VDevice], objective: Objective = "latency") -> CostModel:
        """`for_vdevices`, with measured figures where the devices are a CPU and a GPU, or several GPUs, that are here.

        Measuring takes some seconds, once per machine (`measure_devices`).

        Parameters
        ----------
        vdevices : sequence of tvm.relax.VDevice
            Devices in the order of the module's list.
        objective : Objective
            "latency" or "throughput", as `auto_placement` takes it.
        """
        vdevices = list(map(with_hardware, vdevices))
        model = cls.for_vdevices(vdevices, objective)
        if len(vdevices) < 2 or all(map(is_cpu, vdevices)) or not are_present(vdevices):
            return model
        figures = figures_of(vdevices)
        return model if figures is None else _with_figures(model, figures)

    def op_seconds(self, work: Work, device: int) -> float:
        """Seconds one op takes there.

        Parameters
        ----------
        work : Work
            Floating-point operations and bytes of the op.
        device : int
            Position in the list of vdevices.
        """
        cost = self.devices[device]
        rate = cost.products.get(work.product, cost.flops)
        return (cost.launch if work.is_kernel else 0.0) + max(work.flops / rate, work.bytes / cost.bandwidth)

    def transfer_seconds(self, size: float, source: int, destination: int) -> float:
        """Seconds until `size` bytes have gone from one device to another; 0 to where they are.

        Parameters
        ----------
        size : float
            Number of bytes.
        source, destination : int
            Positions in the list of vdevices.
        """
        if source == destination:
            return 0.0
        link = self.links[source, destination]
        return link.latency + size / link.bandwidth

    def check(self, num_devices: int) -> None:
        """Raise a VDeviceError if the model does not cover that many vdevices.

        Parameters
        ----------
        num_devices : int
            Number of vdevices.
        """
        if len(self.devices) != num_devices:
            raise VDeviceError(f"the cost model has {len(self.devices)} devices for {num_devices} vdevices")
        if self.host != IMPLICIT_HOST and not 0 <= self.host < num_devices:
            raise VDeviceError(f"the cost model's host is device {self.host} of {num_devices}")
        places = sorted({*range(num_devices), self.host})
        missing = [(a, b) for a in places for b in places if a != b and (a, b) not in self.links]
        if missing:
            raise VDeviceError(f"the cost model has no link between devices {missing[0]}")
        if self.queues and (len(self.queues) != num_devices or min(self.queues) < 0):
            raise VDeviceError(f"the cost model's queues are {list(self.queues)}; expected a number for each device")


def _with_figures(model: CostModel, figures: Figures) -> CostModel:
    """The model with what was measured, of links too; CPU devices that share cores keep their shares."""
    devices = []
    for cost, found in zip(model.devices, figures.devices, strict=True):
        products = {dtype: rate * _ATTAINED_BY_LAYERS for dtype, rate in found.products.items()}
        devices.append(replace(cost, bandwidth=found.bandwidth, launch=found.launch, products=products))
    links = dict(model.links)
    for (source, target), link in figures.links.items():
        # Of what a whole call on a GPU takes, half for its argument and half for its result.
        calls = abs(figures.devices[source].call - figures.devices[target].call) / 2
        links[source, target] = LinkCost(link.bandwidth, max(link.crossing, calls))
    how = f"measured while other work took {figures.others:.0%} of the CPUs" if figures.others else "measured"
    return replace(model, devices=devices, links=links, figures=how)


def _default_link(source: tvm.relax.VDevice | None, target: tvm.relax.VDevice | None, take_turns: bool) -> LinkCost:
    """None is the implicit host."""
    if source is not None and target is not None and host_of(source) != host_of(target):
        return LinkCost(NETWORK_BYTES_PER_SECOND, NETWORK_LATENCY_SECONDS)
    places = [(None, 1, 0) if end is None else _place(end) for end in (source, target)]
    on_cpu = [end is None or is_cpu(end) for end in (source, target)]
    if places[0] == places[1]:
        return LinkCost(float("inf"), 0.5e-6)  # one physical device: nothing is copied
    if all(on_cpu):  # one memory: a call that does not go through queues copies, queues share
        return LinkCost(10e9, 1e-6) if take_turns else LinkCost(float("inf"), _HAND_OVER)
    if any(on_cpu):
        return LinkCost(20e9, 30e-6)  # PCIe, measured between an H200 and pageable host memory
    return LinkCost(300e9, 30e-6)  # NVLink; two H200s measured 369 GB/s for 256 MB


def _place(vdevice: tvm.relax.VDevice) -> tuple[str | None, int, int]:
    """The physical device: host, device type and number."""
    return host_of(vdevice), *physical(vdevice)


def _own_cores(vdevices: Sequence[tvm.relax.VDevice]) -> dict[tuple[str | None, int, int], int]:
    """The cores that the code of each physical CPU device is made for."""
    found: dict[tuple[str | None, int, int], int] = {}
    for vdevice in filter(is_cpu, vdevices):
        count = int(vdevice.target.attrs.get("num-cores", 1))
        found[_place(vdevice)] = max(1, count, found.get(_place(vdevice), 1))
    return found


def _default_cpu(target: Target, cores: int, socket: int) -> DeviceCost:
    """A device of some of the cores of a socket that work at once."""
    peak = cores * _CLOCK * _FLOPS_PER_LANE * _lanes(target)
    bandwidth = min(cores * _CORE_BANDWIDTH, _CPU_BANDWIDTH * cores / socket)
    return DeviceCost(peak * _ATTAINED_CPU_FLOPS, bandwidth * _ATTAINED_BANDWIDTH, _CPU_LAUNCH)


def _default_gpu(target: Target) -> DeviceCost:
    peak, bandwidth, faster = backend_of(target).peaks(target)
    products = {dtype: peak * faster * _ATTAINED_GPU_FLOPS for dtype in _TWO_BYTES}
    return DeviceCost(peak * _ATTAINED_GPU_FLOPS, bandwidth * _ATTAINED_BANDWIDTH, _GPU_LAUNCH, products)


def _lanes(target: Target) -> int:
    """float32 values in a vector register of the target; 4 where only a C compiler knows."""
    if target.kind.name != "llvm":
        return 4
    return next((lanes for feature, lanes in _LANES.items() if codegen.target_has_features(feature, target)), 4)
