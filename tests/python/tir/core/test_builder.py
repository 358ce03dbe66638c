"""Masks of the lanes of a vector that exist."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from relax_hetero.tir.core.builder import Function, lane_indices, lane_mask, masked_store, zeros
from tir.kernel_runs import VECTOR_NAMES, built

LANES = 4


def test_no_mask_where_all_lanes_are_known_to_exist() -> None:
    assert lane_mask(LANES, LANES) is None and lane_mask(LANES + 1, LANES) is None
    assert lane_mask(LANES - 1, LANES) is not None
    assert lane_mask(tirx.Var("n", "int64"), LANES) is not None


@pytest.mark.skipif(not VECTOR_NAMES, reason="needs a CPU with vectors")
def test_lanes_of_a_number_that_the_run_knows(tmp_path) -> None:
    function = Function("clear")
    with function:
        n = function.symbol("n")
        function.argument("count", (n,), "float32")
        result = function.argument("result", (LANES,), "float32")
        with function.body():
            index = lane_indices(tirx.const(0, "int64"), LANES)
            masked_store(result, index, zeros("float32", LANES), lane_mask(n, LANES))
            T.evaluate(0)
    clear = built({"clear": function.result}, VECTOR_NAMES[0], tmp_path)["clear"]
    for count in range(LANES + 2):
        out = tvm.runtime.tensor(np.ones(LANES, "float32"))
        clear(tvm.runtime.empty((count,), "float32"), out)
        assert out.numpy().tolist() == [0.0] * min(count, LANES) + [1.0] * max(LANES - count, 0)
