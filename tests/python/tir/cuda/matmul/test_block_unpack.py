"""Weights of few bits unpacked into tiles on GPUs, by the interpreter of their kernels, and products of them."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.target import Target

from encoding.random_blocks import random_rows
from gpu_interpreter import run
from relax_hetero.encoding.block_formats import FILE_FORMATS, dequantize_rows
from relax_hetero.encoding.problem import BlockUnpackProblem, Operand
from relax_hetero.errors import EncodingError
from relax_hetero.resolvers.cuda_resolver import CudaResolver
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.cuda.matmul.block_unpack import block_unpack_kernel
from tir.cuda.gpu_runs import needs_gpu, run_on_gpu
from tir.cuda.matmul.test_file_formats_on_gpus import FORMATS, case

TARGET = Target({"kind": "cuda", "arch": "sm_90a"})
GPU = gpu_target_of(TARGET)


def unpack_case(name, dtype, n=84, depth=512):
    """A problem, its arguments, and what the tiles hold: ``(k, n)`` in float64."""
    problem, arguments, _ = case(name, 128, n, depth, dtype)
    layout = CudaResolver().unpacked_layout(problem, TARGET)
    unpack = BlockUnpackProblem(problem, Operand((depth, n), dtype, ("k", "n"), layout))
    form = FILE_FORMATS[name]
    return unpack, arguments[1:], dequantize_rows(random_rows(name, n, depth), form, depth).astype("float64")


def check(unpack, tiles, want):
    """Compare the columns that exist; later ones are padding."""
    n, depth = want.shape
    rows = np.arange(n)
    unpacked = tiles.reshape(-1, depth // 64, 64, 8, 8)[rows // 64, :, rows % 64]
    chunks = np.arange(8)[None] ^ (rows % 8)[:, None]
    unpacked = np.take_along_axis(unpacked, chunks[:, None, :, None], 2).reshape(n, depth).astype("float64")
    unit = 2.0 ** (-8 if unpack.result.dtype == "bfloat16" else -11)
    # A minimum and a scaled quant, which nearly cancel, are added in float32.
    np.testing.assert_allclose(unpacked, want, rtol=unit, atol=1e-6 + 2.0**-22 * np.abs(want).max())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_formats(name, dtype):
    unpack, arguments, want = unpack_case(name, dtype)
    tiles = np.full((2, 8, 64, 64), np.nan, numpy_dtype(dtype))
    run(block_unpack_kernel(unpack, GPU), *arguments, tiles)
    check(unpack, tiles, want)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", FORMATS)
def test_on_a_gpu(name):
    unpack, arguments, want = unpack_case(name, "float16")
    check(unpack, run_on_gpu(block_unpack_kernel(unpack, GPU), arguments, (2, 8, 64, 64), "float16"), want)


def test_depths_that_fill_no_tiles():
    problem, *_ = case("q4_0", 128, 64, 96, "float16")
    assert CudaResolver().unpacked_layout(problem, TARGET) is None
    layout = CudaResolver().unpacked_layout(case("q4_0", 128, 64, 128, "float16")[0], TARGET)
    with pytest.raises(EncodingError, match="found 96 weights of a row in blocks of 32"):
        block_unpack_kernel(BlockUnpackProblem(problem, Operand((96, 64), "float16", ("k", "n"), layout)), GPU)
