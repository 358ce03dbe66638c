"""Rows of weights in panels as numbers: every format, ragged ends, indices at the ends and outside."""

import numpy as np
import pytest
import tvm

from relax_hetero.encoding.block_formats import FILE_FORMATS
from relax_hetero.encoding.block_panels import Panels
from relax_hetero.encoding.block_weights import panel_columns
from relax_hetero.encoding.problem import BlockRowsProblem
from relax_hetero.tir.matmul.block_rows import block_rows_kernel
from seeds import fresh_rng
from tir.kernel_runs import NAMES, cpu_named, kernel
from tir.matmul.block_problems import integers, of_file, plain

pytestmark = pytest.mark.sampled(5)


def check(weights, index, name, folder, count=None):
    panel, depth = panel_columns(cpu_named(name)), weights.source.depth
    (packed,) = weights.packed(panel)
    rows = len(index) if count is None else count
    problem = BlockRowsProblem(
        (plain(packed.shape, "uint8", Panels.index_map),),
        plain((rows,), str(index.dtype), ("m",)),
        plain((rows, depth), "float32", ("m", "k")),
        weights.form,
        weights.columns,
    )
    function = kernel(block_rows_kernel(problem, cpu_named(name)), name, folder)
    result = tvm.runtime.tensor(np.full((len(index), depth), np.nan, "float32"))
    function(tvm.runtime.tensor(packed), tvm.runtime.tensor(index), result)
    want = weights.numbers[np.clip(index, 0, weights.columns - 1)]
    # A fused multiply-add rounds once where the definition rounds twice.
    np.testing.assert_allclose(result.numpy(), want, rtol=1e-6, atol=1e-6 * np.abs(want).max(initial=0))


@pytest.mark.parametrize("form", FILE_FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_formats_of_files(name, form, tmp_path):
    depth = 2 * FILE_FORMATS[form].superblock_size if FILE_FORMATS[form].superblock_size > 1 else 67
    check(of_file(form, 69, depth), np.array([68, 0, 31, 32, 32, -1, 1000, 7], "int32"), name, tmp_path)


@pytest.mark.parametrize(("bits", "block", "zeros"), [(2, 16, ""), (4, 32, "uint8"), (8, 40, "float32")])
@pytest.mark.parametrize("name", NAMES)
def test_integers_and_symbolic_counts(name, bits, block, zeros, tmp_path):
    rng = fresh_rng()
    weights = integers(rng, 40, 100, block, zeros, bits)
    check(weights, rng.integers(0, 40, 2000), name, tmp_path, count="s0")
