"""Measured peaks of devices on this machine, and the fraction of them that a kernel reaches (its roofline).

The figures come from `frontend.auto.measure_devices`, as for ``placement="auto"`` and ``relax-hetero devices``: large
matrix products of each element type, and a sum of large tensors, by kernels for the device's own target. Nothing here
comes from data sheets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relax

from ..artifact.metadata import DeviceSpec, device_names
from ..frontend.auto.measure_devices import are_present, figures_of
from ..system import allowed_cpus, processor_name
from ..target.element_types import short_name

COMPUTE, MEMORY = "arithmetic", "memory"


def peaks_of(devices: Sequence[DeviceSpec]) -> dict[str, dict[str, Any]]:
    """Measured figures of an executable's devices on this machine, by name.

    Measuring takes some seconds per device, once per machine and number of threads.
    """
    peaks = {}
    for name, spec in zip(device_names(tuple(devices)), devices, strict=True):
        vdevice = relax.VDevice(tvm.target.Target(spec.target), spec.vdevice_id, spec.memory_scope)
        figures = figures_of([vdevice]) if are_present([vdevice]) else None
        if figures is not None:
            (device,) = figures.devices.values()
            peaks[name] = {
                "operations_per_second": {short_name(dtype): rate for dtype, rate in device.products.items()},
                "bytes_per_second": device.bandwidth,
            }
    return peaks


def share_of_peak(
    peak: Mapping[str, Any] | None, precision: str | None, operations: int | None, nbytes: int | None, seconds: float
) -> tuple[float | None, str | None]:
    """Fraction of the bounding peak that a kernel call reached, and which peak that is.

    Parameters
    ----------
    peak : mapping or None
        Peaks of its device (`peaks_of`).
    precision, operations, nbytes
        As in `DispatchSpec`; 0 or None if unknown.
    seconds : float
        Time of the call.

    Returns
    -------
    share : float or None
        None if there is no figure for it. More than 1 if tensors are in a CPU cache, or the kernel does fewer
        operations than were counted.
    bound : str or None
        `COMPUTE` or `MEMORY`.
    """
    if peak is None or seconds <= 0:
        return None, None
    bounds = {MEMORY: (nbytes or 0) / peak["bytes_per_second"]}
    rate = peak["operations_per_second"].get(_operand_type(precision or ""))
    if rate is not None:
        bounds[COMPUTE] = (operations or 0) / rate
    bound = max(bounds, key=lambda name: bounds[name])
    return (bounds[bound] / seconds, bound) if bounds[bound] > 0 else (None, None)


def _operand_type(precision: str) -> str:
    """Common type of both operands of products, such as ``f16`` for ``f16*f16->f16+f32``; else the whole text."""
    first, star, rest = precision.partition("*")
    return first if star and rest.partition("->")[0] == first else precision


def describe_machine() -> dict[str, Any]:
    """Describe the machine that this process runs on."""
    return {"cpu": processor_name(), "cores": len(allowed_cpus()), "gpus": _gpu_names()}


def _gpu_names() -> list[str]:
    names: list[str] = []
    while (device := tvm.cuda(len(names))).exist:
        names.append(str(device.device_name))
    return sorted(names, key=names.index)  # equal GPUs next to each other
