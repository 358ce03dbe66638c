"""The resolvers of this library, a file for each kind of device: `cpu`, `cuda`.

The only room that knows which generator solves which problem.
"""

from __future__ import annotations

from ..encoding.resolver import EncodingResolver
from ..target.cpu_target import INSTRUCTION_SETS
from .cpu import CpuResolver, GenericResolver
from .cuda import CudaResolver

__all__ = ["CpuResolver", "CudaResolver", "GenericResolver", "own_resolvers"]


def own_resolvers() -> list[tuple[EncodingResolver, str, tuple[str, ...]]]:
    """Resolver, target kind and features, as `rh.encoding.register_resolver` takes them."""
    generic, cpu = GenericResolver(), CpuResolver()
    with_vectors = [isa for isa in INSTRUCTION_SETS if isa.vector_bytes]
    return [
        (generic, "c", ()),
        (generic, "llvm", ()),
        *((cpu, "llvm", (f"isa={isa.name}",)) for isa in with_vectors),
        (CudaResolver(), "cuda", ()),
    ]
