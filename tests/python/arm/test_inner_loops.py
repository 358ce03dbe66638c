"""Share of multiply-adds in the main loops of products for AArch64, counted in the machine code; no timing."""

from __future__ import annotations

import re

import pytest
import tvm

from relax_hetero.encoding.problem import Window
from relax_hetero.tir.attention.attention import attention_kernel
from relax_hetero.tir.conv.convolution import conv_kernel
from tir.attention_runs import case, problem_of
from tir.convolutions_of import conv_problem
from tir.kernel_runs import assembly, cpu_named, target_of
from tir.products_of import compile_kernel, plain_problem
from tir.test_assembly import innermost_loops

F32, BF16 = ("float32",) * 3, ("bfloat16", "bfloat16", "float32")
F16, S8, U8 = ("float16", "float16", "float32"), ("int8", "int8", "int32"), ("uint8", "int8", "int32")
MULTIPLY = re.compile(r"f?mla|fmlal2?|[su]dot|us?mmla|smmla|bfmmla")
SHAPE = (256, 512, 512)


def main_loop(mcpu: str, types: tuple[str, str, str], shape: tuple[int, int, int] = SHAPE) -> list[str]:
    """Instructions of the loop with the most products."""
    target = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu, "num-cores": 2})
    assembly = compile_kernel(plain_problem(target, shape, types), target).mod.inspect_source("asm")
    return max(innermost_loops(assembly), key=products)


def products(loop: list[str]) -> int:
    """Number of instructions that multiply and add."""
    return sum(bool(MULTIPLY.match(line)) for line in loop)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mcpu", "types", "instruction", "share"),
    [
        ("cortex-a72", F32, "fmla", 0.94),
        ("cortex-a72", BF16, "fmla", 0.94),  # widened before the tiles that use a panel
        ("cortex-a72", U8, "mla", 0.94),
        ("neoverse-n1", F16, "fmla", 0.94),
        ("neoverse-n1", S8, "sdot", 0.94),
        ("neoverse-n1", U8, "sdot", 0.94),
        ("neoverse-v2", F32, "fmla", 0.94),  # SVE2 of 128 bits, whose rate is that of NEON
        ("neoverse-v2", F16, "fmlal", 0.96),
        ("neoverse-v2", S8, "smmla", 0.90),
        ("neoverse-v2", U8, "usmmla", 0.90),
        ("neoverse-v2", BF16, "bfmmla", 0.90),
    ],
)
def test_nine_tenths_of_a_main_loop_multiply(mcpu, types, instruction, share):
    loop = main_loop(mcpu, types)
    assert products(loop) >= share * len(loop)
    assert any(line.startswith(instruction) for line in loop)
    assert not any("[sp" in line for line in loop)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mcpu", "types", "instruction", "share"),
    [
        ("neoverse-v1", F32, "fmla", 0.81),  # five loads of a vector for 24 products: 83 % at most
        ("neoverse-v1", S8, "smmla", 0.69),  # ten loads: 71 % at most
        ("fujitsu-monaka", F16, "fmlal", 0.89),
        ("a64fx", F16, "fmla", 0.81),
        ("a64fx", U8, "sdot", 0.81),
    ],
)
def test_main_loops_of_wide_vectors_of_sve(mcpu, types, instruction, share):
    loop = main_loop(mcpu, types)
    assert products(loop) >= share * len(loop)
    assert all(re.match(instruction + r"[bt]?\s+z", line) for line in loop if MULTIPLY.match(line))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "types", "share"),
    [
        ("dotprod", F32, 0.75),
        ("dotprod", S8, 0.78),
        ("dotprod", U8, 0.71),
        ("i8mm", F16, 0.62),
        ("i8mm", S8, 0.57),
        ("i8mm", BF16, 0.53),
    ],
)
def test_convolutions_load_factors_of_several_steps(name, types, share):
    problem = conv_problem(name, (64, 64), (28, 28), (Window(3, before=1, after=1),) * 2, dtype=types)
    loop = max(innermost_loops(assembly(conv_kernel(problem, cpu_named(name)), name)), key=products)
    assert products(loop) >= share * len(loop)
    assert not any("[sp" in line for line in loop)


def test_attention_multiplies_in_three_quarters():
    target = target_of("dotprod")
    function = attention_kernel(problem_of(case(1, 12, 12, 128, 128, 64, 64)), cpu_named("dotprod"))
    text = tvm.compile(tvm.IRModule({"attention": function}), target=target).mod.inspect_source("asm")
    loops = [loop for loop in innermost_loops(text) if products(loop) > 0.5 * len(loop)]
    assert len(loops) == 2  # scores and values
    assert all(products(loop) >= 0.75 * len(loop) for loop in loops)


@pytest.mark.parametrize("rows", [4, 7, 8])
def test_few_rows_multiply_in_three_quarters(rows):
    loop = main_loop("neoverse-v2", F32, (rows, 512, 512))
    assert products(loop) >= (0.75 if rows < 8 else 0.85) * len(loop)
