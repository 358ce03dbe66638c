"""What ops and transfers cost: the estimate that ``placement="auto"`` minimizes.

Rough on purpose, and every number can be replaced: a plan needs to know that a GPU multiplies matrices a hundred times
faster than this CPU and that reaching it costs ten microseconds, not the third digit of either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm.target import Target, codegen

from ..errors import VDeviceError
from ..native_target import num_cores
from ..vdevice import host_vdevice, is_cpu, physical, vdevice_index

# The implicit host CPU, where no vdevice of the list is one.
IMPLICIT_HOST = -1

# Share of a device's peak arithmetic and bandwidth that generated code reaches.
_ATTAINED_FLOPS = 0.3
_ATTAINED_BANDWIDTH = 0.7

_CLOCK = 2.5e9  # Hz, a server core under vector load
_FLOPS_PER_LANE = 4  # two units, each a multiply and an add per cycle
_CORE_BANDWIDTH = 10e9  # bytes/s one core can draw
_CPU_BANDWIDTH = 100e9  # bytes/s of a socket, however many cores

# LLVM feature -> float32 lanes, widest first.
_LANES = {"avx512f": 16, "avx": 8, "sse2": 4, "neon": 4, "v": 4}

# Compute capability -> (peak float32 flop/s outside tensor cores, bytes/s), newest first.
_CUDA = {
    100: (75e12, 8.0e12),
    90: (67e12, 4.0e12),
    89: (60e12, 0.9e12),
    86: (30e12, 0.8e12),
    80: (19e12, 1.9e12),
    70: (14e12, 0.9e12),
    0: (5e12, 0.3e12),
}
_OTHER_GPU = (5e12, 0.3e12)

_GPU_LAUNCH = 5e-6  # seconds per kernel
_CPU_LAUNCH = 0.5e-6


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
        Seconds per op, whatever its size.
    """

    flops: float
    bandwidth: float
    launch: float


@dataclass(frozen=True)
class LinkCost:
    """How fast tensors go from one device to another: seconds = latency + bytes / bandwidth."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class CostModel:
    """Seconds per op and per transfer; the cost of a plan is their sum, as for one call with nothing overlapped.

    An op takes ``launch + max(flops / device.flops, bytes / device.bandwidth)``. Inputs start on the host and outputs
    are read there. Weights lie where they are used before the call, and cost nothing.

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

    Examples
    --------
    ``dataclasses.replace(CostModel.for_vdevices(vdevices), symbolic_extent=512)`` changes one number.
    """

    devices: Sequence[DeviceCost]
    links: Mapping[tuple[int, int], LinkCost] = field(default_factory=dict)
    host: int = IMPLICIT_HOST
    symbolic_extent: int = 64

    @classmethod
    def for_vdevices(cls, vdevices: Sequence[tvm.relax.VDevice]) -> CostModel:
        """Defaults by target kind and features (vector width and cores of a CPU, compute capability of a GPU)."""
        host = host_vdevice(vdevices)
        host_index = IMPLICIT_HOST if host is None else vdevice_index(host, vdevices)
        places = [*range(len(vdevices)), *([IMPLICIT_HOST] if host is None else [])]
        links = {
            (a, b): _default_link(_place(a, vdevices), _place(b, vdevices)) for a in places for b in places if a != b
        }
        return cls([_default_device(vdevice.target) for vdevice in vdevices], links, host_index)

    def op_seconds(self, flops: float, moved: float, device: int) -> float:
        """Seconds one op takes there.

        Parameters
        ----------
        flops : float
            Arithmetic operations.
        moved : float
            Bytes read and written.
        device : int
            Position in the list of vdevices.
        """
        cost = self.devices[device]
        return cost.launch + max(flops / cost.flops, moved / cost.bandwidth)

    def transfer_seconds(self, size: float, source: int, destination: int) -> float:
        """Seconds until `size` bytes have gone from one device to another; 0 to where they are."""
        if source == destination:
            return 0.0
        link = self.links[source, destination]
        return link.latency + size / link.bandwidth

    def check(self, num_devices: int) -> None:
        """Raise a VDeviceError if the model does not cover that many vdevices."""
        if len(self.devices) != num_devices:
            raise VDeviceError(f"the cost model has {len(self.devices)} devices for {num_devices} vdevices")
        if self.host != IMPLICIT_HOST and not 0 <= self.host < num_devices:
            raise VDeviceError(f"the cost model's host is device {self.host} of {num_devices}")
        places = sorted({*range(num_devices), self.host})
        missing = [(a, b) for a in places for b in places if a != b and (a, b) not in self.links]
        if missing:
            raise VDeviceError(f"the cost model has no link between devices {missing[0]}")


def _place(index: int, vdevices: Sequence[tvm.relax.VDevice]) -> tuple[bool, tuple[int, int]]:
    """Whether a place is a CPU, and which physical device it is."""
    if index == IMPLICIT_HOST:
        return True, (1, 0)
    return is_cpu(vdevices[index]), physical(vdevices[index])


def _default_link(source: tuple[bool, tuple[int, int]], destination: tuple[bool, tuple[int, int]]) -> LinkCost:
    if source[1] == destination[1]:
        return LinkCost(float("inf"), 0.5e-6)  # one physical device: nothing is copied
    if source[0] and destination[0]:
        return LinkCost(10e9, 1e-6)  # one memory: a copy
    if source[0] or destination[0]:
        return LinkCost(20e9, 10e-6)  # PCIe, measured between an H200 and pageable host memory
    return LinkCost(40e9, 10e-6)  # between two GPUs without peer access


def _default_device(target: Target) -> DeviceCost:
    if target.get_target_device_type() == 1:
        cores = int(target.attrs.get("num-cores", 0)) or num_cores()
        peak = cores * _CLOCK * _FLOPS_PER_LANE * _lanes(target)
        bandwidth = min(cores * _CORE_BANDWIDTH, _CPU_BANDWIDTH)
        return DeviceCost(peak * _ATTAINED_FLOPS, bandwidth * _ATTAINED_BANDWIDTH, _CPU_LAUNCH)
    peak, bandwidth = _OTHER_GPU
    if target.kind.name == "cuda":
        arch = str(target.attrs.get("arch", ""))
        number = int("".join(filter(str.isdigit, arch)) or 0)
        peak, bandwidth = next(figures for capability, figures in _CUDA.items() if number >= capability)
    return DeviceCost(peak * _ATTAINED_FLOPS, bandwidth * _ATTAINED_BANDWIDTH, _GPU_LAUNCH)


def _lanes(target: Target) -> int:
    """float32 values in a vector register of the target; 4 where only a C compiler knows."""
    if target.kind.name != "llvm":
        return 4
    return next((lanes for feature, lanes in _LANES.items() if codegen.target_has_features(feature, target)), 4)
