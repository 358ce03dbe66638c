"""Cumulative sums and products of GPUs, run as CPU code, against numpy."""

import sys
from pathlib import Path

import numpy as np
import pytest

from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.loops.scan import ScanProblem, scan_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))
from on_cpu import run


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


def test_sums_of_halves_are_kept_in_float32():
    x, y = np.full((1, 5000), 0.1, "float16"), np.zeros((1, 5000), "float16")
    run(scan_kernel(ScanProblem((1, 5000), 1, "float16", "float16", "sum", False)), x, y)
    np.testing.assert_allclose(y[0, -1], 5000 * float(np.float16(0.1)), rtol=1e-3)
