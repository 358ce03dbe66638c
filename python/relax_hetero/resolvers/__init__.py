"""The resolvers of this library, a file for each kind of device: `cpu`, `cuda`.

The only package that knows which generator solves which problem.
"""

from __future__ import annotations

from .cpu import CpuResolver, GenericResolver
from .cuda import CudaResolver

__all__ = ["CpuResolver", "CudaResolver", "GenericResolver"]
