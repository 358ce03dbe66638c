"""Main loops of convolutions in low precision, on machines that need not be this one."""

from __future__ import annotations

import re

import pytest
import tvm

from relax_hetero.encoding.problem import Window
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.tir.conv.convolution import conv_kernel
from tir.convolutions_of import conv_problem
from tir.matmul.test_assembly_products import ARM, TARGETS
from tir.test_assembly import innermost_loops, spills

SAME = Window(3, before=1, after=1)
INSTRUCTIONS = {
    ("avx512", ("uint8", "int8", "int32")): "vpdpbusd",
    ("avx512", ("int8", "int8", "int32")): "vpdpbusd",
    ("avx512", ("bfloat16", "bfloat16", "float32")): "vdpbf16ps",
    ("avx512", ("float16", "float16", "float32")): "vfmadd",
    ("avx512 base", ("uint8", "int8", "int32")): "vpmaddwd",
    ("avx2 vnni", ("int8", "int8", "int32")): "vpdpbusd",
    ("avx2", ("int8", "int8", "int32")): "vpmaddwd",
    ("avx2", ("bfloat16", "bfloat16", "float32")): "vfmadd",
}


def _assembly(target: tvm.target.Target, types: tuple[str, str, str]) -> str:
    cpu = cpu_target_of(target)
    problem = conv_problem(cpu, (64, 64), (28, 28), (SAME, SAME), dtype=types)
    module = tvm.IRModule({"kernel": conv_kernel(problem, cpu).with_attr("global_symbol", "kernel")})
    return tvm.compile(module, target=target).mod.inspect_source("asm")


@pytest.mark.parametrize(
    ("name", "types"), INSTRUCTIONS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_sums_stay_in_registers(name, types):
    instruction = INSTRUCTIONS[name, types]
    loops = innermost_loops(_assembly(tvm.target.Target(TARGETS[name]), types))
    counts = [sum(instruction in line for line in loop) for loop in loops]
    assert max(counts) >= 6
    main = [loop for loop, count in zip(loops, counts, strict=True) if 2 * count >= max(counts)]
    assert [spills(loop) for loop in main] == [[]] * len(main)


@pytest.mark.parametrize(
    ("features", "types", "instruction"),
    [
        (["+dotprod"], ("int8", "int8", "int32"), "sdot"),
        (["+dotprod"], ("uint8", "int8", "int32"), "sdot"),
        (["+i8mm"], ("uint8", "int8", "int32"), "usmmla"),
        (["+bf16"], ("bfloat16", "bfloat16", "float32"), "bfmmla"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value).replace("++", "+"),
)
def test_aarch64_uses_its_instructions_and_does_not_spill(features, types, instruction):
    target = tvm.target.Target({**ARM, "mattr": ["+neon", *features]})
    loops = innermost_loops(_assembly(target, types))
    counts = [sum(bool(re.match(rf"{instruction}\s+v\d+\.4s", line)) for line in loop) for loop in loops]
    assert max(counts) >= 16
    main = [loop for loop, count in zip(loops, counts, strict=True) if 2 * count >= max(counts)]
    assert [line for loop in main for line in loop if re.search(r"\b[qv]\d+.*\[sp", line)] == []
