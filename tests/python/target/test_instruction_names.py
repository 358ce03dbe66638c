"""Names of instruction sets, of CPUs that LLVM knows and of one that a hypervisor reports as another."""

import json

import pytest
import tvm
from tvm.target import codegen

from relax_hetero.report.text.target_text import target_text
from relax_hetero.target.instruction_names import instruction_names

XEON = ("AVX-512", "VNNI", "BF16", "FP16", "AMX")
# LLVM 20's description of an Emerald Rapids whose hypervisor reports model 167.
REPORTED = {"mcpu": "rocketlake", "mattr": ["+amx-tile", "+amx-int8", "+amx-bf16", "+avx512bf16", "+avx512fp16"]}
X86, ARM = "x86_64-linux-gnu", "aarch64-linux-gnu"


@pytest.mark.parametrize(
    ("triple", "cpu", "expected"),
    [
        (X86, {"mcpu": "sapphirerapids"}, XEON),
        (X86, REPORTED, XEON),
        (X86, {"mcpu": "rocketlake"}, ("AVX-512", "VNNI")),
        (X86, {"mcpu": "znver4"}, ("AVX-512", "VNNI", "BF16")),
        (X86, {"mcpu": "znver4", "mattr": ["-avx512f"]}, ("AVX2",)),
        (X86, {"mcpu": "x86-64-v4"}, ("AVX-512",)),
        (X86, {"mcpu": "alderlake"}, ("AVX2", "VNNI")),
        (X86, {"mcpu": "sandybridge"}, ("AVX",)),
        (X86, {"mcpu": "x86-64-v2"}, ("SSE4.2",)),
        (X86, {"mcpu": "x86-64"}, ("SSE2",)),
        (ARM, {"mcpu": "cortex-a53"}, ("NEON",)),
        (ARM, {"mcpu": "neoverse-n1"}, ("NEON", "DotProd", "FP16")),
        (ARM, {"mcpu": "neoverse-v2"}, ("SVE2", "DotProd", "I8MM", "BF16", "FP16")),
    ],
)
def test_instructions_not_chips_are_named(triple, cpu, expected):
    config = {"kind": "llvm", "mtriple": triple, **cpu}
    features = codegen.llvm_get_cpu_features(tvm.target.Target(config))
    assert instruction_names([str(name) for name in features]) == expected
    assert target_text(json.dumps(config)) == f"llvm {', '.join(expected)}"


def test_other_names_are_unchanged():
    assert instruction_names([]) == ()
    assert target_text('{"kind": "cuda", "arch": "sm_90a"}') == "cuda sm_90a"
    assert target_text('{"kind": "c"}') == "c"
    assert target_text("llvm") == "llvm"
    assert target_text("{") == "{"
