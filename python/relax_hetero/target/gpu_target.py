"""Table of facts about NVIDIA GPUs, for the choice of layouts and kernels.

A row is an architecture. A target gets the row of its ``arch``; other GPUs get a generic row without tensor cores and
with limits that every GPU since 2014 meets. To add a GPU, add a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import tvm

from .element_types import HALF_TYPES, TF32

WARP = 32  # threads of a warp
ALL_LANES = 0xFFFFFFFF  # mask of the lanes of a warp
WARPGROUP = 128  # threads of a warpgroup (four warps), which issues wgmma
MAX_BLOCK_THREADS = 1024  # maximum number of threads of a block on every NVIDIA GPU

VECTOR_BYTES = 16
"""Maximum bytes of a thread's memory access."""
NVLINK_BYTES_PER_SECOND = 300e9
"""Rate of a link between two GPUs in one direction; two H200s measured 369 GB/s for 256 MB."""


@dataclass(frozen=True, eq=False)
class GpuModel:
    """Timings of a GPU, for the choice of tilings of products and attention, in cycles of a multiprocessor."""

    # Cycles of a wgmma k-step of 128 bytes, by rows and columns of the tile, if it is not bound by loads; fitted to
    # convolutions and products of 100 to 50,000 rows.
    step_cycles: Mapping[tuple[int, int], int]
    # Cost model with swapped operands: cycles per step, per 32 elements of the tile, per row and column of the tile,
    # and additionally per row and column with two warpgroups.
    swapped_step_cycles: tuple[float, float, float, float]
    gathered_step_factor: float  # relative duration of a step whose operands are gathered through registers
    # Fraction of a step's cycles that a second resident block adds (one computes while the other waits for loads).
    second_block_step_fraction: float
    l2_bytes_per_cycle: int  # bytes that all multiprocessors together load from L2 per cycle
    # Number of concurrent blocks by cluster size: blocks of a cluster share a GPC, whose number of multiprocessors is
    # not a multiple of every size. Measured with 8 queries and 8,192 keys of width 128: 16 heads split over 6 blocks
    # take 21 us, over 7 blocks 34 us; 32 heads over 3 blocks 39 us, over 4 blocks 49 us.
    resident_blocks: Mapping[int, int]
    launch_cycles: int  # cycles of a launch with its first loads
    store_cycles: int  # cycles before a block stores its first result
    stored_elements_per_cycle: float  # elements of the result that a block stores per cycle
    # Cycles of a cluster's start, and additionally for each further block.
    cluster_cycles: int
    cluster_block_cycles: int
    exchanged_bytes_per_cycle: float  # bytes of sums that a block reads from other blocks of its cluster per cycle


H200 = GpuModel(
    step_cycles={
        (64, 64): 370,
        (64, 128): 415,
        (64, 192): 600,
        (64, 256): 690,
        (128, 64): 540,
        (128, 128): 780,
        (128, 192): 1150,
        (128, 256): 1195,
    },
    swapped_step_cycles=(90, 0.67, 0.74, 0.4),
    gathered_step_factor=4,
    second_block_step_fraction=0.7,
    l2_bytes_per_cycle=7000,
    resident_blocks={1: 132, 2: 132, 3: 117, 4: 120, 5: 90, 6: 96, 7: 84, 8: 96},
    launch_cycles=1600,
    store_cycles=250,
    stored_elements_per_cycle=12,
    cluster_cycles=950,
    cluster_block_cycles=300,
    exchanged_bytes_per_cycle=18,
)


NARROW_COLUMNS = 4
"""Maximum columns of a product that plain threads compute, as they read its rows once: tiles are mostly padding.

16 maps of 256 x 256 pixels with 32 channels take 543 us on an H200 on tensor cores for one result channel.
"""


