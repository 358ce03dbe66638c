"""Errors of the CUDA driver, and checks that a GPU can run code before anything runs."""

from __future__ import annotations

import ctypes
import json
import re
from typing import Any, NamedTuple

from tvm import runtime

from ...artifact.metadata import DeviceSpec
from ...errors import BindingError, HeteroError, pip_install
from ...target.gpu_target import arch_of


class CudaError(HeteroError):
    """A call of the CUDA driver that failed."""


_ARCH = re.compile(r"sm_([0-9]+)([0-9])([a-z]?)")


class GpuCode(NamedTuple):
    """The GPUs that run an architecture's code: of the compute capability `major`.`minor`."""

    arch: str  # architecture, such as "sm_90a"
    # Compute capability.
    major: int
    minor: int
    is_exact: bool  # True if newer capabilities of the same `major` do not run it

    def runs_on(self, capability: str) -> bool:
        """Return whether a GPU of a compute capability runs the code."""
        major, minor = (int(number) for number in capability.split(".")[:2])
        return major == self.major and (minor == self.minor if self.is_exact else minor >= self.minor)


def gpu_code(spec: DeviceSpec) -> GpuCode | None:
    """The architecture of a device's code; None for devices other than GPUs of CUDA, and unknown architectures."""
    data = json.loads(spec.target)
    match = _ARCH.fullmatch(str(data.get("arch", ""))) if isinstance(data, dict) and spec.kind == "cuda" else None
    return None if match is None else GpuCode(match[0], int(match[1]), int(match[2]), match[3] == "a")


def check_gpu(name: str, spec: DeviceSpec, device: runtime.Device) -> None:
    """Require that code for a CUDA `spec` (called `name`) runs on a GPU; BindingError otherwise."""
    code, capability = gpu_code(spec), str(device.compute_version)
    if code is not None and not code.runs_on(capability):
        required = f"{code.major}.{code.minor}"
        supported = f"{required} alone" if code.is_exact else f"{required} and newer ones of {code.major}.x"
        raise BindingError(
            f"{name} was compiled for {code.arch}, which GPUs of compute capability {supported} run: found "
            f"{device.device_name} of compute capability {capability} as {device}; compile the model for "
            f"{arch_of(capability)}, or there for 'cuda'"
        )


def why_no_gpu(failure: str) -> str:
    """End of a message: why this process has no GPU, or how many it has.

    `failure`: why TVM's CUDA runtime library failed to load; empty if it is loaded.
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
        return f"TVM's CUDA runtime cannot be loaded: {failure}: {pip_install('cuda')}"
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return "the NVIDIA driver finds no GPU that this process may use"
    return f"it has {count.value} GPU{'' if count.value == 1 else 's'}"


def _runtime_version() -> int:
    """The version of the CUDA runtime that TVM has loaded, in the driver's encoding; 0 for none."""
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
