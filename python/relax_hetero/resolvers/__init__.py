"""The resolvers of this library, one file for each kind of device: `cpu`, `cuda`.

Only this package maps problems to generators of kernels.
"""

from __future__ import annotations

from .cpu_resolver import CpuResolver, GenericResolver
from .cuda_resolver import CudaResolver, SimtResolver

__all__ = ["CpuResolver", "CudaResolver", "GenericResolver", "SimtResolver"]
