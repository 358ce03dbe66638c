"""The instruction sets of a CPU by the names that people use, from LLVM's names of its features.

LLVM's name of a whole CPU may mislead: a hypervisor can report a CPU by the number of another one, and LLVM then calls
a Xeon with tile registers "rocketlake", with the rest as features beyond that name.
"""

from __future__ import annotations

from collections.abc import Collection

# Of each group the first row all of whose features there are. Sources: Intel SDM, AMD64 manuals, Arm ARM.
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

    Parameters
    ----------
    features : collection of str
        LLVM's, as ``llvm_get_cpu_features`` gives them for a target; none give no name.
    """
    has = frozenset(features)
    first = (next((name for name, needed in group if has.issuperset(needed)), None) for group in _GROUPS)
    return tuple(name for name in first if name is not None)
