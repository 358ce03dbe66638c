"""Rows of weights in fragments as numbers, by the interpreter of GPU kernels: formats, ragged ends, indices outside."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_interpreter import run
from relax_hetero.encoding.block_formats import FILE_FORMATS
from relax_hetero.encoding.block_weights import Fragments
from relax_hetero.encoding.problem import BlockRowsProblem
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.matmul.block_gather import block_rows_kernel
from seeds import fresh_rng
from tir.cuda.gpu_runs import needs_gpu, run_on_gpu
from tir.cuda.matmul.test_block_product_on_gpus import GPU, OLD_GPU
from tir.matmul.block_problems import integers, of_file, plain

INDICES = np.array([68, 0, 8, 15, 16, -1, 1000, 7], "int32")


def check(weights, index, gpu=GPU, count=None, is_on_gpu=False):
    packed, depth = Fragments().pack(weights.source), weights.source.depth
    rows = len(index) if count is None else count
    problem = BlockRowsProblem(
        tuple(plain(array.shape, str(array.dtype), Fragments.index_map) for array in packed),
        plain((rows,), str(index.dtype), ("m",)),
        plain((rows, depth), "float32", ("m", "k")),
        weights.form,
        weights.columns,
    )
    function = block_rows_kernel(problem, gpu)
    assert is_one_launch(function)
    result = np.full((len(index), depth), np.nan, "float32")
    if is_on_gpu:
        result = run_on_gpu(function, [*packed, index], result.shape, "float32")
    else:
        run(function, *packed, index, result)
    want = weights.numbers[np.clip(index, 0, weights.columns - 1)]
    # Minimums are corrected for quants that are centred.
    np.testing.assert_allclose(result, want, rtol=1e-6, atol=1e-6 * np.abs(want).max(initial=0))


def of_form(name):
    form = FILE_FORMATS[name]
    return of_file(name, 69, 2 * form.superblock_size if form.superblock_size > 1 else 67)


@pytest.mark.parametrize("name", FILE_FORMATS)
def test_formats_of_files(name):
    check(of_form(name), INDICES)


def test_older_gpus():
    check(of_form("q4_k"), INDICES, OLD_GPU)


@pytest.mark.parametrize(("bits", "block", "zeros"), [(4, 32, "uint8"), (8, 48, "float32")])
def test_integers_and_symbolic_counts(bits, block, zeros):
    rng = fresh_rng()
    check(integers(rng, 40, 100, block, zeros, bits), rng.integers(0, 40, 200), count="s0")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", FILE_FORMATS)
def test_on_a_gpu(name):
    check(of_form(name), INDICES, is_on_gpu=True)
