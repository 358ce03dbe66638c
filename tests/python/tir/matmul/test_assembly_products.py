"""Main loops of every row of the table of products, on machines that need not be this one."""

from __future__ import annotations

import re

import pytest
import tvm

from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.target.dot_instructions import DOT_INSTRUCTIONS, dot_instruction_for
from tir.products_of import compile_kernel, plain_problem
from tir.test_assembly import innermost_loops, spills

X86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "num-cores": 2}
ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "num-cores": 2}
TARGETS = {
    "avx512": {**X86, "mcpu": "x86-64-v4", "mattr": ["+avx512vnni", "+avx512bf16"]},
    "avx512 base": {**X86, "mcpu": "x86-64-v4"},
    "avx2 vnni": {**X86, "mcpu": "x86-64-v3", "mattr": ["+avxvnni"]},
    "avx2": {**X86, "mcpu": "x86-64-v3"},
}
TYPES = sorted({dot.types for dot in DOT_INSTRUCTIONS})
CASES = [
    (name, types)
    for name, target in TARGETS.items()
    for types in TYPES
    if dot_instruction_for(cpu_target_of(tvm.target.Target(target)), *types) is not None
]
# Anywhere in a line: VNNI without AVX-512 is written "{vex} vpdpbusd".
MULTIPLY = r"vfmadd|vpdpbusd|vpdpwssd|vdpbf16ps|vpmaddwd|vpmulld|vpmullq|vpmuludq"


def _assembly(target: tvm.target.Target, types: tuple[str, str, str]) -> str:
    return compile_kernel(plain_problem(target, (64, 256, 128), types), target).mod.inspect_source("asm")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "types"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_no_type_spills(name, types):
    target = tvm.target.Target(TARGETS[name])
    loops = innermost_loops(_assembly(target, types))
    counts = [sum(bool(re.search(MULTIPLY, line)) for line in loop) for loop in loops]
    assert max(counts) >= 4
    main = [loop for loop, count in zip(loops, counts, strict=True) if 2 * count >= max(counts)]
    assert [spills(loop) for loop in main] == [[]] * len(main)


@pytest.mark.parametrize(
    ("features", "types", "instruction"),
    [
        ([], ("float32",) * 3, "fmla"),
        ([], ("int8", "int8", "int32"), "mla"),
        (["+dotprod"], ("int8", "int8", "int32"), "sdot"),
        (["+dotprod"], ("uint8", "int8", "int32"), "sdot"),
        (["+i8mm"], ("int8", "int8", "int32"), "smmla"),
        (["+i8mm"], ("uint8", "uint8", "int32"), "ummla"),
        (["+i8mm"], ("uint8", "int8", "int32"), "usmmla"),
        (["+i8mm"], ("int8", "uint8", "int32"), "usmmla"),
        (["+bf16"], ("bfloat16", "bfloat16", "float32"), "bfmmla"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value).replace("++", "+"),
)
def test_aarch64_uses_its_instructions_and_does_not_spill(features, types, instruction):
    target = tvm.target.Target({**ARM, "mattr": ["+neon", *features]})
    assert dot_instruction_for(cpu_target_of(target), *types).isas != ("generic",)
    counts = [
        (sum(bool(re.match(rf"{instruction}\s+v\d+\.4s", line)) for line in loop), loop)
        for loop in innermost_loops(_assembly(target, types))
    ]
    used, main = max(counts, key=lambda count: count[0])
    assert used >= 16
    assert [line for line in main if re.search(r"\b[qv]\d+.*\[sp", line)] == []


@pytest.mark.parametrize("features", [[], ["+sve2"]], ids=["neon", "sve2"])
def test_sve2_stores_the_ends_of_rows_by_a_mask(features):
    """NEON writes the elements of the last vector of a row one by one, each after a branch."""
    target = tvm.target.Target({**ARM, "mattr": ["+neon", "+bf16", *features]})
    problem = plain_problem(target, (64, 256, 126), ("bfloat16", "bfloat16", "float32"))
    assembly = compile_kernel(problem, target).mod.inspect_source("asm")
    assert len(re.findall(r"\sbfmmla\s+v\d+\.4s", assembly)) >= 16
    assert bool(re.search(r"\sst1w\s+{ z\d+\.s }, p\d", assembly)) == bool(features)
