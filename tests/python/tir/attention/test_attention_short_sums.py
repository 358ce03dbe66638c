"""Attention with short sums in float16; see `tir.microkernel.test_fp16_partial_sums`."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relax_hetero.tir.attention.attention import attention_kernel
from seeds import fresh_rng
from tir.attention_runs import Case, case, nan_tensor, problem_of, reference, stored
from tir.kernel_runs import target_of
from tir.microkernel.test_fp16_partial_sums import needs_avx512, short_sums_cpu

pytestmark = [needs_avx512, pytest.mark.sampled(4)]

CASES = {
    "ragged": case(2, 3, 1, 21, 37, 20, 33, dtype="float16"),
    "several blocks": case(1, 2, 2, 19, 530, 64, 40, dtype="float16"),
    "causal": case(1, 2, 2, 50, 151, 16, 16, dtype="float16", causal="bottom_right"),
    "symbolic": case(1, 2, 1, 9, 600, 16, 33, dtype="float16", symbolic=True),
    "not in pairs": case(1, 2, 2, 9, 19, 7, 16, dtype="float16"),
    "a query": case(1, 4, 2, 1, 70, 40, 33, dtype="float16"),
}


class Kernel:
    """A compiled attention."""

    def __init__(self, one: Case) -> None:
        function = attention_kernel(problem_of(one), short_sums_cpu())
        self._case, self._scratch = one, function.params[-1].shape
        self._built = tvm.compile(tvm.IRModule({"attention": function}), target=target_of("avx512"))

    def error(self, scales: tuple[float, float, float]) -> float:
        """The largest, relative to the largest value; query, key and value are multiplied by `scales`."""
        one, size, rng = self._case, self._case.sizes, fresh_rng()
        shapes = [[size[name] for name in dims] for dims in ("bhmd", "bgnd", "bgne")]
        heads = [(rng.standard_normal(s) * scale).astype("float16") for s, scale in zip(shapes, scales, strict=True)]
        want = reference(one, *(array.astype("float32") for array in heads))
        orders = ("bhmd", "bgnd", "bgne")
        inputs = [stored(*given) for given in zip(one.maps[:3], one.starts, heads, orders, strict=True)]
        out = tvm.runtime.tensor(stored(one.maps[3], 0, np.full(want.shape, np.nan, "float16"), "bhme"))
        self._built["attention"](*map(tvm.runtime.tensor, inputs), out, nan_tensor(self._scratch))
        return float(np.abs(out.numpy() - stored(one.maps[3], 0, want, "bhme")).max() / np.abs(heads[2]).max())


@pytest.mark.parametrize(
    "name", [name if name != "symbolic" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_in_range_and_out_of_it(name: str) -> None:
    kernel = Kernel(CASES[name])
    assert kernel.error((1.0, 1.0, 1.0)) < 2e-3
    # Sums of values beyond 65,504, and of values that float16 keeps four digits of.
    for scale in (1e4, 3e-5):
        assert kernel.error((1.0, 1.0, scale)) < 2e-3
    # Products of queries and keys beyond 65,504: one key takes all.
    assert kernel.error((1e3, 1e3, 1.0)) < 2e-3