@dataclass(frozen=True)
class GpuTarget:
    """Facts about a CUDA target."""

    arch: str  # the target's architecture: "sm_90a"
    capability: int  # compute capability; 90 stands for 9.0
    # Tensor-core instruction: "wgmma" (operands in shared memory), "mma" (``mma.sync``, operands in registers) or ""
    # (none used).
    tensor: str
    mma_types: frozenset[str]  # element types that ``mma.sync`` or wgmma multiply
    shared_bytes: int  # maximum shared memory of a block
    shared_bytes_sm: int  # shared memory of a multiprocessor, for all its blocks
    registers: int  # 32-bit registers of a multiprocessor
    multiprocessors: int  # number of multiprocessors of the largest model, and of blocks of persistent kernels
    cache_bytes: int  # L2 cache of the largest model
    async_copies: bool  # whether ``cp.async`` is available (from 8.0)
    bulk_copies: bool  # whether bulk copies, mbarrier and clusters are available (from 9.0)
    has_ptx: bool = True  # whether it is an NVIDIA GPU (`tir.cuda.core.dialect`)
    block_threads: int = MAX_BLOCK_THREADS  # maximum threads of a block
    model: GpuModel = H200  # timings; by default those of the H200
    stages_tiles: bool = True  # whether tiles of products without tensor cores are staged in shared memory

    @property
    def overlaps_launches(self) -> bool:
        """True if programmatic dependent launch is available (from 9.0)."""
        return self.capability >= 90

    def multiplies(self, lhs: str, rhs: str, acc: str) -> bool:
        """Return whether the tensor cores multiply elements of these types and accumulate in `acc`.

        Both operands have one type, or are bytes of any signedness, or any float8. Bytes accumulate in int32, tf32 in
        float32, and others in any float of up to 32 bits.
        """
        families = (_BYTES, _FP8)
        is_one_family = lhs == rhs or any(lhs in family and rhs in family for family in families)
        sums = {"int32"} if lhs in _BYTES else {"float32"} if lhs == TF32 else {"float32", *HALF_TYPES}
        return bool(self.tensor) and is_one_family and {lhs, rhs} <= self.mma_types and acc in sums


_BYTES = frozenset(("int8", "uint8"))
_AMPERE_TYPES = _BYTES | {"float16", "bfloat16", TF32}
_FP8 = frozenset(("float8_e4m3fn", "float8_e5m2"))

# Sources: CUDA C++ programming guide, table of technical specifications per compute capability (shared memory,
# registers); PTX ISA (required targets of instructions); data sheets of A100, L40, H100 and H200 (multiprocessors).
# sm_90 is code for H100 without wgmma: the same instructions as 8.9, with Hopper's limits.
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


# Compute capabilities with architecture-specific instructions, such as wgmma, which need the suffix "a".
_ARCH_SPECIFIC = frozenset({"9.0"})


def arch_of(capability: str) -> str:
    """The architecture to compile for: ``sm_90a`` for compute capability "9.0"."""
    return f"sm_{capability.replace('.', '')}{'a' if capability in _ARCH_SPECIFIC else ''}"


def gpu_target_of(target: tvm.target.Target) -> GpuTarget:
    """The facts of a target; CUDA with an unknown ``arch``, and other kinds, get SIMT kernels and minimum limits."""
    if "arch" not in target.attrs:
        shared_bytes = int(target.attrs.get("max_shared_memory_per_block", 16 << 10))
        return _other_gpu(shared_bytes, device_facts_of(target))
    return _gpu_target_of(str(target.attrs["arch"]))


