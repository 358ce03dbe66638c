"""The CUDA driver through the package cuda-bindings: pinned memory, and launches recorded as graphs.

Streams, contexts and kernels are TVM's; a device's primary context is current where these functions are called.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from tvm import runtime

from ...artifact.metadata import DeviceSpec
from ...errors import BindingError, HeteroError
from ...target.gpu_target import arch_of


class CudaError(HeteroError):
    """A call of the CUDA driver that failed."""


class CudaDriver:
    """Calls of the driver that raise `CudaError` where they fail.

    Parameters
    ----------
    api : object
        ``cuda.bindings.driver``.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self.graph_launch = int(self._call("cuGraphLaunch's address", self._address, b"cuGraphLaunch"))

    def pinned(self, nbytes: int) -> int:
        """The address of host memory that all devices can read and write at the same address."""
        flags = self._api.CU_MEMHOSTALLOC_PORTABLE | self._api.CU_MEMHOSTALLOC_DEVICEMAP
        return int(self._call("cuMemHostAlloc", self._api.cuMemHostAlloc, nbytes, flags))

    def free_pinned(self, address: int) -> None:
        """Give back what `pinned` gave."""
        self._call("cuMemFreeHost", self._api.cuMemFreeHost, address)

    def record(self, launch: Callable[[int], None]) -> int:
        """A graph of the kernels that `launch` launches on the stream it is given."""
        api = self._api
        stream = self._call("cuStreamCreate", api.cuStreamCreate, api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        try:
            relaxed = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            self._call("cuStreamBeginCapture", api.cuStreamBeginCapture, stream, relaxed)
            try:
                launch(int(stream))
            finally:  # a stream that is recorded can do nothing else
                status, graph = api.cuStreamEndCapture(stream)
            self._check("cuStreamEndCapture", status)
            try:
                recorded = self._call("cuGraphInstantiate", api.cuGraphInstantiate, graph, 0)
            finally:
                self._call("cuGraphDestroy", api.cuGraphDestroy, graph)
            self._call("cuGraphUpload", api.cuGraphUpload, recorded, stream)
            self._call("cuStreamSynchronize", api.cuStreamSynchronize, stream)
            return int(recorded)
        finally:
            self._call("cuStreamDestroy", api.cuStreamDestroy, stream)

    def launch(self, graph: int, stream: int) -> None:
        """Launch a graph; it runs after what the stream has, and after earlier launches of it."""
        self._call("cuGraphLaunch", self._api.cuGraphLaunch, graph, stream)

    def check_stream(self, stream: int) -> None:
        """Raise what went wrong on a stream, if anything did; work that has not ended is none."""
        (status,) = self._api.cuStreamQuery(stream)
        if status != self._api.CUresult.CUDA_ERROR_NOT_READY:
            self._check("cuStreamQuery", status)

    def destroy(self, graph: int) -> None:
        """Destroy a graph; launches that have not ended do end."""
        self._call("cuGraphExecDestroy", self._api.cuGraphExecDestroy, graph)

    def error(self, call: str, code: int) -> CudaError:
        """The text of a failing call's code."""
        try:
            name = self._api.CUresult(code).name
        except ValueError:
            name = str(code)
        return CudaError(f"{call} failed: {name}")

    def _address(self, name: bytes) -> tuple[Any, ...]:
        flags = self._api.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM
        return tuple(self._api.cuGetProcAddress(name, 12000, flags)[:2])

    def _call(self, name: str, function: Callable[..., tuple[Any, ...]], *args: Any) -> Any:
        status, *results = function(*args)
        self._check(name, status)
        return results[0] if results else None

    def _check(self, name: str, status: Any) -> None:
        if int(status) != 0:
            raise self.error(name, int(status))


@cache
def cuda_driver() -> CudaDriver | str:
    """The driver, or why there is none."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return "the package cuda-bindings is not installed (pip install 'relax-hetero[cuda]')"
    try:
        return CudaDriver(driver)
    except (CudaError, RuntimeError) as error:  # the driver's library is not here, or too old
        return str(error)


# Checks that a GPU runs the code that was compiled for it: an error that says why not, before anything runs.

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
