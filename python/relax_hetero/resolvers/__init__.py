"""The resolvers of this library, one file for each kind of device: `cpu`, `cuda`.

Only this package maps problems to generators of kernels.
"""

from __future__ import annotations

from .cpu import CpuResolver, GenericResolver
from .cuda import CudaResolver

__all__ = ["CpuResolver", "CudaResolver", "GenericResolver"]
