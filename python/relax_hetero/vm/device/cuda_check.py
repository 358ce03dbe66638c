"""Checks that a GPU runs the code that was compiled for it: an error that says why not, before anything runs."""

from __future__ import annotations

import ctypes
import json
import re
from typing import Any

from tvm import runtime

from ...artifact.metadata import DeviceSpec
from ...errors import BindingError
from ...target.gpu_target import arch_of

_ARCH = re.compile(r"sm_([0-9]+)([0-9])([a-z]?)")


def check_gpu(name: str, spec: DeviceSpec, device: runtime.Device) -> None:
    """BindingError if code for a CUDA `spec` (called `name`) does not run on a GPU that is there."""
    arch = str(json.loads(spec.target).get("arch", ""))
    wanted = _ARCH.fullmatch(arch)
    found = str(device.compute_version)
    if wanted is not None and not _runs(int(wanted[1]), int(wanted[2]), wanted[3], found):
        capability = f"{wanted[1]}.{wanted[2]}"
        alone = f"{capability} alone" if wanted[3] == "a" else f"{capability} and newer ones of {wanted[1]}.x"
        raise BindingError(
            f"{name} was compiled for {arch}, which GPUs of compute capability {alone} run: found {device.device_name} "
            f"of compute capability {found} as {device}; compile the model for {arch_of(found)}, or there for "
            "'cuda'"
        )


def _runs(major: int, minor: int, suffix: str, found: str) -> bool:
    here = tuple(int(part) for part in found.split(".")[:2])
    return here == (major, minor) if suffix == "a" else here[0] == major and here[1] >= minor


def why_no_gpu(failure: str) -> str:
    """Why this process has no GPU, or how many it has; for the end of a message.

    Parameters
    ----------
    failure : str
        Why TVM's runtime library has not been loaded; empty where it has.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is installed (libcuda.so.1)"
    supported, needed = _version(driver, "cuDriverGetVersion"), _runtime_version()
    if needed and 0 < supported < needed:
        return (
            f"the NVIDIA driver supports CUDA {_text(supported)}, expected {_text(needed)} or newer: update the driver"
        )
    if failure:
        return f"TVM's CUDA runtime cannot be loaded: {failure}: pip install 'relax-hetero[cuda]'"
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return "the NVIDIA driver finds no GPU that this process may use"
    return f"it has {count.value} GPU{'' if count.value == 1 else 's'}"


def _runtime_version() -> int:
    """The version of the CUDA library that TVM's support for CUDA has loaded, as the driver counts; 0 for none."""
    try:
        process: Any = ctypes.CDLL("libtvm_runtime_cuda.so")
        return _version(process, "cudaRuntimeGetVersion")
    except (OSError, AttributeError):
        return 0


def _version(library: Any, function: str) -> int:
    number = ctypes.c_int(0)
    getattr(library, function)(ctypes.byref(number))
    return number.value


def _text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
