"""Table of facts about CPUs, for the choice of layouts and kernels.

A row is an instruction set; a target gets the first row whose features it has. To add a CPU, add a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import tvm
from tvm.target import codegen

from .cpu_cores import TASKS_OF_UNLIKE_CORES, UNLIKE_CORES


@dataclass(frozen=True)
class InstructionSet:
    """Vector instructions of one level of an architecture."""

    name: str
    arch: str  # LLVM's name of the architecture: "x86_64", "aarch64", or "" for any
    features: tuple[str, ...]  # required LLVM features
    vector_bytes: int  # bytes of a vector register; 0: vectorization is left to the compiler
    registers: int  # number of vector registers


# The best first. Sources: Intel SDM and AMD64 manuals; Arm ARM (Advanced SIMD).
INSTRUCTION_SETS: tuple[InstructionSet, ...] = (
    InstructionSet("avx512", "x86_64", ("avx512f", "avx512bw", "avx512vl", "avx512dq"), 64, 32),
    InstructionSet("avx2", "x86_64", ("avx2", "fma", "f16c"), 32, 16),
    InstructionSet("sse", "x86_64", ("sse2",), 16, 16),
    InstructionSet("neon", "aarch64", ("neon",), 16, 32),
    InstructionSet("generic", "", (), 0, 16),
)


QUICK_BF16 = "quick-avx512bf16"  # feature besides LLVM's: vdpbf16ps is faster than widening to float32 and multiplying

ZEN4 = "zen4"
"""Feature besides LLVM's: vectors of 512 bits are loaded, and computed, as two halves; see also `weight_prefetch`."""

ZEN5 = "zen5"  # feature besides LLVM's, for `weight_prefetch`

WIDE_SVE = "wide-sve"
"""Feature besides LLVM's: vectors of SVE have the known length `CpuTarget.sve_bytes`, more than 16 bytes."""

# Sources: Arm Neoverse V1 Software Optimization Guide; Fujitsu A64FX Microarchitecture Manual; Fujitsu's announcement
# of MONAKA. Others have vectors of 128 bits, whose rate is that of NEON.
_SVE_BYTES = {"neoverse-v1": 32, "fujitsu-monaka": 32, "a64fx": 64}

# CPUs with a slow vdpbf16ps. A Xeon (Sapphire Rapids) reaches 105 to 112 Gop/s with it, 148 with widened pairs, and 240
# in float32; a Zen 5 is twice as fast with it as in float32. Virtual machines report Xeons under older names.
_SLOW_BF16_CPUS = frozenset(
    """cooperlake sapphirerapids emeraldrapids graniterapids graniterapids-d diamondrapids skylake-avx512 cascadelake
    cannonlake icelake-client icelake-server rocketlake tigerlake""".split()
)


@dataclass(frozen=True)
class WeightPrefetch:
    """Prefetches of weights that are read once."""

    distance: int  # bytes between reads and prefetches
    max_bits: int  # maximum number of bits of a prefetched weight
    max_rows: int  # maximum number of rows in float32 for which weights are prefetched


@dataclass(frozen=True)
class CpuTarget:
    """Facts about a CPU target."""

    isa: InstructionSet
    # All LLVM features of the target ("avx512vnni", "dotprod", ...), `QUICK_BF16`, `ZEN4`, `ZEN5`, `WIDE_SVE`.
    features: frozenset[str]
    cores: int  # number of tasks of parallel loops: one for each thread; more for cores of unlike speed
    kind: str  # target kind: "llvm" or "c"
    threads: int = 1  # ``num-cores`` of the target, by default 1
    sve_bytes: int = 0  # bytes of a vector register of SVE, which packed panels are multiplied by; 0 without `WIDE_SVE`

    @property
    def weight_prefetch(self) -> WeightPrefetch:
        """Prefetches of weights by products.

        On a Zen 4, a prefetch just before the read makes the CPU's own prefetcher follow a panel of weights: a row by
        120 MB of q4_k reads 31 GB/s with distances of 64 to 512 bytes, 24 with 2,048, 11 without.

        On a Zen 5, a row by 8 MB of f16 reads 41 GB/s in order, 33 from four places at a time (from the L3 cache, 66
        and 88), and 26 from four without prefetches; 8 rows by them take 0.27 ms, which is the time of their
        multiply-adds, 0.4 with a distance of 2,048, and 0.65 without, or 0.73 if the weights do not begin at a multiple
        of 256 bytes; 32 rows 1.07 and 1.2 ms, 256 rows 9.5 and 9.6. A row by 2.4 MB of q4_k takes 0.06 ms, and 0.07
        with 2,048.

        On a Xeon, weights of 4 to 6 bits take two thirds of the time with prefetches. 8-bit quants are unpacked faster
        than they arrive, and prefetching takes line fill buffers from the CPU's own prefetcher: 178 MB were read in
        18.5 ms, and in 15.8 without.
        """
        if ZEN5 in self.features:
            return WeightPrefetch(8192, max_bits=16, max_rows=256)
        return WeightPrefetch(256 if ZEN4 in self.features else 2048, max_bits=7, max_rows=16)

    def lanes(self, dtype: str) -> int:
        """Number of elements of a vector register; 1 without vectors."""
        return max(1, self.isa.vector_bytes * 8 // tvm.DataType(dtype).bits)


def cpu_target_of(target: tvm.target.Target) -> CpuTarget:
    """The facts of a CPU target; unknown CPUs get the generic row."""
    return _cpu_target_of(str(target))


@cache
def _cpu_target_of(text: str) -> CpuTarget:
    target = tvm.target.Target(text)
    threads = max(1, int(target.attrs.get("num-cores", 1)))
    cores = threads * TASKS_OF_UNLIKE_CORES if threads > 1 and UNLIKE_CORES in map(str, target.keys) else threads
    if target.kind.name != "llvm":
        return CpuTarget(INSTRUCTION_SETS[-1], frozenset(), cores, target.kind.name, threads)
    features = frozenset(str(f) for f in codegen.llvm_get_cpu_features(target))
    mcpu = str(target.attrs.get("mcpu", ""))
    is_slow = mcpu in _SLOW_BF16_CPUS or "amx-tile" in features
    if "avx512bf16" in features and not is_slow:
        features |= {QUICK_BF16}
    features |= {"znver4": {ZEN4}, "znver5": {ZEN5}}.get(mcpu, set())
    sve_bytes = _SVE_BYTES.get(mcpu, 0) if "sve" in features else 0
    if sve_bytes:
        features |= {WIDE_SVE}
    triple = str(codegen.llvm_get_system_triple() if not target.attrs.get("mtriple") else target.attrs["mtriple"])
    if "linux" not in triple:
        # Kernels request permission to use AMX with a system call of Linux.
        features = frozenset(name for name in features if not name.startswith("amx"))
    arch = triple.split("-")[0].replace("arm64", "aarch64")
    for isa in INSTRUCTION_SETS:
        if isa.arch in ("", arch) and features.issuperset(isa.features):
            return CpuTarget(isa, features, cores, "llvm", threads, sve_bytes)
    raise AssertionError("the generic row matches every target")
