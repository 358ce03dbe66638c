"""Facts about CPUs that layouts and kernels are chosen by, in one table.

A row is an instruction set; a target gets the first row all of whose features it has. Adding a CPU is adding a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import tvm
from tvm.target import codegen


@dataclass(frozen=True)
class InstructionSet:
    """Vector instructions of one level of an architecture.

    Attributes
    ----------
    arch : str
        LLVM's name of the architecture: "x86_64", "aarch64", or "" for any.
    features : tuple of str
        LLVM features that a target needs for this row.
    vector_bytes : int
        Bytes of a vector register; 0: no vector code is written, the compiler may do as it likes.
    registers : int
        Vector registers.
    """

    name: str
    arch: str
    features: tuple[str, ...]
    vector_bytes: int
    registers: int


# The best first. Sources: Intel SDM and AMD64 manuals; Arm ARM (Advanced SIMD).
INSTRUCTION_SETS: tuple[InstructionSet, ...] = (
    InstructionSet("avx512", "x86_64", ("avx512f", "avx512bw", "avx512vl", "avx512dq"), 64, 32),
    InstructionSet("avx2", "x86_64", ("avx2", "fma", "f16c"), 32, 16),
    InstructionSet("sse", "x86_64", ("sse2",), 16, 16),
    InstructionSet("neon", "aarch64", ("neon",), 16, 32),
    InstructionSet("generic", "", (), 0, 16),
)


QUICK_BF16 = "quick-avx512bf16"
"""Beside LLVM's features: the CPU multiplies pairs of bfloat16 faster than it widens and multiplies them."""

# Whose vdpbf16ps is slow: a Xeon (Sapphire Rapids) makes 105 to 112 Gop/s by it, 148 of widened pairs, 240 of float32;
# a Zen 5 makes twice as much by it as of float32. Virtual machines show Xeons under older names.
_SLOW_BF16_CPUS = frozenset(
    """cooperlake sapphirerapids emeraldrapids graniterapids graniterapids-d diamondrapids skylake-avx512 cascadelake
    cannonlake icelake-client icelake-server rocketlake tigerlake""".split()
)


@dataclass(frozen=True)
class CpuTarget:
    """A CPU target as kernels see it.

    Attributes
    ----------
    features : frozenset of str
        Every LLVM feature of the target ("avx512vnni", "dotprod", ...), for instructions beyond the row's, and
        `QUICK_BF16`.
    cores : int
        ``num-cores`` of the target, 1 where it has none: how many parts parallel loops are cut into.
    kind : str
        Target kind: "llvm" or "c".
    """

    isa: InstructionSet
    features: frozenset[str]
    cores: int
    kind: str

    def lanes(self, dtype: str) -> int:
        """Elements of a vector register, 1 on a CPU without vectors."""
        return max(1, self.isa.vector_bytes * 8 // tvm.DataType(dtype).bits)


def cpu_target_of(target: tvm.target.Target) -> CpuTarget:
    """The facts of a CPU target; targets that are no CPU of the table get the generic row."""
    return _cpu_target_of(str(target))


@cache
def _cpu_target_of(text: str) -> CpuTarget:
    target = tvm.target.Target(text)
    cores = max(1, int(target.attrs.get("num-cores", 1)))
    if target.kind.name != "llvm":
        return CpuTarget(INSTRUCTION_SETS[-1], frozenset(), cores, target.kind.name)
    features = frozenset(str(f) for f in codegen.llvm_get_cpu_features(target))
    is_slow = str(target.attrs.get("mcpu", "")) in _SLOW_BF16_CPUS or "amx-tile" in features
    if "avx512bf16" in features and not is_slow:
        features |= {QUICK_BF16}
    triple = str(codegen.llvm_get_system_triple() if not target.attrs.get("mtriple") else target.attrs["mtriple"])
    if "linux" not in triple:
        # Kernels ask for permission to use tile registers by a system call of Linux.
        features = frozenset(name for name in features if not name.startswith("amx"))
    arch = triple.split("-")[0].replace("arm64", "aarch64")
    for isa in INSTRUCTION_SETS:
        if isa.arch in ("", arch) and features.issuperset(isa.features):
            return CpuTarget(isa, features, cores, "llvm")
    raise AssertionError("the last row fits every target")
