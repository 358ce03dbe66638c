"""Determinants against numpy in float64: any number and size of matrices, known or not, singular ones too."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relax_hetero.tir.determinant import determinant_kernel
from seeds import fresh_rng
from tir.kernel_runs import NAMES, built, poisoned


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_symbolic", [False, True])
def test_any_matrices(name, is_symbolic, tmp_path):
    shapes = [(1, 1), (3, 2), (5, 7), (2, 16), (4, 0), (0, 3)]
    extents = {shape: ("batch", "size") if is_symbolic else shape for shape in shapes}
    keys = {shape: f"determinant_{shape[0]}_{shape[1]}" for shape in shapes}
    module = built({keys[shape]: determinant_kernel(*extents[shape], "float32") for shape in shapes}, name, tmp_path)
    for batch, size in shapes:
        matrices = fresh_rng().uniform(-1, 1, (batch, size, size)).astype("float32")
        if size > 2:
            matrices[::2, 1] = 2 * matrices[::2, 0]
        actual = poisoned((batch,), "float32")
        module[keys[batch, size]](tvm.runtime.tensor(matrices), actual)
        np.testing.assert_allclose(actual.numpy(), np.linalg.det(matrices.astype("float64")), rtol=1e-6, atol=1e-12)
