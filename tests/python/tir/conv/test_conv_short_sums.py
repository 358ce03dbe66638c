"""Convolutions with short sums in float16; see `tir.microkernel.test_fp16_partial_sums`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm

from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.problem import ConvProblem, Window
from relax_hetero.tir.conv.convolution import conv_kernel
from seeds import fresh_rng
from tir.convolutions_of import conv_problem, random_operands, reference
from tir.kernel_runs import kernel, poisoned
from tir.microkernel.test_fp16_partial_sums import HALVES, needs_avx512, short_sums_cpu

SAME = Window(3, before=1, after=1)
WIDE = Window(3, 1, 2, 2, 2)
IMAGE = Window(7, 2, 1, 3, 3)
CASES = {
    "several sums a row": ((140, 40), (3, 16), (SAME, SAME), 1),
    "one sum a tile": ((20, 70), (3, 17), (SAME, SAME), 1),
    "channels left over": ((23, 33), (3, 15), (SAME, Window(3, 2, 2, 2, 1)), 1),
    "apart, many channels": ((41, 40), (3, 12), (WIDE, WIDE), 1),
    "pointwise, some skipped": ((32, 50), (7, 9), (Window(1, 2), Window(1, 3)), 1),
    "groups of 20": ((12, 40), (3, 11), (SAME, SAME), 2),
    "an image": ((3, 33), (9, 35), (IMAGE, IMAGE), 1),
}

pytestmark = [needs_avx512, pytest.mark.sampled(7)]


def _error(problem: ConvProblem, call, scale: float) -> float:
    arrays = [(array.astype("float32") * scale).astype("float16") for array in random_operands(problem, fresh_rng())]
    want = reference(problem, *arrays)
    out = poisoned(problem.result.layout.packed_shape(want.shape), "float32")
    stored = (operand.layout.pack(array) for operand, array in zip(problem.parameters, arrays, strict=False))
    call(*map(tvm.runtime.tensor, stored), out)
    got = problem.result.layout.unpack(out.numpy(), want.shape)
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


@pytest.mark.parametrize("case", CASES)
def test_the_error_is_small_in_range_and_that_of_float32_out_of_it(case: str, tmp_path: Path) -> None:
    channels, extents, windows, groups = CASES[case]
    cpu = short_sums_cpu()
    layout = PackedLayout((0, 2, 3, 1), (1,), (2,)) if channels[0] == 3 else None
    problem = conv_problem(cpu, channels, extents, windows, groups, dtype=HALVES, data_layout=layout)
    call = kernel(conv_kernel(problem, cpu), "avx512", tmp_path)
    assert 1e-5 < _error(problem, call, 1.0) < 1.5e-3
    for scale in (1e3, 3e-4):
        assert _error(problem, call, scale) < 2e-6
