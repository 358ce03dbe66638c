"""The CUDA driver through the package cuda-bindings: pinned memory and graph capture; and checks of GPUs.

Streams, contexts and kernels are TVM's; callers have made a device's primary context current.
"""

from __future__ import annotations

import ctypes
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from tvm import runtime

from ...artifact.metadata import DeviceSpec
from ...errors import BindingError, HeteroError, pip_install
from ...target.gpu_target import arch_of

_log = logging.getLogger("relax_hetero")


class CudaError(HeteroError):
    """A call of the CUDA driver that failed."""


class CudaDriver:
    """Functions of the driver; failures raise `CudaError`.

    Parameters
    ----------
    api : object
        Module ``cuda.bindings.driver``.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self.graph_launch = int(self._call("cuGraphLaunch's address", self._address, b"cuGraphLaunch"))

    def pinned(self, nbytes: int) -> int:
        """Allocate host memory that all devices can access; returns its address."""
        flags = self._api.CU_MEMHOSTALLOC_PORTABLE | self._api.CU_MEMHOSTALLOC_DEVICEMAP
        return int(self._call("cuMemHostAlloc", self._api.cuMemHostAlloc, nbytes, flags))

    def free_pinned(self, address: int) -> None:
        """Free memory of `pinned`."""
        self._call("cuMemFreeHost", self._api.cuMemFreeHost, address)

    def capture(self, launch: Callable[[int], None]) -> int:
        """Capture the kernels that `launch` launches on the given stream; returns an executable graph."""
        api = self._api
        stream = self._call("cuStreamCreate", api.cuStreamCreate, api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        try:
            relaxed = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            self._call("cuStreamBeginCapture", api.cuStreamBeginCapture, stream, relaxed)
            try:
                launch(int(stream))
            finally:  # until then the stream can do nothing else
                status, graph = api.cuStreamEndCapture(stream)
            self._check("cuStreamEndCapture", status)
            try:
                executable = self._call("cuGraphInstantiate", api.cuGraphInstantiate, graph, 0)
            finally:
                self._call("cuGraphDestroy", api.cuGraphDestroy, graph)
            self._call("cuGraphUpload", api.cuGraphUpload, executable, stream)
            self._call("cuStreamSynchronize", api.cuStreamSynchronize, stream)
            return int(executable)
        finally:
            self._call("cuStreamDestroy", api.cuStreamDestroy, stream)

    def launch(self, graph: int, stream: int) -> None:
        """Launch a graph, in order with the stream and with earlier launches of the graph."""
        self._call("cuGraphLaunch", self._api.cuGraphLaunch, graph, stream)

    def is_done(self, stream: int) -> bool:
        """Return whether all work of a stream has ended; raises its error, if any."""
        (status,) = self._api.cuStreamQuery(stream)
        is_done: bool = status != self._api.CUresult.CUDA_ERROR_NOT_READY
        if is_done:
            self._check("cuStreamQuery", status)
        return is_done

    def destroy(self, graph: int) -> None:
        """Destroy a graph; running launches complete."""
        self._call("cuGraphExecDestroy", self._api.cuGraphExecDestroy, graph)

    def error(self, call: str, code: int) -> CudaError:
        """The exception for a failing call's code."""
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


def free_after_use(
    driver: CudaDriver, devices: Sequence[runtime.Device], address: int, graphs: Mapping[Any, int] | None = None
) -> None:
    """Free pinned memory that launches of devices may still use, and destroy graphs that use it; for finalizers."""
    try:
        for device in devices:
            device.sync()
        for graph in (graphs or {}).values():
            driver.destroy(graph)
        driver.free_pinned(address)
    except Exception:  # at process exit the driver may have shut down already
        _log.debug("pinned memory of %s was not freed", ", ".join(map(str, devices)), exc_info=True)


@cache
def cuda_driver() -> CudaDriver | str:
    """The driver, or the reason why it is unavailable."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return f"the package cuda-bindings is not installed ({pip_install('cuda')})"
    try:
        return CudaDriver(driver)
    except (CudaError, RuntimeError) as error:  # the driver's library is absent or too old
        return str(error)


# Checks that a GPU can run code, before anything runs.

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

    Parameters
    ----------
    failure : str
        Why TVM's CUDA runtime library failed to load; empty if it is loaded.
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
