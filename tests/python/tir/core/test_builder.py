"""Masks of the lanes of a vector that exist."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.problem import Operand
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.tir.core.builder import Function, lane_indices, lane_mask, masked_store, zeros
from relax_hetero.tir.core.view import OperandView
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("name", VECTOR_NAMES)
def test_masked_lanes_of_a_load_are_zero(name, dtype, tmp_path) -> None:
    """LLVM leaves such lanes undefined; here the second of two loads ends where memory does."""
    functions, last = {}, LANES - 1
    for count in range(1, LANES):
        function = Function("load")
        with function:
            size = count + last
            x, result = (
                OperandView(function, name, Operand((length,), dtype, ("n",), PackedLayout.identity(1)))
                for name, length in (("x", size), ("result", 2 * LANES))
            )
            with function.body():
                for view in (x, result):
                    view.open()
                for number, first in enumerate((0, last)):
                    vector = x.load({"n": tirx.const(first, "int64")}, "n", LANES, lane_mask(count, LANES))
                    result.store({"n": tirx.const(number * LANES, "int64")}, "n", vector, LANES)
        functions[f"load{count}"] = function.result
    module, kind = built(functions, name, tmp_path), numpy_dtype(dtype)
    for count in range(1, LANES):
        x = np.arange(1, count + last + 1).astype(kind)
        out = tvm.runtime.tensor(np.full(2 * LANES, 77, kind))
        module[f"load{count}"](tvm.runtime.tensor(x), out)
        want = np.zeros((2, LANES))
        want[0, :count], want[1, :count] = x[:count], x[last:]
        np.testing.assert_array_equal(out.numpy().astype("float64").reshape(2, LANES), want)
