"""The kernel of the tutorial on GPU kernels, run by the interpreter and compared with float64."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from gpu_interpreter import run

PAGE = Path(__file__).parents[5] / "docs" / "tutorials" / "gpu_kernel.md"


@pytest.mark.parametrize("sizes", [(100, 128, 256), (1, 64, 64), (33, 192, 448)])
def test_norm_and_product(sizes, tmp_path):
    path = tmp_path / "example.py"
    path.write_text(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1])
    m, n, k = sizes
    rng = np.random.default_rng(m)
    x, w = rng.standard_normal((m, k)).astype("float16"), rng.standard_normal((n, k)).astype("float16")
    y = np.full((m, n), np.nan, "float16")
    run(runpy.run_path(str(path))["norm_matmul"](m, n, k), x, w, y)
    wide = x.astype("float64")
    want = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) @ w.astype("float64").T
    np.testing.assert_allclose(y, want, rtol=2e-3, atol=2e-2)
