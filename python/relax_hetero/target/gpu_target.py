"""Facts about NVIDIA GPUs that layouts and kernels are chosen by, in one table.

A row is a compute capability; a target gets the row of its ``arch``, and any other GPU the plain row: no tensor cores,
and limits that every GPU since 2014 has. Adding a GPU is adding a row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import tvm

from .element_types import HALVES, TF32

WARP = 32
"""Threads that run in step."""

WARPGROUP = 128
"""Threads, four warps, that issue one wgmma together."""

MOST_THREADS = 1024
"""Maximum number of threads of a block, on every GPU."""

VECTOR_BYTES = 16
"""The widest access of a thread."""


@dataclass(frozen=True)
class GpuTarget:
    """A CUDA target as kernels see it.

    Attributes
    ----------
    arch : str
        As in the target: "sm_90a".
    capability : int
        90 for compute capability 9.0.
    tensor : str
        The tensor cores' instruction: "wgmma" (operands read from shared memory), "mma" (``mma.sync``, operands in
        registers) or "": none that is used.
    mma_types : frozenset of str
        Element types of operands that ``mma.sync`` or wgmma multiply.
    shared_bytes : int
        Shared memory that one block may ask for.
    shared_bytes_sm : int
        Shared memory of a multiprocessor, for all its blocks.
    registers : int
        32-bit registers of a multiprocessor.
    multiprocessors : int
        Number of multiprocessors of the largest model; persistent kernels launch so many blocks.
    cache_bytes : int
        The second-level cache of the largest model.
    async_copies : bool
        Whether ``cp.async`` brings global memory to shared memory without registers (from 8.0).
    bulk_copies : bool
        Whether bulk copies, mbarrier and clusters are there (from 9.0).
    """

    arch: str
    capability: int
    tensor: str
    mma_types: frozenset[str]
    shared_bytes: int
    shared_bytes_sm: int
    registers: int
    multiprocessors: int
    cache_bytes: int
    async_copies: bool
    bulk_copies: bool

    @property
    def overlaps_launches(self) -> bool:
        """True if a launch may begin before the one before it has ended (from 9.0)."""
        return self.capability >= 90

    def multiplies(self, lhs: str, rhs: str, acc: str) -> bool:
        """Return whether the tensor cores multiply elements of these types and accumulate in `acc`.

        The factors are of one type, or bytes of either sign, or any float8. Bytes accumulate in int32, tf32 in float32,
        others in any float of up to 32 bits.
        """
        families = (_BYTES, _FP8)
        alike = lhs == rhs or any(lhs in family and rhs in family for family in families)
        sums = {"int32"} if lhs in _BYTES else {"float32"} if lhs == TF32 else {"float32", *HALVES}
        return bool(self.tensor) and alike and {lhs, rhs} <= self.mma_types and acc in sums


_BYTES = frozenset(("int8", "uint8"))
_AMPERE_TYPES = _BYTES | {"float16", "bfloat16", TF32}
_FP8 = frozenset(("float8_e4m3fn", "float8_e5m2"))

# Sources: CUDA C++ programming guide, table of technical specifications per compute capability (shared memory,
# registers); PTX ISA (which instruction needs which target); data sheets of A100, L40, H100 and H200 (multiprocessors).
# sm_90 is what code for H100 is called that may not use wgmma: it runs as the row of 8.9 does, with Hopper's limits.
_GPUS: dict[str, GpuTarget] = {
    gpu.arch: gpu
    for gpu in (
        GpuTarget("sm_80", 80, "mma", _AMPERE_TYPES, 163 << 10, 164 << 10, 65536, 108, 40 << 20, True, False),
        GpuTarget("sm_86", 86, "mma", _AMPERE_TYPES, 99 << 10, 100 << 10, 65536, 84, 6 << 20, True, False),
        GpuTarget("sm_89", 89, "mma", _AMPERE_TYPES | _FP8, 99 << 10, 100 << 10, 65536, 142, 96 << 20, True, False),
        GpuTarget("sm_90", 90, "mma", _AMPERE_TYPES | _FP8, 227 << 10, 228 << 10, 65536, 132, 50 << 20, True, True),
        GpuTarget("sm_90a", 90, "wgmma", _AMPERE_TYPES | _FP8, 227 << 10, 228 << 10, 65536, 132, 50 << 20, True, True),
    )
}


# Compute capabilities whose own instructions, such as wgmma, only code for them alone may use.
_OWN_INSTRUCTIONS = frozenset({"9.0"})


def arch_of(capability: str) -> str:
    """The architecture that code for a GPU is compiled for: ``sm_90a`` for compute capability "9.0"."""
    return f"sm_{capability.replace('.', '')}{'a' if capability in _OWN_INSTRUCTIONS else ''}"


def gpu_target_of(target: tvm.target.Target) -> GpuTarget:
    """The facts of a CUDA target; one whose ``arch`` is in no row gets plain SIMT kernels and the limits of all."""
    return _gpu_target_of(str(target.attrs.get("arch", "")))


@cache
def _gpu_target_of(arch: str) -> GpuTarget:
    if arch in _GPUS:
        return _GPUS[arch]
    number = re.fullmatch(r"sm_([0-9]+)[a-z]?", arch)
    capability = int(number[1]) if number else 50
    return GpuTarget(arch, capability, "", frozenset(), 48 << 10, 48 << 10, 65536, 16, 0, False, False)
