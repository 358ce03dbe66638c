"""Products with short sums in float16: their error, what leaves float16's range, and the instructions.

Numbers come from the same kernels, compiled for a CPU whose compiler rounds every product and every sum to float16.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm

from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.encoding.problem import MatmulProblem
from relax_hetero.target.cpu_target import CpuTarget, cpu_target_of
from relax_hetero.target.dot_instructions import dot_instruction_for
from relax_hetero.target.tiles import tile_columns
from relax_hetero.tir.matmul.matmul import matmul_kernel
from seeds import fresh_rng
from tir.kernel_runs import runs_here, target_of
from tir.products_of import SYMBOLS, compile_kernel, operand, plain_problem, run_stored
from tir.test_assembly import innermost_loops, spills

XEON = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "sapphirerapids", "num-cores": 1}
HALVES = ("float16", "float16", "float32")

needs_avx512 = pytest.mark.skipif(not runs_here("avx512"), reason="another machine's instructions")


def short_sums_cpu() -> CpuTarget:
    """A machine of these tests, as if it multiplied and added float16."""
    cpu = cpu_target_of(target_of("avx512"))
    return replace(cpu, features=cpu.features | {"avx512fp16"})


def _problem(sizes: tuple[int, int, int], symbolic: str = "", result: str = "float32") -> MatmulProblem:
    m, k, n = sizes
    cpu, symbols = short_sums_cpu(), {name: SYMBOLS[name] for name in symbolic}
    dot = dot_instruction_for(cpu, *HALVES)
    layout = PackedLayout((1, 0), (1, 0), (tile_columns(cpu, "float32"), dot.k0))
    return MatmulProblem(
        operand((m, k), "float16", "mk", symbols=symbols),
        operand((k, n), "float16", "kn", layout, symbols),
        operand((m, n), result, "mn", symbols=symbols),
        "float32",
    )


def _run(problem: MatmulProblem, *arrays: np.ndarray) -> np.ndarray:
    target = target_of("avx512")
    built = tvm.compile(tvm.IRModule({"matmul": matmul_kernel(problem, short_sums_cpu())}), target=target)
    stored = [op.layout.pack(array) for op, array in zip(problem.parameters, arrays, strict=False)]
    return run_stored(built, problem, target, stored, (len(arrays[0]), arrays[1].shape[1]))


def _random(sizes: tuple[int, int, int], scale: float = 1.0) -> list[np.ndarray]:
    (m, k, n), rng = sizes, fresh_rng()
    return [(rng.standard_normal(shape) * scale).astype("float16") for shape in ((m, k), (k, n))]


def _error(got: np.ndarray, arrays: list[np.ndarray]) -> float:
    """Root mean square of the error, relative to that of the exact product."""
    want = arrays[0].astype("float64") @ arrays[1].astype("float64")
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


@needs_avx512
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("sizes", "symbolic"),
    [
        ((1, 1025, 33), ""),
        ((3, 300, 32), ""),
        ((2, 31, 5), ""),
        pytest.param((9, 600, 40), "", marks=pytest.mark.slow),
        pytest.param((5, 33, 20), "m", marks=pytest.mark.slow),
    ],
)
def test_the_error_is_small_in_range_and_that_of_float32_out_of_it(sizes, symbolic):
    problem = _problem(sizes, symbolic)
    arrays = _random(sizes)
    assert 1e-5 < _error(_run(problem, *arrays), arrays) < 1.5e-3
    for scale in (1e3, 3e-4):
        arrays = _random(sizes, scale)
        assert _error(_run(problem, *arrays), arrays) < 2e-6


@needs_avx512
def test_a_row_major_right_operand():
    """Few rows, an odd k, and columns that do not fill a vector; in the range of fp16 and out of it."""
    sizes = (3, 301, 33)
    packed = _problem(sizes)
    problem = replace(packed, rhs=replace(packed.rhs, layout=PackedLayout.identity(2)))
    for scale, limit in ((1.0, 1.5e-3), (1e3, 2e-6)):
        arrays = _random(sizes, scale)
        assert _error(_run(problem, *arrays), arrays) < limit


@needs_avx512
def test_only_tiles_out_of_range_are_computed_again():
    sizes = (16, 300, 64)
    arrays = _random(sizes)
    arrays[0][8:] *= 1000
    arrays[1][:, 32:] *= 100
    got, want = _run(_problem(sizes), *arrays), arrays[0].astype("float64") @ arrays[1].astype("float64")
    assert np.abs(got - want)[8:, 32:].max() < 1e-5 * np.abs(want).max()
    assert _error(got[:8, :32], [arrays[0][:8], arrays[1][:, :32]]) > 1e-5


@needs_avx512
def test_infinities_and_nan_propagate_as_in_float32():
    sizes = (9, 100, 40)
    arrays = _random(sizes)
    arrays[0][1, 3], arrays[0][2, 50], arrays[1][70, 39] = np.inf, -np.inf, np.nan
    with np.errstate(invalid="ignore"):
        want = arrays[0].astype("float32") @ arrays[1].astype("float32")
    got = _run(_problem(sizes, result="float16"), *arrays)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.where(np.isinf(got), got, 0), np.where(np.isinf(want), want, 0))


@needs_avx512
def test_no_terms_and_zeros_give_zeros():
    for k in (0, 40):
        arrays = [np.zeros((3, k), "float16"), np.zeros((k, 35), "float16")]
        np.testing.assert_array_equal(_run(_problem((3, k, 35)), *arrays), 0)


@pytest.mark.parametrize("sizes", [(64, 1024, 128), (512, 1024, 1024), (1, 1024, 1024), (64, 100, 128)])
def test_main_loops_multiply_and_add_float16_and_do_not_spill(sizes):
    target = tvm.target.Target(XEON)
    code = compile_kernel(plain_problem(target, sizes, HALVES), target).mod.inspect_source("asm")
    code = re.sub(r"(?m)^\.Ltmp\d+:\n", "", code)  # labels of debug information
    main = [loop for loop in innermost_loops(code) if any("vfmadd231ph" in line for line in loop)]
    assert main
    for loop in main:
        assert not spills(loop)
        assert not any(re.search("vcvt|vaddph|vmulph|vpbroadcastw", line) for line in loop)
