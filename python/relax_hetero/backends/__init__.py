"""The kinds of devices, a line each; `target.backend` says what they answer.

The highest package that compiling and running need: it may use all below, which ask `target.backend.backend_of`.
"""

from __future__ import annotations

from ..target.backend import Backend
from .cpu import CBackend, LlvmBackend
from .cuda import CudaBackend
from .gpu import GpuBackend, RocmBackend

BACKENDS = (
    LlvmBackend(),
    CBackend(),
    CudaBackend(),
    RocmBackend(),
    GpuBackend("metal", 8, "", "an Apple GPU", "mps apple coreml coremlexecutionprovider mlx"),
    GpuBackend("vulkan", 7, "", "", "vk"),
    GpuBackend("opencl", 4, "", "", "cl ocl"),
    GpuBackend("webgpu", 15),
    GpuBackend("nvptx", 2, CudaBackend.KIND),
    Backend("ext_dev", 12),
    Backend("hexagon", 16),
)
"""Back ends by kind; of several with one device type, the first runs the devices."""
