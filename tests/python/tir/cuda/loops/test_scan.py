"""Cumulative sums and products of GPUs, run as CPU code, against numpy."""

import sys
from pathlib import Path

import numpy as np
import pytest

from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.loops.scan import (
    ScanProblem,
    scan_kernel,
    tiles_kernel,
    tiles_of,
    totals_kernel,
    totals_problem,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from on_cpu import run


@pytest.mark.sampled(3)
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("kind", ["sum", "prod"])
@pytest.mark.parametrize(
    "shape, axis, dtype",
    [
        ((3, 2500), 1, "float32"),  # by blocks, chunks and a tail
        ((1024,), 0, "int64"),
        ((4, 70, 5), 1, "float32"),  # by threads
        ((8, 20), 1, "float32"),
        ((2, 1500), 1, "float16"),
        ((0, 50), 1, "float32"),
    ],
)
def test_scans(shape, axis, dtype, kind, exclusive):
    kernel = scan_kernel(ScanProblem(shape, axis, dtype, dtype, kind, exclusive))
    assert is_one_launch(kernel)
    rng = np.random.default_rng(0)
    x = (rng.integers(-2, 3, shape) if kind == "sum" else rng.choice([-1, 1], shape)).astype(dtype)
    y = np.full(shape, 77, dtype)
    run(kernel, x, y)
    expected = (np.cumsum if kind == "sum" else np.cumprod)(x.astype("float64"), axis)
    if exclusive:
        expected = np.roll(expected, 1, axis)
        first = tuple(slice(0, 1) if d == axis else slice(None) for d in range(len(shape)))
        expected[first] = 0 if kind == "sum" else 1
    np.testing.assert_allclose(y, expected, rtol=1e-3)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("shape, dtype", [((2, 40_000), "float32"), ((33_000, 1), "float16"), ((1, 65_536), "int64")])
def test_long_lines_are_cut_into_tiles(shape, dtype, exclusive):
    axis = 0 if shape[1] == 1 else 1
    problem = ScanProblem(shape, axis, dtype, dtype, "sum", exclusive)
    totals = totals_problem(problem)
    assert totals.shape == (2, 5) or totals.shape[0] == 1
    x = np.random.default_rng(0).integers(-2, 3, shape).astype(dtype)
    sums, before = np.full((2, *totals.shape), 77, totals.dtype)
    y = np.full(shape, 77, dtype)
    for kernel, arrays in (
        (totals_kernel(problem), (x, sums)),
        (scan_kernel(totals), (sums, before)),
        (tiles_kernel(problem), (x, before, y)),
    ):
        assert is_one_launch(kernel)
        run(kernel, *arrays)
    np.testing.assert_array_equal(y, np.cumsum(x.astype("int64"), axis).astype(dtype) - (x if exclusive else 0))


def test_lines_that_are_many_or_short_stay_whole():
    assert [tiles_of(ScanProblem(s, 1, "float32", "float32", "sum", False)) for s in ((500, 40_000), (1, 9000))] == [
        1,
        1,
    ]


def test_sums_of_halves_are_kept_in_float32():
    x, y = np.full((1, 5000), 0.1, "float16"), np.zeros((1, 5000), "float16")
    run(scan_kernel(ScanProblem((1, 5000), 1, "float16", "float16", "sum", False)), x, y)
    np.testing.assert_allclose(y[0, -1], 5000 * float(np.float16(0.1)), rtol=1e-3)
