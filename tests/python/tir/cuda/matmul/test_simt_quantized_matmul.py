"""Products and gathers of weights in panels without tensor cores, by the interpreter of GPU kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpu_interpreter import run
from relax_hetero.encoding.block_formats import FILE_FORMATS
from relax_hetero.encoding.block_panels import Panels
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import BlockRowsProblem, Epilogue
from relax_hetero.errors import EncodingError
from relax_hetero.tir.cuda.matmul.simt_quantized_matmul import (
    COLUMNS,
    simt_block_rows_kernel,
    simt_quantized_matmul_kernel,
)
from seeds import fresh_rng
from tir.matmul.block_problems import assert_close, integers, of_file, plain, problem_of


def product(weights, x, problem=None, others=()):
    """The result, whose memory was poisoned."""
    problem = problem or problem_of(weights, len(x), COLUMNS)
    result = np.full((len(x), weights.columns), np.nan, "float32")
    run(simt_quantized_matmul_kernel(problem), x, *weights.packed(COLUMNS), *others, result)
    return result


@pytest.mark.parametrize("name", FILE_FORMATS)
def test_formats(name):
    form = FILE_FORMATS[name]
    weights = of_file(name, 45, max(40, form.superblock_size) // form.superblock_size * form.superblock_size)
    x = fresh_rng().standard_normal((3, weights.source.depth)).astype("float32")
    assert_close(product(weights, x), x, weights.numbers)


@pytest.mark.parametrize("rows, depth, block, zeros", [(1, 43, 16, ""), (11, 70, 32, "uint8")])
def test_ragged_integers_with_an_epilogue(rows, depth, block, zeros):
    rng = fresh_rng()
    weights = integers(rng, 33, depth, block, zeros)
    x, bias = rng.standard_normal((rows, depth)).astype("float32"), rng.standard_normal(33).astype("float32")
    epilogue = Epilogue(Expression.parse("maximum(add(x0, x1), 0)"), (plain((33,), "float32", ("n",)),))
    problem = replace(problem_of(weights, rows, COLUMNS), epilogue=epilogue)
    result = product(weights, x, problem, [bias])
    want = np.maximum(x.astype("float64") @ weights.numbers.T + bias, 0)
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-4)


def test_experts():
    """Each pair has a matrix of its own; rows of negative numbers are not written."""
    experts, columns, depth = 3, 40, 256
    weights = of_file("q4_k", experts * columns, depth)
    (panels,) = Panels(COLUMNS).pack(weights.source, experts)
    index = np.array([[2, 0], [-1, 1]], "int32")
    x = fresh_rng().standard_normal((2, 1, 1, depth)).astype("float32")
    problem = replace(
        problem_of(weights, 4, COLUMNS),
        lhs=plain(x.shape, "float32", ("b0", "b1", "m", "k")),
        weights=(plain(panels.shape, "uint8", Panels.index_map),),
        result=plain((2, 2, 1, columns), "float32", ("b0", "b1", "m", "n")),
        experts=experts,
        index=plain(index.shape, "int32", ("b0", "b1")),
    )
    result = np.full((2, 2, 1, columns), -7.0, "float32")
    run(simt_quantized_matmul_kernel(problem), x, panels, index, result)
    for token, used in np.ndindex(2, 2):
        number = index[token, used]
        if number < 0:
            assert (result[token, used] == -7).all()
            continue
        assert_close(result[token, used], x[token, 0], weights.numbers[number * columns :][:columns])


@pytest.mark.parametrize("name", ["q4_k", "iq4_nl", "f16"])
def test_gathered_rows(name):
    weights = of_file(name, 70, max(40, FILE_FORMATS[name].superblock_size) // 32 * 32)
    depth, index = weights.source.depth, np.array([69, 0, -5, 33, 80], "int64")
    (panels,) = weights.packed(COLUMNS)
    problem = BlockRowsProblem(
        (plain(panels.shape, "uint8", Panels.index_map),),
        plain(index.shape, "int64", ("i",)),
        plain((len(index), depth), "float32", ("i", "k")),
        weights.form,
        70,
    )
    result = np.full((len(index), depth), np.nan, "float32")
    run(simt_block_rows_kernel(problem), panels, index, result)
    np.testing.assert_array_equal(result, weights.numbers[index.clip(0, 69)].astype("float32"))


def test_other_layouts_are_refused():
    with pytest.raises(EncodingError, match="expected float32, and panels of 32 columns"):
        simt_quantized_matmul_kernel(problem_of(of_file("q8_0", 16, 64), 1, 16))
