"""Main loops of products as the compiler leaves them: the right instructions, and nothing spilled to the stack."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import tvm

from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.encoding.problem import Epilogue
from tir.products_of import AVX2, AVX512, SYMBOLS, compile_kernel, operand, plain_problem

pytestmark = pytest.mark.sampled(4)

F32 = ("float32", "float32", "float32")
TYPES = {
    "f32": F32,
    "f64": ("float64",) * 3,
    "bf16": ("bfloat16", "bfloat16", "float32"),
    "f16": ("float16", "float16", "float32"),
    "u8s8": ("uint8", "int8", "int32"),
    "s8s8": ("int8", "int8", "int32"),
}
MULTIPLY = {
    ("avx512", "f32"): "vfmadd231ps",
    ("avx512", "f64"): "vfmadd231pd",
    ("avx512", "bf16"): "vdpbf16ps",
    ("avx512", "f16"): "vfmadd231ps",
    ("avx512", "u8s8"): "vpdpbusd",
    ("avx512", "s8s8"): "vpdpbusd",
    ("avx2", "f32"): "vfmadd231ps",
    ("avx2", "f64"): "vfmadd231pd",
    ("avx2", "bf16"): "vfmadd231ps",
    ("avx2", "f16"): "vfmadd231ps",
    ("avx2", "u8s8"): "vpmaddwd",
    ("avx2", "s8s8"): "vpmaddwd",
}


def innermost_loops(assembly: str) -> list[list[str]]:
    """Instructions of every loop without another label in it."""
    loops, body, label = [], [], ""
    for line in assembly.splitlines():
        text = re.split("# |//", line)[0].strip()
        start = re.fullmatch(r"(\.L\w+):", text)
        if start:
            label, body = start[1], []
        elif text and not text.startswith("."):
            body.append(text)
            jump = re.fullmatch(r"(?:j\w+|b\.\w+|cbn?z\s+\w+,)\s+(\.L\w+)", text)
            if jump and jump[1] == label:
                loops.append(body)
                label, body = "", []
    return loops


def main_loops(target: tvm.target.Target, problem, instruction: str) -> list[list[str]]:
    assembly = compile_kernel(problem, target).mod.inspect_source("asm")
    return [loop for loop in innermost_loops(assembly) if any(line.startswith(instruction) for line in loop)]


def spills(loop: list[str]) -> list[str]:
    """Vector instructions that touch the stack (where it is realigned for vectors, they are found from %rsp too)."""
    return [line for line in loop if re.search(r"\(%rsp", line) and re.search(r"%[xyz]mm", line)]


def test_a_spill_is_seen() -> None:
    text = ".LBB0_1:\n vmovups 64(%rsp), %zmm1\n vfmadd231ps %zmm1, %zmm2, %zmm3\n jne .LBB0_1\n"
    (loop,) = innermost_loops(text)
    assert spills(loop) == ["vmovups 64(%rsp), %zmm1"]


@pytest.mark.parametrize("symbolic", ["", "m", "mkn"], ids=["static", "m", "all"])
@pytest.mark.parametrize(("name", "kind"), MULTIPLY)
def test_no_main_loop_spills(name: str, kind: str, symbolic: str) -> None:
    target = {"avx512": AVX512, "avx2": AVX2}[name]
    problem = plain_problem(target, (127, 512, 511), TYPES[kind], symbolic=symbolic)
    loops = main_loops(target, problem, MULTIPLY[name, kind])
    assert loops
    assert [spills(loop) for loop in loops] == [[]] * len(loops)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_narrow_forms_keep_the_machine_busy(rows: int) -> None:
    """At least 8 accumulators are in flight, whatever the number of rows."""
    loops = main_loops(AVX512, plain_problem(AVX512, (rows, 512, 512)), "vfmadd231ps")
    accumulators = max(len({line.split()[-1] for line in loop if line.startswith("vfmadd")}) for loop in loops)
    assert accumulators >= 8


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("target", [AVX512, AVX2], ids=["avx512", "avx2"])
def test_few_rows_over_a_row_major_right_operand_do_not_spill(target: tvm.target.Target, rows: int) -> None:
    problem = plain_problem(target, (rows, 512, 1000))
    problem = replace(problem, rhs=replace(problem.rhs, layout=PackedLayout.identity(2)))
    loops = main_loops(target, problem, "vfmadd231ps")
    assert loops
    assert not any(spills(loop) for loop in loops)


@pytest.mark.parametrize("k", [512, 2048])
def test_epilogues_do_not_make_the_main_loop_spill(k: int) -> None:
    bias, residual = (
        operand((768,), "float32", "n", symbols=SYMBOLS),
        operand((128, 768), "float32", "mn", symbols=SYMBOLS),
    )
    epilogue = Epilogue(Expression.parse("add(gelu(add(x0, x1)), x2)"), (bias, residual))
    problem = plain_problem(AVX512, (128, k, 768), symbolic="mn", epilogue=epilogue)
    loops = main_loops(AVX512, problem, "vfmadd231ps")
    assert loops
    assert not any(spills(loop) for loop in loops)
