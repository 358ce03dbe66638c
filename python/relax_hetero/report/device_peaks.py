"""Measured peaks of devices on this machine, and the share of them that a kernel reached.

The figures are those of ``placement="auto"`` and ``relax-hetero devices`` (`frontend.auto.measure_devices`): large
matrix products of each element type, and a sum over large tensors, by kernels of the device's own target, so with its
cores. What was not measured has no figure: no number here comes from a table.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from ..artifact.metadata import DeviceSpec, device_names
from ..frontend.auto.measure_devices import are_present, figures_of
from ..target.element_types import short_name

COMPUTE, MEMORY = "arithmetic", "memory"


def peaks_of(devices: Sequence[DeviceSpec]) -> dict[str, dict[str, Any]]:
    """The measured figures of an executable's devices, by name; none of devices that are not on this machine.

    Measuring takes some seconds for a device, once per machine and number of threads.
    """
    found = {}
    for name, spec in zip(device_names(tuple(devices)), devices, strict=True):
        vdevice = relax.VDevice(tvm.target.Target(spec.target), spec.vdevice_id, spec.memory_scope)
        figures = figures_of([vdevice]) if are_present([vdevice]) else None
        if figures is not None:
            (about,) = figures.devices
            found[name] = {
                "operations_per_second": {short_name(dtype): rate for dtype, rate in about.products.items()},
                "bytes_per_second": about.bandwidth,
            }
    return found


def share_of_peak(
    peak: Mapping[str, Any] | None, precision: str | None, operations: int | None, nbytes: int | None, seconds: float
) -> tuple[float | None, str | None]:
    """The share that a kernel call reached of what bounds it, and what that is: "arithmetic", "memory" or None.

    Parameters
    ----------
    peak : mapping or None
        Peaks of its device, as `peaks_of` returns them.
    precision, operations, nbytes
        As in `DispatchSpec`; 0 or None where they are not known.
    seconds : float
        Time of the call.

    Returns
    -------
    tuple of (float or None) and (str or None)
        None where there is no figure that bounds it. Over 1 where tensors lie in a cache, or where a kernel needs fewer
        operations than are counted.
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
    """The one type of both operands of products: ``f16`` of ``f16*f16->f16+f32``; else the text as it is."""
    first, star, rest = precision.partition("*")
    return first if star and rest.partition("->")[0] == first else precision


# The machine that this process runs on, for reports with times.


def describe_machine() -> dict[str, Any]:
    """The machine that this process runs on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cpu": _cpu_name(), "cores": cores, "gpus": _gpu_names()}


def _cpu_name() -> str:
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        facts = []
    named = (line.partition(":")[2].strip() for line in facts if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _gpu_names() -> list[str]:
    counted: Counter[str] = Counter()
    index = 0
    while (device := tvm.cuda(index)).exist:
        counted[str(device.device_name)] += 1
        index += 1
    return [name for name, count in counted.items() for _ in range(count)]
