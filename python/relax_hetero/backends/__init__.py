"""Registry of device kinds (`target.backend.Backend`), a line each; base classes for those of other packages.

Back ends may use the packages that compile and run models, which reach them through `target.backend.backend_of`.
"""

from __future__ import annotations

from ..target.backend import Backend, DeviceMemory, Location
from .cpu import CBackend, LlvmBackend
from .cuda import CudaBackend
from .gpu import GpuBackend, RocmBackend
from .managed import ManagedBackend
from .opencl import OpenClBackend

__all__ = ["BACKENDS", "Backend", "DeviceMemory", "GpuBackend", "Location", "ManagedBackend"]

BACKENDS = (
    LlvmBackend(),
    CBackend(),
    CudaBackend(),
    RocmBackend(),
    GpuBackend("metal", 8, "", "an Apple GPU", "mps apple coreml coremlexecutionprovider mlx"),
    GpuBackend("vulkan", 7, "", "", "vk"),
    OpenClBackend(),
    GpuBackend("webgpu", 15),
    GpuBackend("nvptx", 2, CudaBackend.KIND),
    Backend("ext_dev", 12),
    Backend("hexagon", 16),
)
"""All back ends; the first one of a device type runs its devices."""