OTHER_BLOCK_THREADS = 256  # maximum threads of a block on GPUs of other kinds than CUDA


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about a GPU without an architecture, as its driver states them; ``model`` of its target has their text."""

    units: int = 16  # multiprocessors (compute units)
    is_cpu: bool = False  # whether it is a CPU
    in_host_memory: bool = False  # whether its memory is the host's, and readable without calls of the driver
    # Whether shared (local) memory is memory of its own instead of a part of global memory.
    has_local_memory: bool = True
    subgroups: tuple[int, ...] = ()  # numbers of threads that run together; empty if unknown
    cache_line: int = 0  # bytes of a cache line; 0 if unknown
    has_command_buffers: bool = False  # whether the driver records command buffers
    has_byte_dots: bool = False  # whether it has instructions for dot products of bytes

    def __str__(self) -> str:
        parts = [
            f"{self.units}{' CPU' * self.is_cpu} units{' in host memory' * self.in_host_memory}",
            "" if self.has_local_memory else _NO_LOCAL_MEMORY,
            f"sub-groups of {' '.join(map(str, self.subgroups))}" if self.subgroups else "",
            f"cache lines of {self.cache_line}" if self.cache_line else "",
            _COMMAND_BUFFERS if self.has_command_buffers else "",
            _BYTE_DOTS if self.has_byte_dots else "",
        ]
        return ", ".join(filter(None, parts))

    @classmethod
    def parse(cls, text: str) -> DeviceFacts:
        """Facts with this text; unknown parts are left out, and without units all have their defaults."""
        first, *parts = text.split(", ")
        units = _UNITS.fullmatch(first)
        if units is None:
            return cls()
        subgroups = next((part for part in parts if part.startswith("sub-groups of ")), "")
        line = next((part for part in parts if part.startswith("cache lines of ")), "")
        return cls(
            int(units[1]), units[2] is not None, units[3] is not None, _NO_LOCAL_MEMORY not in parts,
            tuple(map(int, re.findall("[0-9]+", subgroups))), int((re.findall("[0-9]+", line) or [0])[0]),
            _COMMAND_BUFFERS in parts, _BYTE_DOTS in parts,
        )  # fmt: skip


_UNITS = re.compile(r"([1-9][0-9]*)( CPU)? units( in host memory)?")
_NO_LOCAL_MEMORY, _COMMAND_BUFFERS, _BYTE_DOTS = "local memory in global memory", "command buffers", "byte dot products"


def device_facts_of(target: tvm.target.Target) -> DeviceFacts:
    """The facts in a target's ``model``."""
    return DeviceFacts.parse(str(target.attrs.get("model", "")))


@cache
def _other_gpu(shared_bytes: int, facts: DeviceFacts) -> GpuTarget:
    """A GPU whose kernels are written in another language than CUDA.

    Drivers tell the memory of a group only; a multiprocessor has at least twice as much on NVIDIA's GPUs, and on AMD's
    since 2019. Without local memory all groups share the caches.
    """
    return GpuTarget(
        "", 0, "", frozenset(), shared_bytes, 2 * shared_bytes, 65536, facts.units, 0, False, False, False,
        OTHER_BLOCK_THREADS, stages_tiles=facts.has_local_memory or facts.is_cpu,
    )  # fmt: skip


@cache
def _gpu_target_of(arch: str) -> GpuTarget:
    if arch in _GPUS:
        return _GPUS[arch]
    number = re.fullmatch(r"sm_([0-9]+)[a-z]?", arch)
    capability = int(number[1]) if number else 50
    return GpuTarget(arch, capability, "", frozenset(), 48 << 10, 48 << 10, 65536, 16, 0, False, False)


# Compute capability -> (peak float32 flop/s outside tensor cores, bytes/s), newest first.
_PEAKS = {
    100: (75e12, 8.0e12),
    90: (67e12, 4.0e12),
    89: (60e12, 0.9e12),
    86: (30e12, 0.8e12),
    80: (19e12, 1.9e12),
    70: (14e12, 0.9e12),
    0: (5e12, 0.3e12),
}

# Speed of tensor cores with 16-bit floats relative to float32 arithmetic, by instruction.
_TENSOR_SPEEDUPS = {"wgmma": 12.0, "mma": 6.0}


def peaks_of(target: tvm.target.Target) -> tuple[float, float, float]:
    """Peak float32 flop/s, bytes/s, and speed-up of tensor cores with 16-bit floats."""
    number = int("".join(filter(str.isdigit, str(target.attrs.get("arch", "")))) or 0)
    flops, bandwidth = next(figures for capability, figures in _PEAKS.items() if number >= capability)
    return flops, bandwidth, _TENSOR_SPEEDUPS.get(gpu_target_of(target).tensor, 1.0)
