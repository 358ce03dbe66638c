"""Common names of a CPU's instruction sets, from LLVM's features.

LLVM's name of a CPU may mislead: a hypervisor can report another model number, so that LLVM calls a Xeon with AMX
"rocketlake" and lists additional features.
"""

from __future__ import annotations

from collections.abc import Collection

# The first row of each group whose features are present counts. Sources: Intel SDM, AMD64 manuals, Arm ARM.
_GROUPS: tuple[tuple[tuple[str, tuple[str, ...]], ...], ...] = (
    (
        ("AVX-512", ("avx512f", "avx512bw", "avx512vl", "avx512dq")),
        ("AVX2", ("avx2", "fma", "f16c")),
        ("AVX", ("avx",)),
        ("SSE4.2", ("sse4.2",)),
        ("SSE2", ("sse2",)),
        ("SVE2", ("sve2",)),
        ("SVE", ("sve",)),
        ("NEON", ("neon",)),
        ("RVV", ("v",)),
    ),
    (("VNNI", ("avx512vnni",)), ("VNNI", ("avxvnni",))),
    (("DotProd", ("dotprod",)),),
    (("I8MM", ("i8mm",)),),
    (("BF16", ("avx512bf16",)), ("BF16", ("avxneconvert",)), ("BF16", ("bf16",))),
    (("FP16", ("avx512fp16",)), ("FP16", ("fullfp16",))),
    (("AMX", ("amx-tile",)),),
    (("SME", ("sme",)),),
)


def instruction_names(features: Collection[str]) -> tuple[str, ...]:
    """Names of instruction sets, the vectors first: ``("AVX-512", "VNNI", "BF16", "FP16", "AMX")``.

    `features`: LLVM's features, from ``llvm_get_cpu_features``.
    """
    present = frozenset(features)
    names = (next((name for name, required in group if present.issuperset(required)), None) for group in _GROUPS)
    return tuple(name for name in names if name is not None)
