"""Products of the same few rows that one kernel computes, and those that stay apart."""

import numpy as np
import pytest
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

from modules import ir_module
from relax_hetero.transform.ir.kernels import called_prim_func, operations_of
from relax_hetero.transform.ir.rewriting import walk_bindings
from relax_hetero.transform.pipeline import pipeline_steps

WIDTH, DEPTH = 128, 64
GATE, UP = (np.full((DEPTH, WIDTH), value, "float16") for value in (1, 2))
BIAS = np.full(WIDTH, 3, "float32")


def after(rows=32, arch="sm_90a", bias=False, is_read=False, same_rows=True):
    """A gated feed-forward network up to its last matrix; `is_read`: the gate is a result, too."""

    @ir_module({"kind": "cuda", "arch": arch})
    def module(x: R.Tensor((rows, DEPTH), "float16"), other: R.Tensor((rows, DEPTH), "float16")):
        with R.dataflow():
            gate = R.matmul(x, R.const(GATE), out_dtype="float32")
            active = R.nn.silu(R.add(gate, R.const(BIAS)) if bias else gate)
            up = R.matmul(x if same_rows else other, R.const(UP), out_dtype="float32")
            y = R.astype(R.multiply(active, up), "float16")
            R.output(y, active)
        return (y, active) if is_read else y

    for step in pipeline_steps():
        module = step.run(module)
        if step.name == "MaterializeEncodings":
            assert_structural_equal(step.run(module), module)
            return module
    raise AssertionError("MaterializeEncodings is not there")


def products_of(module):
    """Names of kernels of products, and their operands."""
    calls = [b.value for b in walk_bindings(module["main"]) if called_prim_func(module, b.value) is not None]
    return [(call.args[0].name_hint, list(call.args[1].fields)) for call in calls if "matmul" in call.args[0].name_hint]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bias", [False, True])
def test_the_first_product_joins_the_one_that_reads_it(bias):
    module = after(bias=bias)
    ((name, (x, *constants)),) = products_of(module)
    assert name == f"matmul_pair_32x128x64_f16f16_cuda_0_{'add_' * bias}silu_multiply{'_cast' * (not bias)}"
    assert x.same_as(module["main"].params[0])
    # The weight of the sum x0, that of x1, and the operands of the first product's epilogue.
    assert [float(each.value.numpy().flat[0]) for each in constants] == [2, 1] + [3] * bias
    assert operations_of(module[name]) == 2 * 2 * 32 * WIDTH * DEPTH


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [{"rows": 65}, {"arch": "sm_80"}, {"is_read": True}, {"same_rows": False}])
def test_products_that_stay_apart(how):
    assert ["pair" in name for name, _ in products_of(after(**how))] == [False, False]
