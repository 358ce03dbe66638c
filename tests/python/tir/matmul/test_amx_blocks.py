"""Products with weights in blocks by tile registers (Intel AMX), emulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm

from relax_hetero.encoding.block_formats import FILE_FORMATS
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import Epilogue, QuantizedMatmulProblem
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.tir.matmul.quantized_matmul import quantized_matmul_kernel
from seeds import fresh_rng
from tir.kernel_runs import runs_here
from tir.matmul.block_problems import assert_close, call, integers, of_file, plain, problem_of
from tir.matmul.test_block_experts import call as call_experts
from tir.matmul.test_block_experts import expected
from tir.matmul.test_block_experts import problem_of as experts_problem
from tir.matmul.tile_emulator import emulated, emulator, products_so_far
from tir.products_of import AVX512

pytestmark = pytest.mark.skipif(not runs_here("avx512"), reason="emulated tiles stand beside vectors of AVX-512")

XEON = tvm.target.Target({"kind": "llvm", "mcpu": "sapphirerapids", "num-cores": 2})
PANEL = 32

TWO_TERMS = 3e-5
"""Rounding of weights and activations that are sums of two bfloat16 terms."""


def _kernel(problem: QuantizedMatmulProblem) -> Callable[..., None]:
    emulator()
    kernel = emulated(quantized_matmul_kernel(problem, cpu_target_of(XEON)))
    return tvm.compile(tvm.IRModule({"block_product": kernel}), target=AVX512)["block_product"]


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "block", "zeros"),
    [
        (33, 70, 100, 32, "uint8"),
        (16, 32, 2300, 1536, ""),
        (70, 37, 77, 128, ""),
        (600, 40, 1056, 96, "uint8"),
        (40, 33, 80, 16, "float32"),
        (20, 40, 96, 40, ""),
        (20, 40, 96, 8, "float32"),
    ],
)
def test_sizes(rows, columns, depth, block, zeros):
    """Ragged ends, blocks shorter and longer than a step, and more rows than a block of them has."""
    rng = fresh_rng()
    weights = integers(rng, columns, depth, block, zeros)
    x = rng.standard_normal((rows, depth), "float32")
    function, before = _kernel(problem_of(weights, rows, PANEL)), products_so_far()
    assert_close(call(function, x, weights.packed(PANEL), columns), x, weights.numbers, TWO_TERMS)
    assert products_so_far() > before


@pytest.mark.parametrize(("rows", "columns", "superblocks"), [(16, 70, 1), (37, 33, 3)])
@pytest.mark.parametrize("form", FILE_FORMATS)
@pytest.mark.sampled(3)
def test_formats_of_files(form, rows, columns, superblocks):
    """Two terms of all weights; one of bfloat16. Plain weights are exact, and so are their activations."""
    depth = (
        superblocks * FILE_FORMATS[form].superblock_size
        if FILE_FORMATS[form].superblock_size > 1
        else (67, 0, 1100)[superblocks - 1]
    )
    weights, x = of_file(form, columns, depth), fresh_rng().standard_normal((rows, depth), "float32")
    function, before = _kernel(problem_of(weights, rows, PANEL)), products_so_far()
    rounding = 1e-6 if FILE_FORMATS[form].is_plain else TWO_TERMS
    assert_close(call(function, x, weights.packed(PANEL), columns), x, weights.numbers, rounding)
    assert products_so_far() > before


def rounded(array: np.ndarray) -> np.ndarray:
    """Numbers as bfloat16."""
    return array.astype("float32").astype(ml_dtypes.bfloat16).astype("float64")


@pytest.mark.parametrize("form", ["q4_k", "q5_0", "q8_0", "f16"])
def test_activations_of_few_bits(form):
    """Numbers and weights are rounded to bfloat16; plain weights and their activations are not."""
    depth = 2 * max(64, FILE_FORMATS[form].superblock_size)
    weights, x = of_file(form, 37, depth), 3 + fresh_rng().standard_normal((33, depth), "float32")
    function, before = _kernel(problem_of(weights, 33, PANEL, activation_bits=8)), products_so_far()
    read, numbers = (array if form == "f16" else rounded(array) for array in (x, weights.numbers))
    # A dequantized weight between two bfloat16 may be rounded up or down.
    assert_close(call(function, x, weights.packed(PANEL), 37), read, numbers, 2e-6 if form == "f16" else 2e-5)
    assert products_so_far() > before


@pytest.mark.parametrize("rows", ["", "chunk"])
@pytest.mark.parametrize(("tokens", "used"), [(70, 2), (9, 1)])
def test_experts(tokens, used, rows):
    """An expert with several pairs of tiles, one with a row, one without, a row of none; few rows take vectors."""
    rng, experts, columns, depth = fresh_rng(), 4, 40, 96
    weights = of_file("q4_0", experts * columns, depth)
    problem = replace(experts_problem(weights, experts, tokens, used, PANEL), rows=rows, activation_bits=16)
    function, before = _kernel(problem), products_so_far()
    x = rng.standard_normal((tokens, 1, 1, depth), "float32")
    index = np.where(rng.random((tokens, used)) < 0.7, 2, 0).astype("int32")
    index[-1], index[1] = 3, -1
    want, size = expected(x, weights, experts, index)
    actual = call_experts(function, x, weights, experts, PANEL, index)
    takes_tiles = tokens > 9
    own = index >= 0
    assert np.isnan(actual[~own]).all()
    np.testing.assert_array_less(np.abs(actual - want)[own], (TWO_TERMS * size)[own])
    assert (products_so_far() > before) == takes_tiles


def test_symbolic_rows_choose_when_they_are_known():
    rng = fresh_rng()
    weights = integers(rng, 70, 96, 32, "uint8")
    function = _kernel(problem_of(weights, "s0", PANEL))
    for rows in (0, 1, 15, 16, 45):
        x, before = rng.standard_normal((rows, 96), "float32"), products_so_far()
        assert_close(call(function, x, weights.packed(PANEL), 70), x, weights.numbers, TWO_TERMS)
        assert (products_so_far() > before) == (rows > 15)


@pytest.mark.slow
def test_rows_of_a_kind_have_the_same_bits():
    """Chunks take tiles, and decode steps vectors, however many rows they have."""
    weights, results = of_file("q4_0", 40, 64), {}
    x = fresh_rng().standard_normal((20, 64), "float32")
    for kind, rows in (("decode", 20), ("chunk", 5), ("chunk", 20)):
        problem, before = replace(problem_of(weights, rows, PANEL), rows=kind), products_so_far()
        results[kind, rows] = call(_kernel(problem), x[:rows], weights.packed(PANEL), 40)
        assert (products_so_far() > before) == (kind == "chunk")
        assert_close(results[kind, rows], x[:rows], weights.numbers, TWO_TERMS)
    np.testing.assert_array_equal(results["chunk", 5], results["chunk", 20][:5])


def test_epilogues_and_infinite_numbers():
    """With one term of a weight, an infinite activation gives infinity."""
    rng = fresh_rng()
    weights = integers(rng, 45, 64, 32)
    extra = (plain((45,), "float32", ("n",)), plain((20, 45), "float32", ("m", "n")))
    epilogue = Epilogue(Expression.parse("add(relu(add(x0, x1)), x2)"), extra)
    problem = replace(problem_of(weights, 20, PANEL, activation_bits=8), epilogue=epilogue)
    x, bias, more = (rng.standard_normal(shape, "float32") for shape in ((20, 64), (45,), (20, 45)))
    x[3, 5], x[7, 0] = np.inf, np.nan
    got = call(_kernel(problem), x, [*weights.packed(PANEL), bias, more], 45)
    with np.errstate(invalid="ignore"):
        sums = rounded(x) @ rounded(weights.numbers).T
        want = np.maximum(sums + bias, 0) + more
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
