"""The resolvers of this library, one a file; registered when `relax_hetero.encoding` is imported."""

from __future__ import annotations

from ..machine import INSTRUCTION_SETS
from ..resolver import register_resolver
from .cpu import CpuResolver
from .cuda import CudaResolver
from .generic import GenericResolver

__all__ = ["CpuResolver", "CudaResolver", "GenericResolver", "register_resolvers"]


def register_resolvers() -> None:
    """Register them; once, when `relax_hetero.encoding` is imported."""
    generic, cpu = GenericResolver(), CpuResolver()
    register_resolver(generic, "c")
    register_resolver(generic, "llvm")
    for isa in INSTRUCTION_SETS:
        if isa.vector_bytes:
            register_resolver(cpu, "llvm", [f"isa={isa.name}"])
    register_resolver(CudaResolver(), "cuda")
