"""Cost of each element type on each device."""

import pytest
import tvm

from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.target.dot_instructions import dot_instruction_for
from relax_hetero.target.product_rates import QUANTIZED, product_rate

X86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
XEON = {**X86, "mcpu": "sapphirerapids"}
TARGETS = {
    "zen": {**X86, "mcpu": "znver5"},
    "xeon": XEON,
    "xeon without tiles": {**XEON, "mattr": ["-amx-tile", "-amx-bf16", "-amx-int8"]},
    "xeon under an older name": {**X86, "mcpu": "rocketlake", "mattr": ["+avx512bf16"]},
    "sse": {**X86, "mcpu": "x86-64"},
    "arm": {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v1"},
    "hopper": {"kind": "cuda", "arch": "sm_90a"},
    "old gpu": {"kind": "cuda", "arch": "sm_61"},
    "rocm": {"kind": "rocm", "mcpu": "gfx90a"},
}
BFLOAT16 = {
    "zen": 2.0, "xeon": 6.0, "xeon without tiles": 0.6, "xeon under an older name": 0.6, "sse": 1.0, "arm": 4.0,
    "hopper": 8.0, "old gpu": 1.0, "rocm": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_rates_of_types(name):
    target = tvm.target.Target(TARGETS[name])
    assert product_rate(target, "float32") == 1.0
    assert product_rate(target, "bfloat16") == BFLOAT16[name]
    assert product_rate(target, "tfloat32") == (4.0 if name == "hopper" else 1.0)


@pytest.mark.parametrize(
    ("mcpu", "rate"), [("znver5", 2.5), ("alderlake", 2.5), ("haswell", 1.8), ("nehalem", 2.0), ("skylake-avx512", 1.0)]
)
def test_rates_of_block_quantized_weights(mcpu, rate):
    assert product_rate(tvm.target.Target({**X86, "mcpu": mcpu}), QUANTIZED) == rate


def test_xeons_widen_pairs_of_bfloat16():
    for name, row in (("zen", "dpbf16"), ("xeon without tiles", "bf16"), ("xeon under an older name", "bf16")):
        cpu = cpu_target_of(tvm.target.Target(TARGETS[name]))
        assert dot_instruction_for(cpu, "bfloat16", "bfloat16", "float32").name == row
