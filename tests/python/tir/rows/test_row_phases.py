"""Work on rows in the kernel of the product before it: in the tasks that make whole rows, and in a phase of its own."""

from dataclasses import replace

import numpy as np
import pytest
import tvm

from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import Epilogue, RowPhase
from relax_hetero.encoding.row_program import RowProgram
from seeds import fresh_rng
from tir.kernel_runs import runs_here
from tir.products_of import AVX2, AVX512, SSE, C, operand, plain_problem, run_kernel

NORM = (
    "r0 = mean(x1); r1 = mean(square(subtract(x1, r0)));"
    " add(multiply(divide(subtract(x1, r0), sqrt(add(r1, 0.01))), x0), x2)"
)
SOFTMAX = "r0 = max(add(x0, x1)); r1 = sum(exp(subtract(add(x0, x1), r0))); divide(exp(subtract(add(x0, x1), r0)), r1)"
TARGETS = {"avx512": AVX512, "avx2": AVX2, "sse": SSE, "c": C}
ONE_CORE = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 1})
# Split by columns, by rows, into one task; rows and columns that fill no tile, more rows than a block, one row.
SIZES = [(128, 64, 384), (300, 64, 200), (5, 7, 33), (1, 3, 500), (130, 17, 16)]


def norm(x, scale, shift):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 0.01) * scale + shift


def run_norm(target, sizes, symbolic=""):
    m, k, n = sizes
    rng = fresh_rng()
    a, b = rng.standard_normal((m, k)).astype("float32"), rng.standard_normal((k, n)).astype("float32")
    residual = rng.standard_normal((m, n)).astype("float32")
    bias, scale, shift = rng.standard_normal((3, n)).astype("float32")
    symbols = {name: symbol for name, symbol in (("m", "s2"), ("n", "s3")) if name in symbolic}
    row = operand((n,), "float32", "n", symbols=symbols)
    full = operand((m, n), "float32", "mn", symbols=symbols)
    epilogue = Epilogue(Expression.parse("add(add(x0, x1), x2)"), (row, full))
    problem = plain_problem(target, sizes, symbolic=symbolic, epilogue=epilogue)
    problem = replace(problem, rows=RowPhase(RowProgram.parse(NORM), 1, (row, row)))
    actual = run_kernel(problem, target, [a, b, bias, residual, scale, shift], (m, n))
    wide = [array.astype("float64") for array in (a, b, bias, residual, scale, shift)]
    want = norm(wide[0] @ wide[1] + wide[2] + wide[3], wide[4], wide[5])
    np.testing.assert_allclose(actual, want, rtol=1e-3, atol=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in TARGETS if runs_here(name)])
@pytest.mark.parametrize("sizes", SIZES)
def test_norm_of_a_residual(name, sizes):
    run_norm(TARGETS[name], sizes)


@pytest.mark.skipif(not runs_here("avx512"), reason="needs AVX-512")
@pytest.mark.parametrize("symbolic", ["m", "mn"])
@pytest.mark.parametrize("sizes", [(128, 64, 384), (37, 5, 70)])
def test_symbolic_rows_and_columns(symbolic, sizes):
    run_norm(AVX512, sizes, symbolic)


@pytest.mark.skipif(not runs_here("avx512"), reason="needs AVX-512")
def test_one_core():
    run_norm(ONE_CORE, (200, 33, 100))


@pytest.mark.skipif(not runs_here("avx512"), reason="needs AVX-512")
@pytest.mark.parametrize("batches", [1, 3])
def test_softmax_of_masked_scores_in_batches(batches):
    """The mask broadcasts over batches; the sum with it waits in the result's rows between the passes."""
    b, m, k, n = batches, 20, 32, 77
    rng = fresh_rng()
    q, kt = rng.standard_normal((b, m, k)).astype("float32"), rng.standard_normal((b, k, n)).astype("float32")
    mask = np.where(rng.random((m, n)) < 0.3, -np.inf, 0).astype("float32")
    mask[:, 0] = 0
    problem = replace(
        plain_problem(AVX512, (m, k, n)),
        lhs=operand(q.shape, "float32", ("b0", "m", "k")),
        rhs=operand(kt.shape, "float32", ("b0", "k", "n")),
        result=operand((b, m, n), "float32", ("b0", "m", "n")),
        rows=RowPhase(RowProgram.parse(SOFTMAX), 0, (operand((m, n), "float32", "mn"),)),
    )
    actual = run_kernel(problem, AVX512, [q, kt, mask], (b, m, n))
    scores = q.astype("float64") @ kt.astype("float64") + mask
    e = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(actual, e / e.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)
